"""Several remedies against one overload: of what each would cost in seconds of serving, the cheapest that suffices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Kind = Literal["move", "drop", "reshard", "swap", "add", "restore"]
"""Requests move, layers are dropped, shared by several ranks, become smaller, an instance is added; layers return."""
EQUAL = 0.05
"""Prices that differ by no more than this share are equal: they are predictions."""


class PricedRemedy:
    """What a remedy costs, and what it gives."""

    seconds: float
    """Of serving that it costs; below zero: it is faster afterwards."""
    relieved_bytes: int
    """KV that is to be had then; below zero: that is given up."""


R = TypeVar("R", bound=PricedRemedy)


@dataclass(frozen=True)
class Offer(PricedRemedy):
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
    priced, why = suited(given, needed_bytes)
    lowest = min(price for price, _ in priced)
    near = [offer for price, offer in priced if price - lowest <= EQUAL * abs(lowest)]
    best = next((o for o in near if o.lossless), None) or next(o for price, o in priced if price == lowest)
    words = f"{needed_bytes:,} bytes lack; offered: {', '.join(map(str, given))}; {best.kind}: {why}"
    return Choice(best, best.relieved_bytes >= needed_bytes, words)


def suited(remedies: Sequence[R], needed_bytes: float) -> tuple[list[tuple[float, R]], str]:
    """Return the remedies to choose from, each with its price, and what the cheapest of them is, in words.

    Those that suffice, by their seconds; where none does, all, by the seconds for each of their bytes.
    """
    enough = [(remedy.seconds, remedy) for remedy in remedies if remedy.relieved_bytes >= needed_bytes]
    if enough:
        return enough, "the cheapest that suffices"
    prices = [each.seconds / each.relieved_bytes if each.relieved_bytes > 0 else math.inf for each in remedies]
    return list(zip(prices, remedies, strict=True)), "the cheapest for its bytes; none suffices"
