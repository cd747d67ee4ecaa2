"""Random fleets with policies, verbs and faults: each request ends once, and what it had is free then."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.config import Lengths, Overload
from elastic.engines.base import Listener, Output, Request
from elastic.errors import CapacityError, Overloaded
from elastic.sim.mechanisms.model import Links
from support.sim.layered_fleet import BLOCK, SECTORS, WEIGHTS, Play, model, play

POLICIES = {"balance": "balance", "drop": Overload(dwell_s=2.0), "lengths": Lengths(dwell_s=3.0, wait_s=2.0)}


def act(made: Play, kind: str, choose: random.Random) -> None:
    """Have something befall a fleet; what cannot be is refused."""
    fleet, names = made.fleet, tuple(made.fleet.dispatcher.instances)
    if kind == "cancel":
        fleet.dispatcher.cancel(choose.choice(made.told).request.id, None)
    elif kind in ("kill", "hang") and names:
        getattr(fleet, kind)(choose.choice(names))
    elif kind == "drop":
        fleet.call(lambda verbs: verbs.drop(2 * WEIGHTS * 4096, timeout_s=5.0))
    elif kind == "restore":
        fleet.call(lambda verbs: verbs.restore(timeout_s=5.0))
    elif names:
        shared = kind == "share"
        fleet.call(lambda verbs: verbs.reshard(names[: 1 + shared], tp=1 + shared, timeout_s=5.0))


def refuse_in_words(made: Play) -> None:
    """Have a request that is refused as it comes be told so, as one that fails."""
    submit = made.fleet.submit

    def offer(request: Request, listener: Listener) -> None:
        try:
            submit(request, listener)
        except (CapacityError, Overloaded) as error:
            listener(Output(request.id, (), "failed", str(error), made.fleet.clock.now))

    made.fleet.submit = offer  # type: ignore[method-assign]


def check_ranks(made: Play) -> None:
    """Nothing is in use, on its way, or waited for; nobody was busy for longer than there was time."""
    assert not made.fleet.world.wires._flows
    for name in made.fleet.dispatcher.instances:
        rank = made.fleet.world.ranks[name]
        instance, blocks, times = rank.instance, rank.instance.blocks, rank.turn.times
        assert not any((blocks.live, blocks.tables, blocks.waiting, *(pool.in_use for pool in blocks.pools))), name
        doing = instance.paused, instance._in_flight, instance._between, instance._coming, rank.written
        assert not any(doing), (name, doing)
        assert not any((rank.moves._received, rank.moves._held, rank.books.coming)), name
        assert times.busy_s + times.bubble_s <= made.fleet.clock.now + 1e-6


@pytest.mark.slow
@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    policies=st.sets(st.sampled_from(sorted(POLICIES))),
    acts=st.lists(
        st.tuples(
            st.floats(1.0, 12.0), st.sampled_from(["cancel", "kill", "hang", "drop", "restore", "share", "part"])
        ),
        max_size=4,
    ),
    bytes_s=st.sampled_from([3e5, 1e8]),
    moves=st.booleans(),
)
def test_each_request_ends_once_and_leaves_nothing(
    seed: int, policies: set[str], acts: list[tuple[float, str]], bytes_s: float, *, moves: bool
) -> None:
    choose = random.Random(seed)
    layered = model(shards=2, kv_shards=2, sector_blocks=choose.choice([1, 4]), links=Links(bytes_s=bytes_s))
    chosen: Any = tuple(POLICIES[name] for name in sorted(policies)) or None
    made = play(chosen, 3, layered=layered, watch=True, replaces=True, moves=moves, start_s=1.0)
    refuse_in_words(made)
    long = [(0.5, (SECTORS + 10) * BLOCK - 60, 40)] * ("lengths" in policies)
    sizes = ([5, 40, 200], [1, 8, 150])
    made.come(sorted([(choose.uniform(0.1, 10.0), *map(choose.choice, sizes)) for _ in range(15)] + long))
    for at_s, kind in acts:
        made.fleet.clock.at(at_s, lambda kind=kind: act(made, kind, choose))  # type: ignore[misc]
    try:
        made.run(more_s=30.0)
        for told in made.told:
            (finish,) = told.finishes
            times = [told.at_s, *(output.at_s for output in told.outputs)]
            assert times == sorted(times)
            assert finish == "length" or any(kind == "cancel" for _, kind in acts) or told.request.id in failed(made)
            assert told.tokens == told.request.max_tokens or finish != "length"
        check_ranks(made)
    finally:
        made.fleet.finish()


def failed(made: Play) -> set[str]:
    """Requests that no rank could hold which was left."""
    return {told.request.id for told in made.told if "fit" in (told.outputs[-1].error or "")}
