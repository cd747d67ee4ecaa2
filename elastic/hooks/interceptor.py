"""What a call of a decoder layer does beside computing: its inputs travel, or are shared out."""

from __future__ import annotations

from typing import Any, Protocol

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class LayerInterceptor(Protocol):
    """Called by a layer's hooks, in the thread of the forward pass."""

    def enter(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        """What the layer is called with instead. None: with what it was given."""
        ...

    def leave(self, output: Any) -> Any:
        """What the layer returns instead. None: what it has returned; `output` is None after a forward that failed."""
        ...
