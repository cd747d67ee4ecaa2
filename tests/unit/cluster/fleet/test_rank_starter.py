"""Ranks that are started together: all that have come join, or end; none is left over, whatever is raised."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from elastic import Overload, StateError
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.overload.controller import OverloadController
from elastic.cluster.rank.spec import RankSpec
from support.cluster.fake_rank import FakeLauncher
from support.processes import wait_until


@contextmanager
def serving(launcher: FakeLauncher, **options: Any) -> Iterator[Fleet]:
    """A fleet of one rank, of which nothing is left at the end."""
    options = {"beat_timeout_s": 1e6, "hang_timeout_s": 1e6, "replace": False, **options}
    fleet = Fleet("no model", launch=launcher, **options)
    fleet.start()
    try:
        yield fleet
    finally:
        fleet.stop(drain=False)
    assert all(rank.lost for rank in launcher.ranks.values())


def present(fleet: Fleet) -> list[str]:
    return [instance.name for instance in fleet.status().instances]


@pytest.mark.parametrize("error", [OSError("too many open files"), MemoryError("no memory")])
def test_what_one_rank_raises_keeps_no_other_from_joining(error: Exception) -> None:
    class Failing(FakeLauncher):
        def start(self, spec: RankSpec) -> Any:
            if spec.name == "r2":
                raise error
            return super().start(spec)

    with serving(Failing()) as fleet:
        with pytest.raises(type(error), match=str(error)):
            fleet.scale_out(3)
        assert present(fleet) == ["r0", "r1", "r3"]


def test_ranks_end_that_had_not_joined_when_an_interrupt_came() -> None:
    loads = threading.Event()

    class Interrupted(FakeLauncher):
        def start(self, spec: RankSpec) -> Any:
            if spec.name == "r2":
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
                assert loads.wait(20)
            return super().start(spec)

    launcher = Interrupted()
    with serving(launcher) as fleet:
        with pytest.raises(KeyboardInterrupt):
            fleet.scale_out(2)
        assert launcher.ranks["r1"].lost
        loads.set()
        wait_until(lambda: "r2" in launcher.ranks and launcher.ranks["r2"].lost, "it came, and nobody has ended it")
        assert present(fleet) == ["r0"]


@pytest.mark.parametrize("error", [MemoryError("no memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["listen", "joined"])
def test_a_rank_ends_that_could_not_join(where: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise error

    class Failing(FakeLauncher):
        def start(self, spec: RankSpec) -> Any:
            rank = super().start(spec)
            if spec.name == "r1" and where == "listen":
                rank.listen = fail
            return rank

    launcher = Failing()
    with serving(launcher) as fleet:
        if where == "joined":
            fleet._starter.on_joined = fail
        with pytest.raises(type(error)):
            fleet.add()
        assert launcher.ranks["r1"].lost
        assert present(fleet) == ["r0"]
        assert fleet.status().totals.ranks_lost == 0


def test_a_policy_is_told_which_ranks_came_and_a_caller_what_one_raised() -> None:
    class Failing(FakeLauncher):
        def start(self, spec: RankSpec) -> Any:
            if spec.name in ("r1", "r3", "r5"):
                raise StateError("no room")
            return super().start(spec)

    with serving(Failing(), policy=Overload(scale_out=3, tick_s=1e6)) as fleet:
        (overload,) = fleet._policies._changing
        assert isinstance(overload, OverloadController)
        assert overload._add is not None
        with pytest.raises(StateError, match="no room"):
            overload._add(1)
        assert overload._add(2) == ("r2",)
        with pytest.raises(StateError, match="no room"):
            fleet.scale_out(2)
        assert present(fleet) == ["r0", "r2", "r4"]
