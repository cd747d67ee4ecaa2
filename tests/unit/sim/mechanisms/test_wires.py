"""Bytes in bulk share the rate of each rank, and let hidden states pass."""

from __future__ import annotations

import pytest

from elastic.sim.core.clock import VirtualClock
from elastic.sim.mechanisms.model import Links
from elastic.sim.mechanisms.wires import Wires


class Copies:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.wires = Wires(self.clock, Links(bytes_s=100.0, hop_s=0.5))
        self.ends: dict[str, float] = {}

    def copy(self, name: str, ranks: str, nbytes: float, *, at_s: float = 0.0, coordinated: bool = True) -> None:
        def done() -> None:
            self.ends[name] = self.clock.now

        self.clock.at(at_s, lambda: self.wires.copy(tuple(ranks), nbytes, done, coordinated=coordinated))


def test_copies_at_a_rank_share_its_rate_and_others_do_not() -> None:
    copies = Copies()
    copies.copy("one", "ab", 100.0)
    copies.copy("two", "bc", 100.0)
    copies.copy("far", "de", 100.0)
    copies.clock.run()
    assert copies.ends == pytest.approx({"far": 1.0, "one": 2.0, "two": 2.0})


def test_a_copy_goes_on_at_the_whole_rate_when_another_has_ended() -> None:
    copies = Copies()
    copies.copy("long", "ab", 300.0)
    copies.copy("short", "ab", 50.0, at_s=1.0)
    copies.clock.run()
    assert copies.ends == pytest.approx({"short": 2.0, "long": 3.5})  # nothing of the rate is lost, or had twice


@pytest.mark.parametrize(("coordinated", "hidden_s"), [(True, 0.5 + 0.2), (False, 0.5 + 0.4)])
def test_hidden_states_pass_coordinated_copies_and_share_with_others(coordinated: bool, hidden_s: float) -> None:
    copies, seen = Copies(), list[float]()
    copies.copy("bulk", "ab", 100.0, coordinated=coordinated)
    copies.clock.at(0.5, lambda: seen.append(copies.wires.hidden_s(("a", "c"), 20.0)))
    copies.clock.run()
    assert seen == [pytest.approx(hidden_s)]
    assert copies.ends["bulk"] > 1.0  # it had to wait


def test_what_goes_to_a_lost_rank_never_arrives() -> None:
    copies = Copies()
    copies.copy("lost", "ab", 100.0)
    copies.copy("kept", "bc", 100.0)
    copies.clock.at(1.0, lambda: copies.wires.forget("a"))
    copies.clock.run()
    assert copies.ends == pytest.approx({"kept": 1.5})
