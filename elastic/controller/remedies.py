"""Several remedies against one overload: of what each would cost in seconds of serving, the cheapest that suffices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["move", "drop", "reshard", "swap", "add", "restore"]
"""Requests move, layers are dropped, shared by several ranks, become smaller, an instance is added; layers return."""
EQUAL = 0.05
"""Prices that differ by no more than this share are equal: they are predictions."""


@dataclass(frozen=True)
class Offer:
    """What one mechanism would do against an overload."""

    kind: Kind
    seconds: float
    """Of serving that it costs; below zero: it is faster afterwards."""
    relieved_bytes: int
    """KV that requests which wait could have; below zero: that is given up."""
    lossless: bool = True
    """Whether answers stay the same."""
    largest_bytes: int | None = None
    """KV of the largest request that fits one instance then; None: it stays as it is."""

    def __str__(self) -> str:
        loss = "" if self.lossless else " with a loss of quality"
        return f"{self.kind} {self.seconds:.3g} s for {self.relieved_bytes:,} bytes{loss}"


@dataclass(frozen=True)
class Choice:
    """The offer that is taken, and why."""

    offer: Offer
    suffices: bool
    words: str
    """All offers with their prices, and which one is taken."""


def cheapest(offers: Sequence[Offer], needed_bytes: int, largest_bytes: int = 0) -> Choice | None:
    """Choose the cheapest offer that suffices; of equal price a lossless one, then the first. None: nothing is offered.

    `largest_bytes`: KV of a request that fits no instance as they are; only offers by which it would fit count. Where
    none suffices it is the cheapest for each byte. One that relieves nothing is none.
    """
    given = [o for o in offers if o.relieved_bytes > 0 and (o.largest_bytes or 0) >= largest_bytes]
    if not given:
        return None
    enough = [offer for offer in given if offer.relieved_bytes >= needed_bytes]
    prices = [offer.seconds if enough else offer.seconds / offer.relieved_bytes for offer in enough or given]
    lowest = min(prices)
    near = [o for o, price in zip(enough or given, prices, strict=True) if price - lowest <= EQUAL * abs(lowest)]
    best = next((offer for offer in near if offer.lossless), None)
    if best is None:
        best = (enough or given)[prices.index(lowest)]
    why = "the cheapest that suffices" if enough else "the cheapest for its bytes; none suffices"
    words = f"{needed_bytes:,} bytes lack; offered: {', '.join(map(str, given))}; {best.kind}: {why}"
    return Choice(best, bool(enough), words)
