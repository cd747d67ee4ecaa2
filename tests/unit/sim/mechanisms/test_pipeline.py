"""Steps that several ranks compute: their seconds are those of the planner's own formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from elastic.engines.base import Request
from elastic.engines.core.step import ScheduledChunk, SequenceState, Step
from elastic.engines.pipeline.path import LayerPath
from elastic.engines.pipeline.turn import StageTimes
from elastic.planning.pipeline import chunk_cost
from elastic.sim.core.clock import VirtualClock, random_stream
from elastic.sim.core.executor import AnswerEnds
from elastic.sim.core.host import HostSharing, SharedHost
from elastic.sim.core.step_seconds import Noise
from elastic.sim.mechanisms.model import LayeredModel, Links
from elastic.sim.mechanisms.path_executor import PathExecutor
from elastic.sim.mechanisms.stage_turn import StageTurn
from elastic.sim.mechanisms.weights import PackedSteps
from elastic.sim.mechanisms.wires import Wires
from support.planning.pipelines import run_pipeline
from support.sim.fixed_seconds import FixedSeconds
from support.sim.layered_fleet import model

RANKS = ("a", "b", "c", "h")


def executor(layered: LayeredModel, path: LayerPath, clock: VirtualClock, turns: dict[str, StageTurn]) -> PathExecutor:
    wires, noise = Wires(clock, layered.links), Noise(0.0, random_stream(0, "none"))
    return PathExecutor(clock, layered, wires, turns, AnswerEnds({}), noise, lambda rank, layer: 1.0, path)


def step(number: int, tokens: int) -> Step:
    name = f"s{number}"
    chunk = ScheduledChunk(name, 0, (1,) * tokens, True, ((),))
    return Step(number, 0, (chunk,), (SequenceState(name, Request((1,) * tokens, 5), 0, 0),))


def ends(layered: LayeredModel, home: str, ranks: Sequence[str], sizes: Sequence[int]) -> list[float]:
    """Have steps of so many tokens, all given at once, go by a path; return when each was over."""
    clock = VirtualClock()
    turns = {rank: StageTurn(SharedHost(clock), clock) for rank in RANKS}
    made, found = executor(layered, LayerPath(home, tuple(ranks), shards=layered.shards), clock, turns), []
    for number, tokens in enumerate(sizes):
        made.execute(step(number, tokens)).add_done_callback(lambda _: found.append(clock.now))
    clock.run()
    return found


def parts_s(layered: LayeredModel, tokens: int) -> tuple[float, float]:
    """Seconds of a layer, and of the rest."""
    parts = layered.parts([chunk_cost.Chunk("", 0, tokens)])
    return parts.cut_s + parts.whole_s, parts.rest_s


@pytest.mark.parametrize("ranks", ["aabb", "abbb", "abcc"])
def test_batches_go_through_stages_as_the_timeline_has_them(ranks: str) -> None:
    layered = model(links=Links(bytes_s=1e12, hop_s=0.002))
    sizes = [40, 10, 100, 30, 64]
    stages = [ranks.count(rank) for rank in RANKS if rank in ranks]
    parts = [parts_s(layered, tokens) for tokens in sizes]
    seconds = [[*(layer_s * layers for layers in stages), rest_s] for layer_s, rest_s in parts]
    expected = [0.002 + done[-1] for done in run_pipeline(seconds, 0.002).ends_s]  # and the ids' way there
    assert ends(layered, "h", ranks, sizes) == pytest.approx(expected, rel=1e-3)


def test_a_step_that_one_rank_computes_takes_what_it_does_alone() -> None:
    layered = model()
    (found,) = ends(layered, "a", "aaaa", [50])
    assert found == pytest.approx(PackedSteps(layered).batch([chunk_cost.Chunk("", 0, 50)]))


def test_shards_halve_the_layers_and_add_two_exchanges_each() -> None:
    layered = model(shards=2, kv_shards=2, links=Links(bytes_s=1e8, hop_s=0.001))
    (found,) = ends(layered, "a", "abababab", [50])
    layer_s, rest_s = parts_s(layered, 50)
    once = 0.001 + 50 * layered.token_bytes / 1e8
    assert found == pytest.approx(once + 4 * layer_s / 2 + 8 * once + rest_s)  # the first are the ids' hidden states


def test_what_is_not_cut_every_rank_of_a_layer_computes() -> None:
    whole = model(shards=2, kv_shards=2, links=Links(bytes_s=1e12, hop_s=0.0))
    layered = replace(whole, rank=replace(whole.rank, cut=FixedSeconds(0.02)))
    (found,) = ends(layered, "a", "abababab", [50])
    layer_s, rest_s = parts_s(layered, 50)
    assert found == pytest.approx(4 * layer_s - 0.02 / 2 + rest_s, rel=1e-4)


def test_steps_of_two_instances_take_turns_between_exchanges() -> None:
    layered = model(shards=2, kv_shards=2, links=Links(bytes_s=1e12, hop_s=0.0))
    clock = VirtualClock()
    turns, done = {rank: StageTurn(SharedHost(clock), clock) for rank in RANKS}, []
    for home, tokens in (("a", 100), ("b", 10)):
        made = executor(layered, LayerPath(home, tuple("abababab"), shards=2), clock, turns)
        made.execute(step(0, tokens)).add_done_callback(lambda _, home=home: done.append((home, clock.now)))
    clock.run()
    (large_s, _), (small_s, rest_s) = (parts_s(layered, tokens) for tokens in (100, 10))
    assert done[0] == ("b", pytest.approx(4 * (large_s + small_s) / 2 + rest_s, rel=0.05))


def test_what_ranks_exchange_keeps_their_cores_from_computing_for_another_instance() -> None:
    free = model(shards=2, kv_shards=2, links=Links(bytes_s=1e12, hop_s=0.0))
    layered = replace(free, links=replace(free.links, core_s=0.003))

    def last_s(layered: LayeredModel, homes: str) -> float:
        clock = VirtualClock()
        turns = {rank: StageTurn(SharedHost(clock), clock) for rank in RANKS}
        for home in homes:
            executor(layered, LayerPath(home, tuple("abababab"), shards=2), clock, turns).execute(step(0, 50))
        clock.run()
        return clock.now

    assert last_s(layered, "a") == pytest.approx(last_s(free, "a") + 8 * 0.003)
    more_s = last_s(layered, "ab") - last_s(free, "ab")
    assert more_s == pytest.approx(17 * 0.003)  # of both, and the last one while nobody else computes


def test_each_run_of_layers_takes_of_its_rank_what_an_engine_does_around_links() -> None:
    free = model(links=Links(bytes_s=1e12, hop_s=0.0))
    layered = replace(free, links=replace(free.links, stage_s=0.003))

    def busy_s(layered: LayeredModel, path: str) -> tuple[float, float]:
        clock = VirtualClock()
        turns = {rank: StageTurn(SharedHost(clock), clock) for rank in RANKS}
        executor(layered, LayerPath("a", tuple(path)), clock, turns).execute(step(0, 50))
        clock.run()
        return turns["a"].times.busy_s, turns["b"].times.busy_s

    for path, runs in (("aabb", (1, 1)), ("abab", (2, 2)), ("aaaa", (0, 0))):
        more = [after - before for after, before in zip(busy_s(layered, path), busy_s(free, path), strict=True)]
        assert more == pytest.approx([count * 0.003 for count in runs])


def test_what_home_does_beside_its_turn_is_part_of_the_step_and_no_computing() -> None:
    free = model(links=Links(bytes_s=1e12, hop_s=0.0))
    layered = replace(free, beside_s=0.004)

    def played(layered: LayeredModel, homes: str) -> tuple[float, dict[str, StageTurn]]:
        clock = VirtualClock()
        turns = {rank: StageTurn(SharedHost(clock), clock) for rank in "ab"}
        for home in homes:
            executor(layered, LayerPath(home, tuple("aabb")), clock, turns).execute(step(0, 50))
        clock.run()
        return clock.now, turns

    before_s, before = played(free, "a")
    over_s, turns = played(layered, "a")
    assert over_s == pytest.approx(before_s)  # a step by itself takes what it did
    busy_s = {name: turn.times.busy_s for name, turn in before.items()}
    assert sum(turn.times.busy_s for turn in turns.values()) == pytest.approx(sum(busy_s.values()) - 0.004)
    assert turns["a"].times.busy_s + turns["a"].times.bubble_s == pytest.approx(
        over_s - 0.004
    )  # it waits for nobody then
    assert turns["b"].times.busy_s + turns["b"].times.bubble_s == pytest.approx(over_s)
    chunks = [chunk_cost.Chunk("", 0, 50)]
    assert PackedSteps(layered).batch(chunks) == PackedSteps(free).batch(chunks)


@pytest.mark.parametrize("sharing", [HostSharing(), HostSharing(contention=0.5)])
@pytest.mark.parametrize("engine_first", [False, True])
def test_an_engine_shares_its_core_with_who_has_the_turn_and_goes_before_who_asks_for_it(
    sharing: HostSharing, engine_first: bool
) -> None:
    clock, ended = VirtualClock(), list[tuple[str, float]]()
    turn = StageTurn(SharedHost(clock, sharing), clock)
    turn.expect(2)
    begins = [
        lambda: turn.compute(0.002, lambda: ended.append(("turn", clock.now))),
        lambda: turn.work_beside(0.004, lambda: ended.append(("engine", clock.now))),
    ]
    for begin in reversed(begins) if engine_first else begins:
        begin()
    assert not turn.idle
    clock.run()
    first, last = ("engine", "turn") if engine_first else ("turn", "engine")
    assert ended == [(first, pytest.approx(0.004)), (last, pytest.approx(0.006))]
    busy_s = 0.002 if engine_first else 0.004
    assert turn.times == StageTimes(pytest.approx(busy_s), pytest.approx(0.006 - busy_s))


def test_ranks_that_share_layers_have_bubbles_while_they_exchange() -> None:
    free = model(shards=2, kv_shards=2, links=Links(bytes_s=1e12, hop_s=1e-4, core_s=0.003))
    layered, clock, turns = replace(free, beside_s=0.01), VirtualClock(), dict[str, StageTurn]()
    turns.update({rank: StageTurn(SharedHost(clock), clock) for rank in RANKS})
    executor(layered, LayerPath("a", tuple("abababab"), shards=2), clock, turns).execute(step(0, 50))
    clock.run()
    for rank, beside_s in (("a", 0.01), ("b", 0.0)):
        times = turns[rank].times
        assert times.busy_s + times.bubble_s == pytest.approx(clock.now - beside_s)
        assert times.bubble_s > 8 * 0.003


def test_what_two_cores_compute_takes_no_longer_for_that_unless_they_share_memory() -> None:
    clock, ended = VirtualClock(), list[float]()
    host = SharedHost(clock)
    for core in ("a", "b"):
        host.compute(0.002, lambda: ended.append(clock.now), core=core)
    clock.run()
    assert ended == [pytest.approx(0.002)] * 2


def test_a_stage_has_bubbles_while_a_step_is_elsewhere_and_none_once_it_is_over() -> None:
    clock, layered = VirtualClock(), model(links=Links(bytes_s=1e12, hop_s=0.002))
    turns = {rank: StageTurn(SharedHost(clock), clock) for rank in RANKS}
    made = executor(layered, LayerPath("a", tuple("aaab")), clock, turns)
    clock.run(1.0)
    made.execute(step(0, 50))
    clock.run()
    over_s = clock.now - 1.0
    clock.run(clock.now + 5.0)
    layer_s, rest_s = parts_s(layered, 50)
    assert turns["a"].times.busy_s == pytest.approx(3 * layer_s + rest_s)
    assert turns["b"].times.busy_s == pytest.approx(layer_s)
    for rank in "ab":
        assert turns[rank].times.busy_s + turns[rank].times.bubble_s == pytest.approx(over_s)
    assert turns["c"].times == StageTimes()


def test_a_rank_that_hangs_ends_no_step_and_one_that_is_lost_fails_it() -> None:
    clock, layered = VirtualClock(), model()
    turns = {rank: StageTurn(SharedHost(clock), clock) for rank in RANKS}
    made = executor(layered, LayerPath("a", tuple("aabb")), clock, turns)
    turns["b"].hangs = True
    future = made.execute(step(0, 10))
    clock.run()
    assert not future.done()
    made.lose("b")
    before = turns["a"].times
    clock.run(clock.now + 5.0)
    assert turns["a"].times == before
    assert "was lost" in str(future.exception())


def test_ranks_that_compute_for_several_instances_slow_each_other_down_more_than_others() -> None:
    clock, ended = VirtualClock(), list[float]()
    host = SharedHost(clock, HostSharing(0.1, stages=0.4))
    for _ in range(2):
        StageTurn(host, clock, host.sharing.stages).compute(1.0, lambda: ended.append(clock.now))
    clock.run()
    assert ended == pytest.approx([1.5, 1.5])
    for _ in range(2):
        host.compute(1.0, lambda: ended.append(clock.now))
    clock.run()
    assert ended[2:] == pytest.approx([2.6, 2.6])
