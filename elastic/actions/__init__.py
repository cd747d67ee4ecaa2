"""The actions on a running model, one a file: prepared beside forward passes, committed between two, all or none.

Way in: `executor.ActionExecutor` and `executor.Mechanism`. The runtime imports it; it imports hooks, weights, the KV
cache.
"""
