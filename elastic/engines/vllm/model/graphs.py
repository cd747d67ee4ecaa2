"""When vLLM may replay its CUDA graphs: while every weight lies where it lay when they were captured.

A graph has the addresses of weights in it. A full layer that returns has its old ones; one that is packed, released, or
was moved to another range has not, and then a step is computed without graphs, until all are back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from elastic.errors import BackendUnavailable

Addresses = tuple[int | None, ...]
SWITCHES = (("cudagraph_dispatcher", "keys_initialized"), ("cudagraph_manager", "_graphs_captured"))
"""Where vLLM's two model runners note that there are graphs to replay."""


class CapturedGraphs:
    """The graphs of one worker. `addresses` gives those of all weights in pages; None for one that is not plain."""

    def __init__(self, runner: Any, addresses: Callable[[], Addresses]) -> None:
        self._addresses = addresses
        self._owner: Callable[[], Any] = lambda: None
        self._switch = ""
        self._captured: Addresses = ()
        for owner, switch in SWITCHES:
            if hasattr(getattr(runner, owner, None), switch):  # weak: graphs go with their worker
                self._owner, self._switch = weakref.ref(getattr(runner, owner)), switch

    def note_capture(self) -> None:
        """Note the addresses that graphs have in them now. Raises `BackendUnavailable` where they cannot be held."""
        owner = self._owner()
        if owner is None:
            raise BackendUnavailable(
                "this vLLM does not say whether it has CUDA graphs; start it with enforce_eager=True"
            )
        self._captured = self._addresses() if getattr(owner, self._switch) else ()

    def begin_step(self) -> None:
        """Have the next step replay graphs, or not. Inside the forward gate: no weight moves until the step ends."""
        if self._captured:
            setattr(self._owner(), self._switch, self._addresses() == self._captured)
