"""What goes between ranks: hidden states of steps, and bytes in bulk, which share the rate of each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from elastic.sim.core.clock import ScheduledEvent, VirtualClock
from elastic.sim.mechanisms.model import Links


@dataclass(eq=False)
class _Flow:
    ends: tuple[str, ...]
    left: float
    done: Callable[[], object]
    lost: Callable[[str], object]
    coordinated: bool
    rate: float = 0.0
    due: ScheduledEvent | None = None


class Wires:
    """One for a fleet. Bytes in bulk at a rank share its rate evenly.

    Coordinated ones stop while hidden states pass; others share the rate with these too. (KunServe, section 4.2)
    """

    def __init__(self, clock: VirtualClock, links: Links) -> None:
        self._clock, self._links = clock, links
        self._flows: dict[_Flow, None] = {}
        self._at = 0.0

    def copy(
        self,
        ends: tuple[str, ...],
        nbytes: float,
        done: Callable[[], object],
        *,
        lost: Callable[[str], object] = lambda rank: None,
        coordinated: bool = True,
    ) -> None:
        """Have bytes go between ranks; `done` is called when they are there, `lost` when one is forgotten."""
        self._advance()
        self._flows[_Flow(ends, nbytes, done, lost, coordinated)] = None
        self._share_out()

    def hidden_s(self, ends: tuple[str, ...], nbytes: float, times: int = 1) -> float:
        """Return the seconds of a step's hidden states on their way, so many times; bulk has to wait for them."""
        nbytes *= times
        self._advance()
        passing = [flow for flow in self._flows if not set(ends).isdisjoint(flow.ends)]
        for flow in passing:
            flow.left += nbytes * (1 if flow.coordinated else 0.5)
        if passing:
            self._share_out()
        others = sum(not flow.coordinated for flow in passing)
        return times * self._links.hop_s + (1 + others) * nbytes / self._links.bytes_s

    def forget(self, rank: str) -> None:
        """Have what goes to or from a rank that was lost never arrive."""
        self._advance()
        flows = [flow for flow in self._flows if rank in flow.ends]
        for flow in flows:
            del self._flows[flow]
            if flow.due is not None:
                flow.due.cancel()
        self._share_out()
        for flow in flows:
            flow.lost(rank)

    def _advance(self) -> None:
        """Count what has gone since the last time."""
        seconds, self._at = self._clock.now - self._at, self._clock.now
        for flow in self._flows:
            flow.left = max(0.0, flow.left - flow.rate * seconds)

    def _share_out(self) -> None:
        ends = Counter(end for flow in self._flows for end in flow.ends)
        for flow in self._flows:
            flow.rate = self._links.bytes_s / max((ends[end] for end in flow.ends), default=1)
            if flow.due is not None:
                flow.due.cancel()
            flow.due = self._clock.after(flow.left / flow.rate, partial(self._end, flow))

    def _end(self, flow: _Flow) -> None:
        self._advance()
        del self._flows[flow]
        self._share_out()
        flow.done()
