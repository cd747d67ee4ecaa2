"""Open-loop replay of a trace to an engine or a server, and the record of each request.

Way in: `replay`, `http_target.HTTPTarget`. It imports `elastic.bench.traces` and the engine's protocol.
"""

from elastic.bench.replay.open_loop import replay

__all__ = ["replay"]
