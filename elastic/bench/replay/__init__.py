"""Sending a trace to an engine or a server, open loop, and taking down what comes of it.

Way in: `replay`, `http_target.HTTPTarget`. It imports `elastic.bench.traces` and the engine's protocol.
"""

from elastic.bench.replay.open_loop import replay

__all__ = ["replay"]
