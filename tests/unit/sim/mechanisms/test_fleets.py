"""The real groups, moves and policies of a fleet over simulated ranks: nothing is lost, nothing is computed twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from elastic.cluster.control import stage_questions as ask
from elastic.config import Overload
from elastic.controller.policies.arbiter import HORIZON_S
from elastic.controller.policies.overload import OverloadPolicy
from elastic.engines.pipeline.turn import StageTimes
from elastic.errors import StateError
from elastic.planning.pipeline.chunk_cost import ChunkCost
from elastic.sim.mechanisms.model import Links
from support.sim.layered_fleet import BLOCK, LAYERS, SECTORS, WEIGHTS, Play, burst, model, play

Fleets = Callable[..., Play]


@pytest.fixture
def fleets() -> Iterator[Fleets]:
    made: list[Play] = []

    def make(*args: Any, **options: Any) -> Play:
        made.append(play(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.fleet.finish()


def worst_s(made: Play) -> float:
    return max(told.ttft_s for told in made.told)


def loads(made: Play) -> dict[str, int]:
    return {name: instance.load().total_blocks for name, instance in made.fleet.instances.items()}


def test_a_drop_under_load_makes_room_and_a_restore_takes_it_back(fleets: Fleets) -> None:
    made = fleets(None, 2)
    made.come(burst(16))
    seen: dict[str, int] = {}
    clock = made.fleet.clock
    clock.at(0.6, lambda: made.fleet.call(lambda verbs: verbs.drop(LAYERS * WEIGHTS * 4096)))
    clock.at(3.0, lambda: seen.update(loads(made)))
    clock.at(12.0, lambda: made.fleet.call(lambda verbs: verbs.restore()))
    made.run()
    made.check_ends()
    made.check_computed()
    assert made.kinds() == ["dropped", "parted", "restored"]
    assert sum(seen.values()) == 2 * SECTORS + WEIGHTS  # the pages of one model, in sectors of all layers
    assert loads(made) == {"r0": SECTORS, "r1": SECTORS}
    dropped = made.fleet.log.events()[0]
    assert dropped.moved_bytes > 0
    assert 0 < dropped.stalled_ms < 1e3 * dropped.seconds


@pytest.mark.parametrize("form", [{}, {"exchange": "stall"}, {"layers_per_step": 1}])
def test_a_dry_run_under_load_says_how_long_a_drop_takes(fleets: Fleets, form: dict[str, Any]) -> None:
    made, drops = fleets(None, 2), []

    def act(verbs: Any) -> None:
        drops.extend(verbs.drop(LAYERS * WEIGHTS * 4096, dry_run=dry, **form) for dry in (True, False))

    made.come(burst(16))
    made.fleet.clock.at(0.6, lambda: made.fleet.call(act))
    made.run()
    planned, done = drops
    assert (planned.status, done.status) == ("planned", "applied")
    assert done.seconds / 2 < planned.seconds < 2 * done.seconds


def test_dry_runs_learn_how_fast_keys_and_values_are_copied_beside_steps(fleets: Fleets) -> None:
    made, drops = fleets(None, 2, layered=model(links=Links(bytes_s=2e5))), []

    def act(verbs: Any) -> None:
        drops.extend(verbs.drop(LAYERS * WEIGHTS * 4096, dry_run=dry) for dry in (True, False))

    for at_s in (0.0, 60.0):
        made.come(burst(16, at_s=at_s + 0.5))
        made.fleet.clock.at(at_s + 0.6, lambda: made.fleet.call(act))
        made.fleet.clock.at(at_s + 50.0, lambda: made.fleet.call(lambda verbs: verbs.restore()))
    made.run()
    assert [done.status for done in drops] == ["planned", "applied"] * 2
    first, second = drops[0].seconds / drops[1].seconds, drops[2].seconds / drops[3].seconds
    assert first < 0.2
    assert 0.5 < second < 2
    prices = [drops[number].price.seconds - HORIZON_S * drops[number].price.slower for number in (0, 2)]
    assert prices[1] > 5 * prices[0], "what copies took is in the price, too"


def test_what_a_rank_cannot_do_between_two_steps_is_told_to_whoever_asked(fleets: Fleets) -> None:
    made, asked = fleets(None, 1), list[Future[Any]]()
    made.come(burst(4))
    rank = made.fleet.instances["r0"]
    made.fleet.clock.at(0.6, lambda: asked.extend(rank.ask(ask.BeginExchange((0,))) for _ in range(2)))
    made.run()
    made.check_ends()
    first, second = asked
    assert first.result(0) is None
    with pytest.raises(StateError, match="an exchange has begun"):
        second.result(0)


def test_the_policy_of_drops_helps_where_requests_wait_for_memory(fleets: Fleets) -> None:
    waits, drops = fleets(None, 2), fleets("drop", 2)
    for made in (waits, drops):
        made.come(burst(16))
        made.run()
        made.check_ends()
        made.check_computed()
    assert waits.kinds() == []
    assert drops.kinds() == ["dropped", "parted", "restored"]
    assert worst_s(drops) < 0.5 * worst_s(waits)


def test_nothing_is_done_where_nothing_lacks(fleets: Fleets) -> None:
    made = fleets("drop", 2)
    made.come([(0.5 + number, 40, 20) for number in range(6)])
    made.run()
    made.check_ends()
    assert made.kinds() == []


def test_what_is_done_is_what_the_policy_said(fleets: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, frozenset[str]]] = []
    decide = OverloadPolicy.decide

    def noted(self: OverloadPolicy, snapshot: Any, state: Any) -> Any:
        plan = decide(self, snapshot, state)
        assert decide(OverloadPolicy(Overload()), snapshot, state) == plan
        said.extend(("dropped", frozenset(group.members)) for group in plan.drops)
        said.extend(("restored", frozenset(members)) for members in plan.restores)
        return plan

    monkeypatch.setattr(OverloadPolicy, "decide", noted)
    made = fleets("drop", 3)
    made.come(burst(20))
    made.run()
    made.check_ends()
    events = [event for event in made.fleet.log.events() if event.kind in ("dropped", "restored")]
    assert said == [(event.kind, frozenset(event.rank.split(","))) for event in events]
    assert {kind for kind, _ in said} == {"dropped", "restored"}


def test_layers_are_swapped_where_longer_steps_would_cost_more(fleets: Fleets) -> None:
    quick = model(packed=True, cost=ChunkCost(0.0, 0.0, 0.0, 3e-3, 3e-3))  # a hop between two ranks is a tenth of it
    made = fleets(Overload(lookahead=True, dwell_s=2.0), 2, layered=quick)
    made.come(burst(9, answer=256))
    made.run(more_s=20.0)
    made.check_ends()
    made.check_computed()
    assert set(made.kinds()) == {"overloaded", "swapped", "swapped back"}
    assert not any(rank.books.packed for rank in made.fleet.world.ranks.values())


def test_layers_are_swapped_where_the_steps_so_far_say_that_longer_ones_would_cost_more(fleets: Fleets) -> None:
    quick = model(packed=True, cost=ChunkCost(0.0, 0.0, 0.0, 1e-3, 1e-3))
    made = fleets(Overload(dwell_s=2.0), 2, layered=quick)
    made.come(burst(9, answer=256))
    made.run(more_s=20.0)
    made.check_ends()
    made.check_computed()
    assert made.kinds() == ["swapped", "swapped back"]
    assert "no instance has KV for them" in made.fleet.log.events()[0].why, "a drop would have been enough"


def test_requests_move_with_what_they_have(fleets: Fleets) -> None:
    made = fleets("balance", 2, routing="round_robin")
    made.come([(0.1 + 0.05 * n, 64, 150 if n % 2 else 8) for n in range(8)])
    made.run()
    made.check_ends()
    made.check_computed()
    assert "moved" in made.kinds()
    assert made.fleet.log.totals().recomputed_tokens == 0


def test_what_a_request_had_is_free_when_it_has_moved_from_a_rank_with_nothing_else_to_do(fleets: Fleets) -> None:
    made = fleets(None, 2, moves=True, routing="round_robin")
    made.come([(0.1, 64, 100)])
    made.fleet.clock.at(2.0, lambda: made.fleet.call(lambda verbs: verbs.move("q0", "r1")))
    made.run()
    made.check_ends()
    assert made.kinds() == ["moved"]
    assert [len(rank.blocks.live) for rank in made.fleet.instances.values()] == [0, 0]
    assert [rank.load.free_blocks for rank in made.fleet.dispatcher.instances.values()] == [SECTORS, SECTORS]


def test_requests_that_no_rank_could_hold_are_served_by_shards(fleets: Fleets) -> None:
    made = fleets("lengths", 2, layered=model(shards=2, kv_shards=2))
    long = (SECTORS + 10) * BLOCK
    made.come([*burst(3), (1.0, long - 50, 50)])
    made.run(more_s=20.0)
    made.check_ends()
    made.check_computed()
    assert made.kinds() == ["resharded", "resharded", "parted"]
    assert not made.fleet.verbs.groups()


@pytest.mark.parametrize("moves", [True, False])
def test_ranks_part_under_running_requests_whose_blocks_are_scattered(fleets: Fleets, *, moves: bool) -> None:
    """Requests grow side by side, so that each sector has blocks of four of a rank, and three of these leave."""
    made, parted = fleets(None, 2, layered=model(shards=2, kv_shards=2, sector_blocks=4), moves=moves), list[Any]()
    clock, home = made.fleet.clock, made.fleet.instances["r0"]
    made.fleet.call(lambda verbs: verbs.reshard(["r0", "r1"], tp=2))
    made.come([(1.0, 16, 320)] * 60)
    stay, used = [told for number, told in enumerate(made.told) if number % 8 < 2], list[int]()
    for told in made.told:
        if told not in stay:
            clock.at(21.0, partial(made.fleet.dispatcher.cancel, told.request.id, None))
    clock.at(21.9, lambda: used.append(home.memory.used_sectors))
    clock.at(22.0, lambda: made.fleet.call(lambda verbs: parted.append(verbs.reshard(["r0"], tp=1, timeout_s=2.0))))
    made.run(more_s=20.0)
    assert used[0] > SECTORS, "what lives lies in more sectors than a rank has by itself"
    assert parted[0].status == "applied", parted[0].why
    assert all(told.finishes == ["length"] and told.tokens == 320 for told in stay)


def test_an_instance_comes_where_no_drop_is_enough(fleets: Fleets) -> None:
    made = fleets(Overload(scale_out=1), 1, start_s=1.0)
    made.come(burst(12))
    made.run()
    made.check_ends()
    assert "joined" in made.kinds()
    assert len(made.fleet.dispatcher.instances) == 2


@pytest.mark.parametrize("at_s", [0.55, 1.2, 2.0, 5.0])
@pytest.mark.parametrize("kind", ["kill", "hang"])
def test_faults_of_a_group_lose_no_request(fleets: Fleets, kind: str, at_s: float) -> None:
    made = fleets("drop", 3, watch=True, moves=kind == "kill")
    made.come(burst(24))
    made.fleet.clock.at(at_s, lambda: getattr(made.fleet, kind)("r1"))
    made.run()
    made.check_ends()
    assert made.fleet.log.totals().ranks_lost == 1
    assert "r1" not in made.fleet.dispatcher.instances


@pytest.mark.parametrize("kind", ["kill", "hang"])
@pytest.mark.parametrize("bytes_s", [1e5, 3e5], ids=["fetching", "fetched"])
def test_who_fetches_weights_of_a_rank_that_is_lost_goes_on(fleets: Fleets, bytes_s: float, kind: str) -> None:
    """Both fetch half of each layer, in 6.6 or 2.2 s; what hangs is fenced after two, and may have them by then."""
    made = fleets(None, 2, watch=True, layered=model(shards=2, kv_shards=2, links=Links(bytes_s=bytes_s)))
    clock = made.fleet.clock
    made.fleet.call(lambda verbs: verbs.reshard(["r0", "r1"], tp=2))
    made.come([(1.0, 20, 300)] * 4)
    clock.at(5.0, lambda: made.fleet.call(lambda verbs: verbs.reshard(["r0"], tp=1)))
    clock.at(6.0, lambda: getattr(made.fleet, kind)("r1"))
    made.run()
    assert all(told.finishes == ["length"] for told in made.told)
    assert made.fleet.log.totals().ranks_lost == 1
    assert max(told.outputs[-1].at_s for told in made.told) < 60, "the other one waited to be taken for hung, too"


def test_a_request_that_fits_no_rank_which_is_left_ends_and_no_other_one(fleets: Fleets) -> None:
    made = fleets(None, 2, watch=True, layered=model(shards=2, kv_shards=2))
    made.fleet.call(lambda verbs: verbs.reshard(["r0", "r1"], tp=2))
    made.come([(1.0, (SECTORS + 10) * BLOCK - 100, 100), *burst(6, at_s=1.1)])
    made.fleet.clock.at(3.0, lambda: made.fleet.kill("r1"))
    made.run()
    assert [told.finishes for told in made.told] == [["failed"], *[["length"]] * 6]
    assert made.fleet.log.totals().ranks_lost == 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_of_a_lost_rank_come_from_one_that_has_them_sooner_than_from_files(fleets: Fleets, ranks: int) -> None:
    """With two ranks nobody has them: half of a model, which takes 20 s by the files."""
    from_files_s = 20.0
    links = Links(bytes_s=1e8, checkpoint_bytes_s=LAYERS // 2 * WEIGHTS * 4096 / from_files_s)
    made = fleets(None, ranks, watch=True, layered=model(links=links))
    halves = {"r0": range(LAYERS // 2, LAYERS), "r1": range(LAYERS // 2)}
    made.come(burst(4))
    clock = made.fleet.clock
    clock.at(0.6, lambda: made.fleet.call(lambda verbs: verbs.drop(layers=halves)))
    clock.at(3.0, lambda: made.fleet.kill("r1"))
    made.run()
    made.check_ends()
    assert made.kinds().count("recovered") == 1
    took_s = max(told.outputs[-1].at_s for told in made.told) - 3.0
    assert took_s >= from_files_s if ranks == 2 else took_s < 0.1 * from_files_s


def test_a_lost_rank_is_replaced_and_its_requests_keep_what_they_had(fleets: Fleets) -> None:
    made = fleets(None, 2, watch=True, moves=True, replaces=True, start_s=1.0)
    made.come(burst(8))
    made.fleet.clock.at(2.0, lambda: made.fleet.kill("r0"))
    made.run()
    made.check_ends()
    assert set(made.kinds()) == {"lost", "joined", "replaced", "requests resumed"}
    assert made.fleet.log.totals().recomputed_tokens == 0


def test_copies_that_are_not_coordinated_make_tokens_late(fleets: Fleets) -> None:
    slow, ends = model(links=Links(bytes_s=2e6, hop_s=1e-4)), []
    for coordinated in (True, False):
        made = fleets(Overload(coordinated=coordinated), 2, layered=slow)
        made.come(burst(16))
        made.run()
        made.check_ends()
        assert "dropped" in made.kinds()
        ends.append([told.outputs[-1].at_s for told in made.told])
    assert ends[0] != ends[1]


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_the_same_seed_is_the_same_run(fleets: Fleets, noise: float) -> None:
    runs = []
    for seed in (3, 3, 4):
        made = fleets(("balance", Overload(scale_out=1)), 2, layered=model(noise=noise), seed=seed, start_s=1.0)
        made.come(burst(14))
        made.run()
        made.check_ends()
        events = [(event.kind, event.when_s, event.rank) for event in made.fleet.log.events()]
        runs.append((events, [[output.at_s for output in told.outputs] for told in made.told]))
    assert runs[0] == runs[1]
    assert (runs[0] == runs[2]) is (noise == 0.0)


def seconds_of_one_with_work(made: Play) -> float:
    """Have layers be dropped, and one of two instances have all of the work; return when it was over."""
    made.come([(0.5 + 0.01 * n, 40, 2 if n % 2 else 100) for n in range(12)])
    made.fleet.clock.at(0.1, lambda: made.fleet.call(lambda verbs: verbs.drop(LAYERS * WEIGHTS * 4096)))
    made.run()
    made.fleet.call(lambda verbs: verbs.restore())
    made.fleet.threads.run(made.fleet.clock.now + 10.0)
    made.check_ends()
    made.check_computed()
    assert made.kinds() == ["dropped", "parted", "restored"]
    return max(told.outputs[-1].at_s for told in made.told) - 0.5


def test_stages_that_one_instance_has_for_itself_are_busy_with_two_batches(fleets: Fleets) -> None:
    slow = model(cost=ChunkCost(2e-7, 1e-7, 1e-4, 2e-2, 5e-3))  # most of a step is that of its requests
    single, filled = (fleets(None, 2, layered=slow, routing="round_robin") for _ in range(2))
    for rank in single.fleet.world.ranks.values():
        rank.instance.batches = lambda: 1
    assert seconds_of_one_with_work(filled) < 0.7 * seconds_of_one_with_work(single)
    assert [rank.instance.batches() for rank in filled.fleet.world.ranks.values()] == [1, 1]


@pytest.mark.parametrize("prompts", [(64,), (16, 200, 40)])
def test_two_stages_are_busy_while_prompts_wait_at_both_instances(fleets: Fleets, prompts: tuple[int, ...]) -> None:
    """Each for three fourths of the time at the least, with one batch of each instance in flight."""
    made = fleets(None, 2, layered=model(cost=ChunkCost(2e-7, 1e-7, 1e-4, 2e-2, 5e-3)), routing="round_robin")
    made.fleet.clock.at(0.1, lambda: made.fleet.call(lambda verbs: verbs.drop(LAYERS * WEIGHTS * 4096)))
    made.come([(5.0, prompts[number % len(prompts)], 1) for number in range(200)])
    seen: list[dict[str, StageTimes]] = []
    for at_s in (5.5, 7.0):
        made.fleet.clock.at(at_s, lambda: seen.append(made.fleet.stage_times()))
    made.run()
    made.check_ends()
    assert sorted(told.at_s + told.ttft_s for told in made.told)[-4] > 7.0, "prompts waited all the time"
    before, after = seen
    busy = {name: (after[name].busy_s - before[name].busy_s) / 1.5 for name in before}
    assert len(busy) == 2
    assert min(busy.values()) >= 0.75, busy
