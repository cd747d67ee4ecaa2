"""Ranks in simulated time that compute layers for each other, have them in variants, and give requests away.

Who asks them is the real fleet: its groups, moves and policies. Way in: `fleet.ElasticFleet`.
"""
