"""Latency and throughput from the seconds of batches, at lengths and batches to which nothing was fitted."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from elastic.errors import ConfigError
from elastic.planning.estimate.configuration import Configuration, configurations
from elastic.planning.estimate.paper import Latency
from elastic.planning.estimate.performance import InstanceCost, Load
from elastic.planning.estimate.ranking import Candidate, RankBytes, rank
from elastic.planning.estimate.roofline import Roofline, Work, sharded_cost
from elastic.planning.measured_cost import LinearLatency
from elastic.planning.pipeline.chunk_cost import BatchTiming, Chunk, ChunkCost
from elastic.planning.sharding.share import even_stages

SLIDING = ChunkCost(0.0, 2e-9, 1e-6, 2e-5, 1.8e-5)
FULL = ChunkCost(4e-8, 4e-8, 1e-6, 2e-5, 1.8e-5)
HEAD = ChunkCost(0.0, 0.0, 1e-7, 1e-4, 8e-5)
MIX = ((SLIDING, 20), (FULL, 4), (HEAD, 1))


def whole(*parts: tuple[ChunkCost, int], **options: object) -> InstanceCost:
    return InstanceCost((parts or MIX,), **options)  # type: ignore[arg-type]


def true_seconds(load: Load, batch: int) -> float:
    """A batch of requests that begin together, token after token, by the costs that tests pretend to have measured."""
    both = sum((cost.times(count) for cost, count in MIX[1:]), MIX[0][0].times(MIX[0][1]))
    first = sum(both(Chunk("", start, min(512, load.prompt - start))) for start in range(0, load.prompt, 512))
    steps = range(load.prompt, load.prompt + load.new - 1)
    return first + sum(both.batch([Chunk(str(i), at, 1) for i in range(batch)]) for at in steps)


def fitted() -> InstanceCost:
    """The costs of each kind, fitted to a few short batches."""
    batches = [((0, 16),), ((0, 64),), ((64, 32),), ((96, 1),), ((96, 1),) * 4, ((32, 8), (64, 1))]
    made = []
    for cost, count in MIX:
        samples = [BatchTiming(b, cost.batch([Chunk(str(i), s, n) for i, (s, n) in enumerate(b)])) for b in batches]
        made.append((ChunkCost.fit(samples, "two alphas"), count))
    return whole(*made)


def test_lengths_and_batches_that_were_not_fitted_are_estimated() -> None:
    cost = fitted()
    for prompt, new, batch in ((700, 40, 1), (1500, 300, 2), (3000, 64, 8), (100, 900, 4)):
        load = Load(prompt, new)
        seconds = cost.ttft_s(load) + (new - 1) * cost.round_s(load, batch)
        assert seconds == pytest.approx(true_seconds(load, batch), rel=0.02)


def test_the_papers_latency_knows_neither_context_nor_batch() -> None:
    """Two outputs of one prompt fix TTFT and TPOT; elsewhere they are off by far more than the chunk costs are."""
    short, long = ((n, true_seconds(Load(64, n), 1)) for n in (8, 32))
    paper, cost = Latency.solve(short, long), fitted()
    load = Load(3000, 100)
    true = true_seconds(load, 8)
    ours = cost.ttft_s(load) + 99 * cost.round_s(load, 8)
    assert abs(paper(100) / true - 1) > 0.3 > 10 * abs(ours / true - 1)


def test_requests_that_run_at_a_time_follow_from_the_rate() -> None:
    cost = whole((ChunkCost(0, 0, 0.001, 0.01, 0.008), 1))
    load = Load(prompt=10, new=100, rate=2.0)
    running = cost.running(load, 64)
    assert running is not None
    assert load.rate * load.new * cost.tpot_s(load, running) <= running
    assert load.rate * load.new * cost.tpot_s(load, running - 1) > running - 1
    assert cost.running(load, running) == running
    assert cost.running(load, running - 1) is None
    assert cost.tpot_s(Load(10, 100, rate=1000.0), 4) == math.inf
    assert cost.running(Load(10, 100, rate=1000.0), 1 << 20) is None


def test_the_fewest_requests_that_suffice_are_found_where_the_first_ones_cost_most() -> None:
    """A second token meets experts that the first did not: more running at a time may not suffice where fewer do."""
    experts = Roofline((Work(weight_bytes=1e9, least_met=1 / 16),), 1e15, 1e11)
    for stages, rate in ((1, 3.0), (4, 9.0), (4, 13.0), (2, 30.0), (1, 40.0)):
        cost, load = InstanceCost((((experts, 4),),) * stages), Load(16, 32, rate=rate)
        enough = [n for n in range(1, 65) if rate * load.new * cost.tpot_s(load, n) <= n]
        assert cost.running(load, 64) == (enough[0] if enough else None)


@pytest.mark.parametrize("load", [Load(4, 8), Load(100, 2), Load(3, 1), Load(200, 3)])
def test_short_prompts_are_computed_together_so_that_more_are_served_than_one_by_one(load: Load) -> None:
    """More requests at a time may be faster each: the fewest that suffice are found, as by trying them all."""
    for stages in (1, 3):
        cost = InstanceCost((((Roofline((Work(1e9, 2e9),), 1e15, 1e11), 4),),) * stages)
        rates = [cost.most_rate(load, running) for running in range(1, 129)]
        assert rates == sorted(rates)
        assert rates[-1] > 1 / max(cost.prompt_s(load))
        for share in (0.1, 0.5, 0.9, 0.99):
            asked = replace(load, rate=share * rates[-1])
            enough = [n for n in range(1, 129) if asked.rate * asked.new * cost.tpot_s(asked, n) <= n]
            assert cost.running(asked, 128) == enough[0]
            assert max(cost.busy(asked, enough[0])) <= 1
        assert cost.running(replace(load, rate=1.01 * rates[-1]), 128) is None


def test_short_prompts_that_come_between_two_rounds_are_served_as_a_simulated_clock_does() -> None:
    cost, load, batch = whole(), Load(40, 4), 16
    clock, done, progress = 0.0, 0, [number % 4 for number in range(batch)]
    while done < 2000:
        clock += cost.round_s(load, batch)
        ended = progress.count(load.new - 1)
        progress = [(tokens + 1) % load.new for tokens in progress]
        clock += cost.pass_s([Chunk(str(number), 0, load.prompt) for number in range(ended)])
        done += ended
    assert done / clock == pytest.approx(cost.most_rate(load, batch))


def test_the_most_served_is_what_a_simulated_clock_serves() -> None:
    """Prompts one after another between rounds of a full batch: count what is done in a long time."""
    cost, load, batch = whole(), Load(600, 50), 16
    clock, done, progress = 0.0, 0, [random.Random(0).randrange(50) for _ in range(batch)]
    while done < 2000:
        clock += cost.round_s(load, batch)
        progress = [tokens + 1 for tokens in progress]
        ended = sum(tokens >= load.new for tokens in progress)
        progress = [tokens % load.new for tokens in progress]
        clock += ended * max(cost.prompt_s(load))
        done += ended
    assert done / clock == pytest.approx(cost.most_rate(load, batch), rel=0.02)


def test_room_for_more_requests_serves_no_fewer() -> None:
    """Of a number that the stages do not divide evenly, the busiest stage has one round more."""
    for stages in (1, 2, 3, 4):
        cost = InstanceCost((((FULL, 4),),) * stages, hop=LinearLatency(1e-4, 1e-9), token_bytes=1024)
        rates = [cost.most_rate(Load(100, 900), running) for running in range(1, 33)]
        assert rates == sorted(rates)


def test_stages_add_hops_to_a_token_and_halve_the_busiest() -> None:
    hop = LinearLatency(1e-4, 1e-9)
    plain = whole((FULL, 8))
    piped = InstanceCost((((FULL, 4),), ((FULL, 4),)), hop=hop, token_bytes=1024)
    load = Load(256, 64)
    assert piped.ttft_s(load) == pytest.approx(plain.ttft_s(load) + 2 * hop(1024 * 256))
    assert max(piped.prompt_s(load)) == pytest.approx(max(plain.prompt_s(load)) / 2)
    assert piped.most_rate(load, 32) > 1.5 * plain.most_rate(load, 32)
    assert piped.round_s(load, 1) > plain.round_s(load, 1)


class CountedCost:
    """A cost that counts how often it was asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def batch(self, chunks: Sequence[Chunk]) -> float:
        self.asked += 1
        return FULL.batch(chunks)


def test_stages_that_are_alike_are_costed_once_and_take_what_each_takes() -> None:
    counted, hop = CountedCost(), LinearLatency(1e-4, 1e-9)
    stages = (*(((counted, 2),),) * 16, *(((counted, 1),),) * 47, ((counted, 1), (HEAD, 1)))
    cost = InstanceCost(stages, (4,) * 16 + (2,) * 48, LinearLatency(1e-5, 1e-9), hop, 1024)
    chunks = [Chunk("", 5, 7)]
    whole_s = cost.pass_s(chunks)
    assert counted.asked == 3
    each_s = [cost.stage_s(stage, chunks) for stage in range(64)]
    assert cost.stages_s(chunks) == tuple(each_s)
    assert whole_s == math.fsum(each_s) + 64 * hop(7 * 1024)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("running", [1, 3, 8, 64])
def test_at_the_most_rate_the_busiest_stage_is_busy_all_the_time_and_never_more(stages: int, running: int) -> None:
    """Each batch in flight reads the weights of a stage: a pipeline is as busy by its expected load as by its most."""
    cost, load = InstanceCost((((FULL, 4),),) * stages), Load(100, 900)
    rates = [replace(load, rate=share * cost.most_rate(load, running)) for share in (0.5, 1)]
    half, most = (max(cost.busy(each, running)) for each in rates)
    assert half == pytest.approx(most / 2)
    if running % stages == 0:
        assert most == pytest.approx(1, abs=2e-3), "all but what the first token of each has in its prompt"
    assert most < 1


def test_shares_divide_attention_and_what_is_cut_and_pay_for_exchanges() -> None:
    cost = ChunkCost(8e-9, 8e-9, 1e-6, 1e-5, 8e-6)
    shared = sharded_cost(cost, 0.75, 4)
    assert shared.prefix == cost.prefix / 4
    assert shared.token == pytest.approx(cost.token * (0.25 + 0.75 / 4))
    assert sharded_cost(cost, 0.75, 1) == cost
    exchange = LinearLatency(2e-5, 1e-9)
    instance = InstanceCost((((shared, 10),),), (20,), exchange, token_bytes=100)
    chunk = [Chunk("", 0, 7)]
    assert instance.stage_s(0, chunk) == pytest.approx(10 * shared.batch(chunk) + 20 * exchange(700))


def test_stages_that_share_a_memory_are_slower_while_all_compute() -> None:
    alone, beside = ChunkCost(0, 0, 0, 1.0, 1.0), ChunkCost(0, 0, 0, 1.5, 1.5)
    piped = InstanceCost((((alone, 2),), ((alone, 2),)), together=(((beside, 2),), ((beside, 2),)))
    assert piped.round_s(Load(16, 32), 1) == 4.0
    assert piped.round_s(Load(16, 32), 2) == 6.0


def test_a_roofline_is_bound_by_what_takes_longer() -> None:
    work = Work(weight_bytes=1e9, token_flops=2e9, pair_flops=1e3, kv_bytes=1e3)
    roof = Roofline((work,), flops_s=1e12, bytes_s=1e11)
    assert roof.batch([Chunk("", 0, 1)]) == pytest.approx(1e9 / 1e11, rel=0.01)
    assert roof.batch([Chunk("", 0, 1000)]) == pytest.approx(2e12 / 1e12, rel=0.01)
    assert roof.batch([]) == 0.0
    sliding = Work(pair_flops=1.0, kv_bytes=1.0, window=128)
    assert sliding.amounts([Chunk("", 5000, 1)]) == (128, 128)
    assert Work(pair_flops=1.0, kv_bytes=1.0).amounts([Chunk("", 5000, 1)]) == (5001, 5001)
    experts = Work(weight_bytes=128.0, least_met=1 / 128)
    assert experts.amounts([Chunk("", 0, 1)])[1] == pytest.approx(1.0)
    assert 127 < experts.amounts([Chunk("", 0, 1000)])[1] <= 128


def test_eight_devices_have_the_papers_number_of_configurations() -> None:
    """4 quantizations x 2 forms of KV, and 4 prunings: 180 configurations of 15 pairs of degrees. (Section 1)"""
    pairs = list(configurations(8, 80))
    assert len(pairs) == 15
    assert len(list(configurations(8, 80, ("a", "b", "c", "d"), ("x", "y")))) + 4 * len(pairs) == 180
    assert {c.pp for c in configurations(8, 3)} == {1, 2, 3}
    assert [len(stage) for stage in even_stages(32, 5)] == [7, 7, 6, 6, 6]
    with pytest.raises(ConfigError, match="power of two"):
        Configuration(tp=3)


def candidate(name: str, layers: int, requests: int, cost: ChunkCost, ranks: int = 1) -> Candidate:
    held = tuple(RankBytes(f"gpu{i}", 1000, 100, layers, 0, 50, 0) for i in range(ranks))
    configuration = Configuration(1, ranks, name)
    return Candidate(configuration, (range(1),) * ranks, held, requests, 10, whole((cost, 1)), "measured")


def test_what_is_to_be_small_decides_the_order_and_every_reason_is_told() -> None:
    fast, slow = ChunkCost(0, 0, 1e-4, 1e-3, 0), ChunkCost(0, 0, 1e-4, 4e-3, 0)
    load = Load(16, 32, rate=1.0)
    found = [
        candidate("lean", 200, 8, slow),
        candidate("quick", 800, 8, fast),
        candidate("large", 900, 8, fast),
        candidate("tight", 845, 0, fast),
        candidate("idle", 200, 1, ChunkCost(0, 0, 1e-4, 0.5, 0)),
    ]
    order = {aim: [e.configuration.weights for e in rank(found, load, aim)] for aim in ("latency", "memory")}  # type: ignore[arg-type]
    assert order["latency"][:2] == ["quick", "lean"]
    assert order["memory"][:2] == ["lean", "quick"]
    reasons = {e.configuration.weights: e.why_not for e in rank(found, load)}
    assert reasons["large"] == "gpu0 lacks 0.0 MiB: it needs 0.0 MiB without keys and values"
    assert "no request of 48 tokens fits" in reasons["tight"]
    assert "requests/s at most, of 1" in reasons["idle"]
    assert not reasons["lean"]
    with pytest.raises(ConfigError, match="minimize='speed' is not known"):
        rank(found, load, "speed")  # type: ignore[arg-type]
