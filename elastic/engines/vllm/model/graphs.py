"""When vLLM may replay its CUDA graphs: while every weight lies where it lay when they were captured.

A graph has the addresses of weights in it. A full layer that returns has its old ones; one that is packed, released, or
was moved to another range has not, and then a step is computed without graphs, until all are back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from elastic.errors import BackendUnavailable
from elastic.hooks.forward_gate import ForwardGate

Addresses = tuple[int | None, ...]
SWITCHES = (("cudagraph_dispatcher", "keys_initialized"), ("cudagraph_manager", "_graphs_captured"))
"""Where vLLM's two model runners note that there are graphs to replay."""


class CapturedGraphs:
    """The graphs of one worker. `addresses` gives those of all weights in pages; None for one that is not plain.

    They are looked at after commits alone: nothing else moves a weight.
    """

    def __init__(self, runner: Any, addresses: Callable[[], Addresses], gate: ForwardGate) -> None:
        self._addresses = addresses
        self._gate = gate
        self.commits = -1
        """Of the gate, when addresses were last looked at: later ones ask for `update`."""
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

    def update(self) -> None:
        """Have the next steps replay graphs, or not. While no action can commit."""
        self.commits = self._gate.commits
        if self._captured:
            setattr(self._owner(), self._switch, self._addresses() == self._captured)
