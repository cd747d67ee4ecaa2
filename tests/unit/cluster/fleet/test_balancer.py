"""Which move the thread makes: that of a plan of all instances, of which it reads two."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.cluster.fleet.balancer import Balancer
from elastic.cluster.fleet.planning.balance import InstanceBooks, plan_moves
from elastic.cluster.fleet.records.requests import new_record
from elastic.engines.base import Request
from support.cluster.fake_rank import KV

NOW_S = 10.0


def balancer_of(rooms: list[tuple[int, list[tuple[int, int]]]], queue: list[int]) -> Balancer:
    """One whose instances have so many blocks, and requests of (prompt, answer) tokens; all have begun."""
    instances: dict[str, Any] = {}
    for number, (blocks, requests) in enumerate(rooms):
        records = {
            f"{number}-{i}": new_record(Request((1,) * p, a, id=f"{number}-{i}"), print, 0.0)
            for i, (p, a) in enumerate(requests)
        }
        for record in records.values():
            record.begun = True
        instances[f"r{number}"] = SimpleNamespace(
            name=f"r{number}",
            state="serving",
            group=(),
            limit_changes=0,
            load=SimpleNamespace(total_blocks=blocks),
            records=records,
            sequences=len(records),
            kv_format=KV,
            hello=SimpleNamespace(max_requests=8),
        )
    waiting = [new_record(Request((1,) * tokens, 1), print, 0.0) for tokens in queue]
    dispatcher: Any = SimpleNamespace(
        lock=nullcontext(),
        instances=instances,
        serving=lambda: list(instances.values()),
        queue=waiting,
        clock=lambda: NOW_S,
    )
    return Balancer(dispatcher, None)  # type: ignore[arg-type]


REQUESTS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=4)
ROOMS = st.lists(st.tuples(st.integers(10, 40), REQUESTS), min_size=2, max_size=5)


@given(ROOMS, st.lists(st.integers(1, 120), max_size=1))
def test_the_move_is_that_of_a_plan_of_all_instances(
    rooms: list[tuple[int, list[tuple[int, int]]]], queue: list[int]
) -> None:
    balancer = balancer_of(rooms, queue)
    instances = list(balancer._dispatcher.instances.values())
    books = [balancer._books(instance) for instance in instances]
    head = balancer._dispatcher.queue[0] if queue else None
    plan = plan_moves(books, None if head is None else -(-(len(head.request.prompt) + 1) // KV.block_tokens))
    assert balancer.next_move() == next(iter(plan), None)


def test_without_a_queue_the_requests_of_two_instances_are_read() -> None:
    balancer, read = balancer_of([(20, [(30, 8)] * 2), (20, [(4, 4)]), (20, []), (20, [(8, 8)])], []), []
    real = balancer._books

    def noted(instance: Any) -> InstanceBooks:
        read.append(instance.name)
        return real(instance)

    balancer._books = noted  # type: ignore[method-assign]
    move = balancer.next_move()
    assert move is not None
    assert (move.source, move.target) == ("r0", "r2")
    assert read == ["r0", "r2"]


CASES = pytest.mark.parametrize(("blocks", "queue"), [((20, 20), []), ((24, 13), [55])])
"""Blocks of two instances, of which the first has two requests too many, also for one that waits."""


@CASES
def test_nothing_moves_to_where_a_limit_is_being_changed(blocks: tuple[int, int], queue: list[int]) -> None:
    balancer = balancer_of([(blocks[0], [(30, 8)] * 2), (blocks[1], [(4, 4)])], queue)
    instances = balancer._dispatcher.instances
    assert balancer.next_move() is not None
    instances["r1"].limit_changes = 1
    assert balancer.next_move() is None


@CASES
def test_a_request_does_not_move_to_where_it_was_refused(blocks: tuple[int, int], queue: list[int]) -> None:
    balancer = balancer_of([(blocks[0], [(30, 8)] * 2), (blocks[1], [(4, 4)])], queue)
    records = balancer._dispatcher.instances["r0"].records
    first = balancer.next_move()
    assert first is not None
    records[first.request].refused["r1"] = math.inf
    other = balancer.next_move()
    assert other is not None
    assert {first.request, other.request} == {"0-0", "0-1"}
    records[other.request].refused["r1"] = NOW_S + 1
    assert balancer.next_move() is None
    records[other.request].refused["r1"] = NOW_S
    assert balancer.next_move() == other
