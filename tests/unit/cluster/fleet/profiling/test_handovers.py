"""What engines take around links: by the gaps of ranks that are whole, in stages and sharing layers."""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.profiling import handovers
from elastic.cluster.fleet.profiling.guest import LinkProfilingProcess
from elastic.cluster.fleet.profiling.handovers import (
    LAYERS,
    TimedAnswer,
    fitted,
    hidden_size,
    measure_handovers,
    place_bytes,
)
from elastic.errors import StateError
from elastic.estimation.profile import ROUNDS
from elastic.estimation.profiles import guest
from elastic.estimation.profiles.store import from_json
from elastic.planning.estimate.performance import Handovers, InstanceCost
from elastic.planning.measured_cost import LinearLatency
from elastic.planning.pipeline.chunk_cost import Chunk, ChunkCost
from support.child_process import TESTS, Forked, in_fork
from support.processes import children, wait_for_end, wait_until

LINK, HIDDEN = LinearLatency(1e-4, 1e-9), 256
TOKEN = [Chunk("", 5, 1)]
two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need a core each")


def instance(stages: int, sums: int, known: Handovers) -> InstanceCost:
    """An instance of the model that is measured, whose layers take the same however they are cut."""
    layer, hidden = ChunkCost(0, 0, 0, 0, 2e-4), 4 * HIDDEN
    parts = tuple(((layer, LAYERS // stages),) for _ in range(stages))
    return InstanceCost(parts, (sums,) * stages, LINK, LINK, hidden, handovers=known)


def answers(gaps: dict[str, float], computed_s: float) -> dict[str, list[TimedAnswer]]:
    """Three of each kind, of eight tokens; one of each was disturbed in a step."""
    even = {how: TimedAnswer([gap] * 7, 8 * computed_s) for how, gap in gaps.items()}
    return {how: [each, TimedAnswer([*each.gaps_s[1:], 1.0], each.busy_s + 2.0), each] for how, each in even.items()}


def test_what_is_known_of_engines_is_fitted_again_from_their_passes() -> None:
    known = Handovers(7e-4, 3e-4, 4e-4)
    cut = {"whole": (1, 0), "staged": (2, 0), "shared": (1, 2 * LAYERS)}
    gaps = {how: instance(*counts, known).pass_s(TOKEN) for how, counts in cut.items()}
    gaps["shared"] += 2e-3
    told = fitted(answers(gaps, instance(1, 0, Handovers()).pass_s(TOKEN)), LINK(4 * HIDDEN), 2e-3)
    assert asdict(told) == pytest.approx(asdict(known))


def test_none_is_below_zero() -> None:
    assert fitted(answers(dict.fromkeys(handovers.TOGETHER, 5e-3), 6e-3), LINK(4 * HIDDEN)) == Handovers()


@pytest.mark.parametrize(("cached", "hidden"), [(0, 128), (8 << 20, 384), (32 << 20, 768), (1 << 30, 1536)])
def test_no_cache_holds_what_is_read_and_what_is_read_has_a_bound(
    monkeypatch: pytest.MonkeyPatch, cached: int, hidden: int
) -> None:
    monkeypatch.setattr(handovers, "cached_bytes", lambda _: cached)
    assert hidden_size() == hidden
    assert place_bytes() > min(2 * cached, handovers.MOST_BYTES)


def test_stages_are_busy_with_them_and_a_rank_by_itself_has_those_of_a_step() -> None:
    plain, with_them = (instance(2, 0, each) for each in (Handovers(), Handovers(1e-3, 1e-3)))
    assert with_them.stage_s(0, TOKEN) == pytest.approx(plain.stage_s(0, TOKEN) + 1e-3)
    assert with_them.pass_s(TOKEN) == pytest.approx(plain.pass_s(TOKEN) + 2e-3)
    alone, stages = instance(1, 0, Handovers(1e-3, 1e-3, 1e-4)), instance(2, 0, Handovers(step_s=1e-4))
    assert alone.pass_s(TOKEN) == pytest.approx(instance(1, 0, Handovers()).pass_s(TOKEN) + 1e-4)
    assert stages.pass_s(TOKEN) == pytest.approx(plain.pass_s(TOKEN) + 1e-4)  # once, not for each stage


def test_one_core_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with pytest.raises(StateError, match="one core alone"):
        measure_handovers(LINK)


@pytest.mark.slow
@two_cores
def test_real_ranks_are_whole_in_stages_and_share_layers_and_rest_behind_each_answer(
    launcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handovers, "Fleet", partial(Fleet, launch=launcher))
    monkeypatch.setattr(handovers, "cached_bytes", lambda _: 0)
    rests: list[float] = []
    told = measure_handovers(LINK, 0.1, 1, rests.append)
    assert told.stage_s >= 0
    assert told.exchange_s >= 0
    assert told.step_s >= 0
    assert len(rests) == 2 * len(handovers.TOGETHER) + ROUNDS + 1  # and behind each reading of weights


@pytest.mark.slow
@two_cores
def test_a_guest_measures_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fork, as the fork server of its ranks is; the other rank of a link is a new interpreter."""
    commands: list[list[str]] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            guest.subprocess, "Popen", lambda command, **_: commands.append(command) or SimpleNamespace(pid=0)
        )
        patch.setattr(guest.os, "setpriority", lambda *_: None)
        LinkProfilingProcess(0.9, repeats=1, rounds=1, handover_rounds=1)._output.close()
    ((_, option, module, *arguments),) = commands
    code = f"""
        import runpy, sys
        sys.path.append({TESTS!r})
        from support.isolation.forked_server import fork_the_server
        fork_the_server()
        sys.argv[1:] = {arguments}
        runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
    """
    assert option == "-m"
    measured = from_json(json.loads(in_fork(code)))
    assert measured.layers == measured.around == {}
    assert measured.link is not None


@pytest.mark.slow
@two_cores
def test_a_guest_that_is_killed_leaves_no_process() -> None:
    with closing(
        Forked("""
            from elastic.cluster.fleet.profiling.guest import measure_two_ranks
            from elastic.estimation.profiles.guest import run_guest
            run_guest(lambda: measure_two_ranks(1 << 20, share=0.9))
        """)
    ) as process:
        wait_until(lambda: len(children(process.pid)) == 2)  # the other rank, and what multiprocessing keeps
        started = children(process.pid)
    for pid in started:
        wait_for_end(pid)
