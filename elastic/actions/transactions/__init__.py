"""Transactions: actions that are prepared, committed or rolled back together, at once or in two calls.

Way in: `executor.ActionExecutor`. The runtime imports it; it imports the interface of the actions' handlers.
"""
