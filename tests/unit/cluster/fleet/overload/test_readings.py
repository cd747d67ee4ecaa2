"""What the overload policy sees of a fleet, in bytes: capacity, promises, and what waits where."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic.cluster.control.messages import News
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.groups.results import GroupStatus
from elastic.cluster.fleet.overload import readings as overload_readings
from elastic.cluster.fleet.overload.readings import FleetReadings, needed_bytes
from elastic.cluster.fleet.records.requests import new_record
from elastic.controller.fleet_snapshot import GroupReading
from elastic.engines.base import Output, Request
from elastic.engines.core.kv_state import KVFormat
from elastic.engines.core.load import EngineLoad
from elastic.engines.pipeline.path import LayerPath
from support.cluster.fake_rank import BLOCK, KV, FakeLauncher, FakeRank
from support.serving.generations import Collector

EACH = KV.group_block_bytes
WEIGHTS = (10, 20)
PAIR = GroupStatus(
    ("r0", "r1"),
    {"r0": LayerPath("r0", ("r0", "r1"), 1), "r1": LayerPath("r1", ("r0", "r1"), 1)},
    {"r0": (0,), "r1": (1,)},
    {"r0": 15, "r1": 15},
    {"r0": 10, "r1": 10},
    shards={"r0": (0,), "r1": (1,)},
)


@pytest.fixture
def launcher() -> FakeLauncher:
    return FakeLauncher(lambda spec: FakeRank(spec.name, blocks=10))


@pytest.fixture
def fleet(launcher: FakeLauncher) -> Iterator[Fleet]:
    made = Fleet("no model", ranks=2, launch=launcher, replace=False, beat_timeout_s=1e6, hang_timeout_s=1e6)  # type: ignore[arg-type]
    made.start()
    yield made
    made.stop(drain=False)


def readings(fleet: Fleet) -> FleetReadings:
    return FleetReadings(fleet._dispatcher)


def test_an_instance_by_itself_has_what_it_said_last(fleet: Fleet, launcher: FakeLauncher) -> None:
    fleet.submit(Request((1,) * 5, 11), Collector())
    launcher.step()
    snapshot = readings(fleet).read((), WEIGHTS)
    assert snapshot is not None
    busy, idle = snapshot.groups
    assert [busy.names, idle.names] == [("r0",), ("r1",)]
    assert busy.capacity_bytes == busy.base_bytes == 10 * EACH
    assert (busy.committed_bytes, busy.members[0].home_bytes) == (4 * EACH, 4 * EACH)  # 16 tokens
    assert (busy.running, idle.running, idle.committed_bytes) == (1, 0, 0)
    assert busy.members[0].held.layers == frozenset((0, 1))
    assert (snapshot.layer_bytes, snapshot.queued_bytes, snapshot.queue_s) == (WEIGHTS, 0, 0.0)


def test_what_waits_at_the_fleet_counts_with_the_answer_that_is_usual(fleet: Fleet, launcher: FakeLauncher) -> None:
    for i in range(4):
        fleet.submit(Request((1,) * 8, 32, id=f"long-{i}"), Collector())  # all of an instance
        launcher.step()
    snapshot = readings(fleet).read((), WEIGHTS)
    assert snapshot is not None
    assert snapshot.queued_bytes == 2 * 40 * EACH // BLOCK
    assert snapshot.queue_s > 0
    fleet._dispatcher.answer_lengths.append(12)
    snapshot = readings(fleet).read((), WEIGHTS)
    assert snapshot is not None
    assert snapshot.queued_bytes == 2 * 20 * EACH // BLOCK


def test_what_an_instance_has_no_blocks_for_waits_at_it(fleet: Fleet, launcher: FakeLauncher) -> None:
    seen = readings(fleet)
    fleet.submit(Request((1,) * 4, 4, id="first"), Collector())
    launcher.step()
    home = fleet.instance_of("first")
    assert home is not None
    for i in range(4):
        fleet.submit(Request((1,) * 8, 8, id=f"more-{i}"), Collector())
    instance = fleet._dispatcher.instances[home]
    assert len(instance.records) == 3
    instance.hear(replace(instance.load, waiting=1), 0.0)
    snapshot = seen.read((), WEIGHTS)
    assert snapshot is not None
    group = next(group for group in snapshot.groups if group.names == (home,))
    assert group.waiting_bytes == 16 * EACH // BLOCK  # the last of the two that have not begun
    assert group.queue_s > 0


def test_answers_wait_at_an_instance_that_has_begun_others_of_their_request(
    fleet: Fleet, launcher: FakeLauncher
) -> None:
    fleet.submit(Request((1,) * 8, 8, id="several", n=4), lambda _: None)
    home = fleet.instance_of("several")
    assert home is not None
    rank = launcher.ranks[home]
    rank.on_message(News((Output("several", (7,)),), (0,), replace(rank.load(), running=1, waiting=3)))
    snapshot = readings(fleet).read((), WEIGHTS)
    assert snapshot is not None
    group = next(group for group in snapshot.groups if group.names == (home,))
    assert group.waiting_bytes == 3 * 8 * EACH // BLOCK  # the prompt is there
    assert group.queue_s > 0


def test_what_has_not_changed_is_not_read_again(
    fleet: Fleet, launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, read = readings(fleet), Counter[str]()
    real = overload_readings._reading

    def counted(instances: Any, *rest: Any) -> GroupReading:
        read.update(instance.name for instance in instances)
        return real(instances, *rest)

    monkeypatch.setattr(overload_readings, "_reading", counted)
    first = seen.read((), WEIGHTS)
    launcher.ranks["r0"].beat()
    again, busy = seen.read((), WEIGHTS), seen.read((), WEIGHTS, busy=True)
    assert first is not None and again is not None and busy is not None  # noqa: PT018
    assert first.groups == again.groups
    assert [group.busy for group in busy.groups] == [True, True]
    assert read == {"r0": 1, "r1": 1}
    fleet.submit(Request((1,) * 5, 11), Collector())
    launcher.step()
    after = seen.read((), WEIGHTS)
    assert after is not None
    assert [group.running for group in after.groups] == [1, 0]
    assert read["r0"] == 2
    assert seen.read((), (*WEIGHTS, 1)).groups[1].members[0].held.layers == frozenset(range(3))  # type: ignore[union-attr]


def test_how_long_a_request_waits_is_read_anew(fleet: Fleet) -> None:
    seen, instance = readings(fleet), fleet._dispatcher.instances["r0"]
    fleet.submit(Request((1,) * 8, 8), Collector())
    instance.hear(replace(instance.load, waiting=1), 0.0)
    first, second = (seen.read((), WEIGHTS) for _ in range(2))
    assert first is not None
    assert second is not None
    assert second.groups[0].queue_s > first.groups[0].queue_s


def test_a_group_has_the_capacity_of_its_members_and_remembers_what_they_had_alone(
    fleet: Fleet, launcher: FakeLauncher
) -> None:
    seen = readings(fleet)
    seen.read((), WEIGHTS)
    for rank in launcher.ranks.values():
        rank.blocks = 15
        rank.beat()
    snapshot = seen.read((PAIR,), WEIGHTS)
    assert snapshot is not None
    (group,) = snapshot.groups
    assert group.names == ("r0", "r1")
    assert [member.held.layers for member in group.members] == [frozenset((0,)), frozenset((1,))]
    assert (group.capacity_bytes, group.base_bytes) == (30 * EACH, 20 * EACH)


def test_a_group_that_has_lost_a_member_is_left_out(fleet: Fleet, launcher: FakeLauncher) -> None:
    launcher.ranks["r1"].die()
    seen = readings(fleet)
    assert seen.read((PAIR,), WEIGHTS) is None
    snapshot = seen.read((), WEIGHTS)
    assert snapshot is not None
    assert [group.names for group in snapshot.groups] == [("r0",)]
    launcher.ranks["r0"].die()
    assert seen.read((), WEIGHTS) is None


SLIDING = KVFormat(4, "head_centric", "float32", 2, 8, (((0,), None), ((1,), 8)))


@pytest.mark.parametrize(
    ("kv", "prompt", "most", "n", "usual", "tokens"),
    [
        (KV, 8, 32, 1, None, (40, 40)),
        (KV, 8, 32, 1, 10, (18, 18)),
        (KV, 8, 4, 1, 10, (12, 12)),
        (KV, 8, 32, 3, 10, (38, 38)),  # the prompt is shared
        (SLIDING, 8, 32, 1, 10, (18, 8)),
        (SLIDING, 2, 32, 2, 2, (6, 6)),
    ],
)
def test_a_request_needs_its_prompt_and_usual_answers_within_the_windows(
    kv: KVFormat, prompt: int, most: int, n: int, usual: int | None, tokens: tuple[int, int]
) -> None:
    record = new_record(Request((1,) * prompt, most, n=n), lambda _: None, time.perf_counter())
    assert needed_bytes(kv, record, usual) == sum(tokens) * kv.block_bytes // kv.block_tokens


def test_an_answer_that_is_longer_than_usual_by_now_counts_as_long_as_it_is() -> None:
    record = new_record(Request((1,) * 8, 32), lambda _: None, time.perf_counter())
    record.take(Output(record.request.id, (1,) * 20), 0)
    assert needed_bytes(KV, record, 10) == 28 * EACH // BLOCK


def test_load_beyond_the_limit_commits_no_more_than_all(fleet: Fleet) -> None:
    instance = fleet._dispatcher.instances["r0"]
    instance.hear(EngineLoad(1, 0, -3, 10, 1), 0.0)
    snapshot = readings(fleet).read((), WEIGHTS)
    assert snapshot is not None
    assert snapshot.groups[0].committed_bytes == 13 * EACH
    assert snapshot.groups[0].free_bytes == 0


def test_a_request_that_waits_for_ranks_to_share_their_layers_is_no_overload(fleet: Fleet) -> None:
    with fleet._dispatcher.lock:
        for instance in fleet._dispatcher.instances.values():
            instance.policy_blocks = 30
        fleet._dispatcher.on_waiting = lambda: None
    fleet.submit(Request((1,) * 8, 4 * 10, id="long"), Collector())  # 12 blocks; an instance has 10
    snapshot = readings(fleet).read((), WEIGHTS)
    assert snapshot is not None
    assert snapshot.queued_bytes == 0
    fleet.submit(Request((1,) * 8, 32), Collector())
    snapshot = readings(fleet).read((), WEIGHTS)
    assert snapshot is not None
    assert snapshot.queued_bytes == 40 * EACH // BLOCK
