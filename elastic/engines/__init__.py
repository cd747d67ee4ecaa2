"""Engines: they serve requests with a wrapped model.

Way in: `base.Engine`, the protocol that the server and `elastic bench` know; `continuous.ContinuousEngine`.
"""
