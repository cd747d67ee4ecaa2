"""Ranks of one host have no more memory together than there is of it: refused in words, before one is started."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic import ConfigError
from elastic.assets import MODEL_DIR
from elastic.cluster.control.messages import RankPlace
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.joining.memory_check import require_memory_together
from elastic.cluster.rank.spec import RankSpec, rank_places
from elastic.config import Place
from elastic.memory.backends.shared_file import host_name
from elastic.memory.places import total_bytes
from support.cluster.fake_rank import FakeLauncher, FakeRank

HALF = RankPlace("cpu=50", "cpu", "cpu", 50, 100)
TOTAL = total_bytes(Place.parse("cpu").device)


def refuses(*places: RankPlace) -> bool:
    try:
        require_memory_together("rank 'r9' is refused", {(str(pid), p.name): p for pid, p in enumerate(places)})
    except ConfigError:
        return True
    return False


def test_all_that_there_is_may_be_had() -> None:
    assert not refuses(HALF, HALF)
    assert refuses(HALF, HALF, replace(HALF, budget_bytes=1))
    assert not refuses(HALF, HALF, replace(HALF, budget_bytes=None))


def test_each_memory_is_by_itself() -> None:
    assert not refuses(HALF, HALF, replace(HALF, memory="GPU-1", budget_bytes=100))
    assert refuses(replace(HALF, memory="GPU-1"), replace(HALF, memory="GPU-1", budget_bytes=51))


def test_the_process_that_may_have_least_says_how_much_there_is() -> None:
    assert refuses(HALF, replace(HALF, total_bytes=99))


def test_the_words_name_the_memory_and_the_remedy() -> None:
    words = r"rank 'r9' is refused: the 2 places of ranks in this memory \(cpu\) would have budgets of 101 bytes "
    with pytest.raises(ConfigError, match=words + "together; there are 100: give them less, or none"):
        require_memory_together("rank 'r9' is refused", {("1", "a"): HALF, ("2", "a"): replace(HALF, budget_bytes=51)})


def test_ranks_tell_what_they_have() -> None:
    first, second = rank_places(["cpu#a=1MiB", "cpu#b"])
    assert first == RankPlace("cpu#a=1MiB", "cpu#a", "cpu", 1 << 20, TOTAL)
    assert second == RankPlace("cpu#b", "cpu#b", "cpu", None, TOTAL)


def launcher(host: str, *, one_process: bool = False) -> FakeLauncher:
    """Of ranks that say to be on one host, each with half of its memory."""

    def make(spec: RankSpec) -> FakeRank:
        rank = FakeRank(spec.name)
        pid = 1 if one_process else int(spec.name[1:])
        rank.hello = replace(rank.hello, host=host, pid=pid, places=(HALF,))
        return rank

    return FakeLauncher(make)


def test_a_rank_is_refused_for_which_its_host_has_no_room() -> None:
    ranks = launcher("one")
    with Fleet("no model", ranks=2, launch=ranks, replace=False) as fleet:
        with pytest.raises(ConfigError, match=r"rank 'r2' is refused: the 3 places .* 150 bytes together"):
            fleet.add()
        assert [instance.name for instance in fleet.status().instances] == ["r0", "r1"]
        assert "150 bytes" in ranks.ranks["r2"].refused
        fleet.kill("r0")
        fleet.add()


def test_ranks_of_one_process_share_its_places() -> None:
    with Fleet("no model", ranks=3, launch=launcher("one", one_process=True)) as fleet:
        assert len(fleet.status().instances) == 3


def test_hosts_are_by_themselves() -> None:
    hosts = iter("aabb")

    def make(spec: RankSpec) -> FakeRank:
        rank = FakeRank(spec.name)
        rank.hello = replace(rank.hello, host=next(hosts), pid=int(spec.name[1:]), places=(HALF,))
        return rank

    with Fleet("no model", ranks=4, launch=FakeLauncher(make)) as fleet:
        assert len(fleet.status().instances) == 4


def test_local_ranks_are_compared_before_one_is_started() -> None:
    """Two budgets each of which the host could hold: the second rank would find that out when pages are short."""
    nbytes = TOTAL // 2 + (64 << 10)
    fleet = Fleet(str(MODEL_DIR), ranks=2, places=[f"cpu={nbytes}"])
    with pytest.raises(ConfigError, match=f"ranks r0, r1 cannot start: .* {2 * nbytes:,} bytes together; there are"):
        fleet.start()
    assert fleet.status().ranks == ()


def test_local_ranks_are_compared_with_those_that_are_there() -> None:
    ranks = launcher(host_name())
    with Fleet("no model", ranks=2, launch=ranks) as fleet:
        ranks.name = "local"
        with pytest.raises(ConfigError, match=r"ranks r2 cannot start: the 3 places .* 101 bytes together"):
            fleet.add(places=["cpu=1"])
        assert "r2" not in ranks.ranks
