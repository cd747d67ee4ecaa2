"""The actions on a running model, one a file: prepared beside forward passes, committed between two, all or none.

Way in: `transactions.executor.ActionExecutor`, `base.ActionHandler`. The runtime imports it; it imports hooks, weights,
the KV cache.
"""
