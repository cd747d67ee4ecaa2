"""A fleet over ranks without models: who gets what when, exactly once; what waits, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic import CapacityError, ConfigError, Overloaded, StateError, clock
from elastic.cluster.control.messages import Cancel, News, Submit
from elastic.cluster.fleet import dispatcher
from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Output, Request, Sampling
from elastic.engines.sampling import answer_seed
from elastic.memory.backends.shared_file import host_name
from support.cluster.fake_rank import BLOCK, MODEL, FakeLauncher, FakeRank, alone
from support.serving.generations import Collector


@pytest.fixture
def fleets() -> Iterator[Any]:
    """fleet(ranks, rank options, **options), started; stopped when the test ends."""
    made: list[Fleet] = []

    def fleet(ranks: int = 2, rank: Any = None, **options: Any) -> tuple[Fleet, list[FakeRank]]:
        launcher = FakeLauncher(lambda spec: FakeRank(spec.name, **(rank or {})))
        options = {"beat_timeout_s": 1e6, "hang_timeout_s": 1e6, "replace": False, **options}
        made.append(Fleet("no model", ranks=ranks, launch=launcher, **options))
        made[-1].start()
        return made[-1], [launcher.ranks[f"r{i}"] for i in range(ranks)]

    yield fleet
    for each in made:
        each.stop(drain=False)


def sent(rank: FakeRank, kind: type = Submit) -> list[Any]:
    return [message for message in rank.inbox if isinstance(message, kind)]


def request(tokens: int = 4, prompt: int = 4, **options: Any) -> Request:
    return Request(tuple(range(1, prompt + 1)), tokens, Sampling(seed=0), **options)


def drive(ranks: list[FakeRank], steps: int = 60) -> None:
    for _ in range(steps):
        for rank in ranks:
            rank.step()


def test_requests_get_the_tokens_that_they_get_alone(fleets: Any) -> None:
    fleet, ranks = fleets(2)
    heard, requests = Collector(), [request(1 + i, 3 + i) for i in range(12)]
    for each in requests:
        fleet.submit(each, heard)
    fleet.check()
    drive(ranks)
    for each in requests:
        assert heard.tokens[each.id] == alone(each, answer_seed(each, 0))
        assert heard.ends[each.id].finish == "length"
    stats = fleet.counters.read()
    assert (stats.completed, stats.waiting, stats.running) == (12, 0, 0)
    assert stats.generated_tokens == sum(each.max_tokens for each in requests)


def test_requests_spread_by_how_free_instances_are(fleets: Any) -> None:
    fleet, ranks = fleets(2, routing="freeness")
    for _ in range(6):
        fleet.submit(request(), Collector())
    assert [len(sent(rank)) for rank in ranks] == [3, 3]


def test_equal_prompts_go_where_the_first_went_while_it_is_not_busy(fleets: Any) -> None:
    fleet, ranks = fleets(2)
    fleet.submit(request(prompt=40), Collector())
    drive(ranks, 1)
    fleet.submit(request(prompt=40), Collector())
    assert [len(sent(rank)) for rank in ranks] == [1, 0]
    assert fleet.status().totals.prefix_hits == 1
    for _ in range(9):
        fleet.submit(request(prompt=40), Collector())
    assert sent(ranks[1]), "all wait at the one that has the prompt"


def test_beginnings_of_prompts_count_for_nothing_where_no_rank_shares_their_blocks(
    fleets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, ranks = fleets(2)
    for instance in fleet._dispatcher.instances.values():
        instance.hello = replace(instance.hello, shares_prefixes=False)
    monkeypatch.setattr(dispatcher, "block_hashes", None)
    fleet.submit(request(prompt=40), Collector())
    fleet.submit(request(prompt=40), Collector())
    assert [len(sent(rank)) for rank in ranks] == [1, 1], "what is to be computed of prompts counts as before"
    drive(ranks)
    fleet.submit(request(60, prompt=40), Collector())
    fleet.submit(request(60, prompt=40), Collector())
    assert [len(sent(rank)) for rank in ranks] == [1, 1]
    totals = fleet.status().totals
    assert (totals.routed, totals.prefix_hits) == (4, 0)


def test_a_rank_that_shares_no_blocks_is_not_thought_to_have_any(fleets: Any) -> None:
    fleet, ranks = fleets(2)
    first = fleet._dispatcher.instances["r0"]
    first.hello = replace(first.hello, shares_prefixes=False)
    for name, hits in (("first", 0), ("second", 0)):
        fleet.submit(request(prompt=40, id=name), Collector())
        assert fleet.instance_of(name) == "r0"
        assert fleet.status().totals.prefix_hits == hits
        drive(ranks, 10)
    first.hello = replace(first.hello, shares_prefixes=True)
    for name, hits in (("third", 0), ("fourth", 1)):
        fleet.submit(request(prompt=40, id=name), Collector())
        assert fleet.instance_of(name) == "r0"
        assert fleet.status().totals.prefix_hits == hits
        drive(ranks, 10)


@pytest.mark.parametrize("size", [BLOCK, 6, 2 * BLOCK])
def test_the_next_turn_of_a_conversation_goes_where_the_first_was_answered(fleets: Any, size: int) -> None:
    """Also where ranks have blocks of other sizes than the first one: each is known by its own."""
    fleet, ranks = fleets(3)
    for instance in list(fleet._dispatcher.instances.values())[1:]:
        kv = replace(instance.kv_format, block_tokens=size)
        instance.hello, instance.kv_format = replace(instance.hello, kv=kv), kv
    heard, first = Collector(), request(20, 20)
    fleet.submit(request(5, 1), Collector())  # so that the first instance is not the freest
    fleet.submit(first, heard)
    there = next(rank for rank in ranks if rank.hello.name == fleet.instance_of(first.id))
    drive(ranks, 30)
    turn = replace(first, prompt=(*first.prompt, *heard.tokens[first.id], 7, 7, 7), id="turn")
    fleet.submit(turn, heard)
    assert [message.states[0].request.id for message in sent(there)] == ["turn"]
    lacking = fleet._dispatcher.instances[there.hello.name].unheard["turn"].blocks
    assert lacking == -(-(len(turn.prompt) + turn.max_tokens) // size) - (len(turn.prompt) - 4) // size


def test_what_fits_in_no_instance_now_waits_here_in_order(fleets: Any) -> None:
    fleet, ranks = fleets(2, {"blocks": 10})
    heard, requests = Collector(), [request(4 * BLOCK, 4 * BLOCK + i) for i in range(6)]
    for each in requests:
        fleet.submit(each, heard)
    fleet.check()
    assert fleet.status().queued >= 2
    begun = [message.states[0].request.id for rank in ranks for message in sent(rank)]
    assert set(begun) == {each.id for each in requests[: len(begun)]}
    drive(ranks, 100)
    assert heard.ends.keys() == {each.id for each in requests}
    assert fleet.status().queued == 0


def test_a_long_request_at_the_head_of_the_queue_is_not_overtaken(fleets: Any) -> None:
    fleet, ranks = fleets(1, {"blocks": 20})
    heard = Collector()
    for name, tokens, prompt in (("running", 30, 40), ("long", 30, 44), ("short", 4, 4)):
        fleet.submit(request(tokens, prompt, id=name), heard)
    assert [message.states[0].request.id for message in sent(ranks[0])] == ["running"]
    drive(ranks, 5)
    assert heard.tokens.keys() == {"running"}
    drive(ranks, 100)
    assert heard.ends.keys() == {"running", "long", "short"}


def test_an_instance_gets_no_more_than_it_computes_at_a_time_and_one_ahead(fleets: Any) -> None:
    fleet, ranks = fleets(1, {"max_requests": 3})
    for _ in range(6):
        fleet.submit(request(), Collector())
    assert len(sent(ranks[0])) == 4
    assert fleet.status().queued == 2


def test_more_than_max_queue_are_refused_with_a_time(fleets: Any) -> None:
    fleet, ranks = fleets(1, {"max_requests": 1}, max_queue=1)
    heard = Collector()
    for _ in range(3):
        fleet.submit(request(), heard)
    with pytest.raises(Overloaded, match="max_queue=1") as caught:
        fleet.submit(request(), heard)
    assert 1 <= caught.value.retry_after_s <= 60
    drive(ranks)
    assert len(heard.ends) == 3
    stats = fleet.counters.read()
    assert (stats.rejected, stats.arrived) == (1, 4)
    assert stats.prompt_tokens == 3 * len(request().prompt)


def test_parts_of_one_call_are_no_queue_to_each_other(fleets: Any) -> None:
    fleet, _ = fleets(1, {"max_requests": 1}, max_queue=1)
    for _ in range(5):
        fleet.submit(replace(request(), parent="a"), Collector())
    for refused in (request(), replace(request(), parent="b")):
        with pytest.raises(Overloaded, match="3 requests wait"):
            fleet.submit(refused, Collector())


def test_what_never_fits_is_refused_and_what_does_not_now_may_come_back(fleets: Any) -> None:
    fleet, ranks = fleets(2, {"blocks": 10})
    with pytest.raises(CapacityError, match="fits in no instance"):
        fleet.submit(request(40, 4), Collector())
    for rank in ranks:
        rank.blocks = 5
        rank.beat()
    with pytest.raises(Overloaded):
        fleet.submit(request(30, 4), Collector())
    fleet.submit(request(12, 4), Collector())
    fleet.check()


def test_the_longest_request_is_one_that_is_taken(fleets: Any) -> None:
    fleet, ranks = fleets(2, {"blocks": 10})
    most = fleet.longest_request(1000)
    assert fleet.longest_request(most - 1) == most - 1
    with pytest.raises(CapacityError):
        fleet.submit(request(most - 3, 4), Collector())
    for rank in ranks:
        rank.blocks = 5
        rank.beat()
    now = fleet.longest_request(1000)
    assert (now < most, fleet.longest_request(1000, ever=True)) == (True, most)
    with pytest.raises(Overloaded):
        fleet.submit(request(now - 3, 4), Collector())
    fleet.submit(request(now - 4, 4), Collector())


def test_capacity_that_comes_back_is_used(fleets: Any) -> None:
    fleet, (rank,) = fleets(1, {"blocks": 10})
    heard = Collector()
    fleet.submit(request(16, 8, id="a"), heard)
    fleet.submit(request(20, 16, id="b"), heard)
    assert fleet.instance_of("b") is None
    rank.blocks = 40
    rank.beat()
    assert fleet.instance_of("b") == "r0"


def test_a_request_that_waits_is_cancelled_here_and_one_that_runs_there(fleets: Any) -> None:
    fleet, (rank,) = fleets(1, {"max_requests": 1})
    heard = Collector()
    for name in "abc":
        fleet.submit(request(id=name), heard)
    fleet.cancel("c")
    assert heard.ends["c"].finish == "cancelled"
    fleet.cancel("a")
    assert [message.request for message in sent(rank, Cancel)] == ["a"]
    drive([rank])
    assert heard.ends["a"].finish == "cancelled"
    assert heard.ends["b"].finish == "length"
    fleet.cancel("unknown")
    fleet.check()


def test_one_of_several_answers_is_cancelled(fleets: Any) -> None:
    fleet, ranks = fleets(1)
    ends: dict[int, Output] = {}
    fleet.submit(request(6, n=3, id="a"), lambda output: ends.update({output.index: output} if output.finish else {}))
    drive(ranks, 2)
    fleet.cancel("a", 1)
    drive(ranks)
    assert {index: output.finish for index, output in ends.items()} == {0: "length", 1: "cancelled", 2: "length"}


def test_ids_in_use_and_requests_without_sense_are_refused(fleets: Any) -> None:
    fleet, _ = fleets(1)
    fleet.submit(request(id="a", n=2), Collector())
    for wrong in (request(id="a"), request(id="a[1]"), request(id="b", prompt=0), Request((5000,), 1)):
        with pytest.raises(ConfigError):
            fleet.submit(wrong, Collector())
    fleet.check()


def test_a_request_that_a_rank_has_no_room_for_goes_elsewhere(fleets: Any) -> None:
    fleet, ranks = fleets(2)
    heard = Collector()
    ranks[0].refuses = Overloaded("no room", retry_after_s=1)
    for i in range(4):
        fleet.submit(request(id=f"{i}"), heard)
    drive(ranks)
    assert len(heard.ends) == 4
    assert {end.finish for end in heard.ends.values()} == {"length"}


def test_a_request_that_all_refuse_for_ever_fails_in_words(fleets: Any) -> None:
    fleet, ranks = fleets(2)
    heard = Collector()
    for rank in ranks:
        rank.refuses = CapacityError("too long", requested_bytes=2, free_bytes=0, total_bytes=1)
    fleet.submit(request(id="a"), heard)
    drive(ranks)
    assert heard.ends["a"].finish == "failed"
    assert "too long" in str(heard.ends["a"].error)
    ranks[0].refuses = ConfigError("no grammar")
    fleet.submit(request(id="b"), heard)
    drive(ranks)
    assert heard.ends["b"].error in ("no grammar", None) or "too long" in str(heard.ends["b"].error)


def test_a_request_that_all_who_are_left_have_refused_for_ever_fails_too(
    fleets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, ranks = fleets(2, routing="round_robin")
    heard = Collector()
    ranks[0].refuses = CapacityError("too long", requested_bytes=2, free_bytes=0, total_bytes=1)
    fleet.submit(request(id="a"), heard)
    ranks[0].step()
    assert fleet.instance_of("a") == "r1"
    ranks[1].die()
    ranks[0].refuses = None
    ranks[0].beat()
    assert not heard.ends, "another rank may come"
    monkeypatch.setattr(dispatcher, "UNREACHABLE_S", 0.0)
    ranks[0].beat()
    assert heard.ends["a"].finish == "failed"
    assert "fits in no instance" in str(heard.ends["a"].error)
    fleet.check()


def test_a_request_that_is_cancelled_and_refused_at_once_ends_once(fleets: Any) -> None:
    fleet, (rank,) = fleets(1)
    heard = Collector()
    rank.refuses = CapacityError("too long", requested_bytes=2, free_bytes=0, total_bytes=1)
    fleet.submit(request(id="a"), heard)
    fleet.cancel("a")
    rank.step()
    assert heard.ends["a"].finish == "cancelled"
    fleet.check()


def test_weights_of_ranks_are_those_of_the_fleet(fleets: Any) -> None:
    fleet, ranks = fleets(2, routing="round_robin")
    heard = Collector()
    for name in "ab":
        fleet.submit(request(id=name), heard)
    for rank in ranks:
        rank.take()
    said = [(ranks[0], "a", (("x",), ("y",)), 1), (ranks[1], "b", (("y",), ("z",)), 0), (ranks[1], "b", (), 1)]
    for place, (rank, name, forms, index) in enumerate(said):
        output = Output(name, (1,), None, weights=index)
        rank.on_message(News((output,), (int(place == 2),), rank.load(), None, forms))
    assert [fleet.weights[i] for name in "ab" for i in heard.weights[name]] == [("y",), ("y",), ("z",)]


@pytest.mark.parametrize("host", [host_name(), "elsewhere/1"])
def test_tokens_of_another_host_are_timed_by_the_clock_of_this_one(fleets: Any, host: str) -> None:
    fleet, (rank,) = fleets(1, rank={"host": host})
    heard = Collector()
    fleet.submit(request(id="a"), heard)
    rank.take()
    before_s = clock.now()
    rank.on_message(News((Output("a", (1,), at_s=50.0, scheduled_s=49.5),), (0,), rank.load()))
    told = heard.first["a"]
    if host == host_name():
        assert (told.at_s, told.scheduled_s) == (50.0, 49.5)
    else:
        assert before_s <= told.at_s <= clock.now()
        assert told.scheduled_s is None


def test_a_listener_that_raises_is_no_other_listeners_fault(fleets: Any, caplog: pytest.LogCaptureFixture) -> None:
    fleet, ranks = fleets(1)
    heard = Collector()

    def fault(_: Output) -> None:
        raise ValueError("mine")

    fleet.submit(request(), fault)
    fleet.submit(request(id="b"), heard)
    drive(ranks)
    assert heard.ends["b"].finish == "length"
    assert "mine" in caplog.text


def test_a_listener_may_submit_and_cancel_but_not_stop(fleets: Any) -> None:
    fleet, ranks = fleets(1)
    heard, refused = Collector(), []

    def again(output: Output) -> None:
        if output.finish is None and len(refused) == 0:
            fleet.submit(request(id="second"), heard)
            fleet.cancel("first")
            for call in (fleet.stop, lambda: fleet.move("first", "r0")):
                with pytest.raises(StateError) as caught:
                    call()
                refused.append(caught)

    fleet.submit(request(9, id="first"), again)
    drive(ranks)
    assert heard.ends["second"].finish == "length"
    assert len(refused) == 2


def test_outputs_of_a_request_come_in_order_whoever_brings_them(fleets: Any) -> None:
    fleet, (rank,) = fleets(1, {"max_requests": 2})
    heard: list[Output] = []
    inside, go_on = threading.Event(), threading.Event()

    def slow(output: Output) -> None:
        inside.set()
        assert go_on.wait(20)
        heard.append(output)

    fleet.submit(request(3, id="a"), slow)
    stepping = threading.Thread(target=rank.step)
    stepping.start()
    assert inside.wait(20)
    rank.step()  # on this thread, while the other is in the listener: it is told there, after the first
    assert heard == []
    go_on.set()
    stepping.join(20)
    rank.step()
    assert [len(output.tokens) for output in heard] == [1, 1, 1]
    assert [t for output in heard for t in output.tokens] == alone(request(3), answer_seed(request(3), 0))


def test_a_fleet_refuses_ranks_with_other_weights(fleets: Any) -> None:
    models = iter([MODEL, replace(MODEL, digests=(1, 9))])
    launcher = FakeLauncher(lambda spec: FakeRank(spec.name, model=next(models)))
    fleet = Fleet("no model", ranks=2, launch=launcher)
    with pytest.raises(ConfigError, match="layer 1"):
        fleet.start()
    assert ["layer 1" in rank.refused for rank in launcher.ranks.values()] == [False, True]
    assert all(rank.lost for rank in launcher.ranks.values())
    assert launcher.closed
    assert not fleet.serving


def test_before_start_and_after_stop_nothing_is_taken(fleets: Any) -> None:
    fleet = Fleet("no model", launch=FakeLauncher())
    with pytest.raises(StateError, match="start it"):
        fleet.submit(request(), Collector())
    fleet, ranks = fleets(1)
    heard = Collector()
    fleet.submit(request(id="a"), heard)
    fleet.stop(drain=False)
    assert heard.ends["a"].finish == "cancelled"
    fleet.stop()
    with pytest.raises(StateError):
        fleet.submit(request(), heard)
    with pytest.raises(StateError):
        fleet.start()
    assert ranks[0].lost


def test_stop_waits_for_what_was_taken(fleets: Any) -> None:
    fleet, ranks = fleets(1, {"max_requests": 1})
    heard = Collector()
    for name in "abc":
        fleet.submit(request(id=name), heard)
    stopping = threading.Thread(target=fleet.stop)
    stopping.start()
    while stopping.is_alive():
        ranks[0].step()
        stopping.join(0.001)
    assert {end.finish for end in heard.ends.values()} == {"length"}
    assert len(heard.ends) == 3
