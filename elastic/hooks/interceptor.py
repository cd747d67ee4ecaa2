"""More than computing in a call of a decoder layer: its arguments go to another device, or its batch is split."""

from __future__ import annotations

from typing import Any, Protocol

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class LayerInterceptor(Protocol):
    """Called by a layer's hooks, in the thread of the forward pass."""

    def enter(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        """Return what the layer is called with instead. None: with what it was given."""

    def leave(self, output: Any) -> Any:
        """Return what the layer returns instead. None: `output`, which is None after a forward that failed."""
