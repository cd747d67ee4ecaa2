"""A fleet of models in this process: an engine like another, whose requests move and outlive an engine that hangs."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

import elastic
from elastic import ConfigError, StateError
from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Request
from elastic.types import Swap
from support import architectures
from support.lossless_variant import HALF, exact
from support.processes import wait_until
from support.serving.generations import Collector, continuation, is_continuation, prompts, serve
from support.wrapped_model import assert_same_bits, bits, small

ENGINE = {"block_tokens": 8, "max_batch_tokens": 64}
PROMPTS = prompts([5, 40, 70], architectures.VOCAB)


@pytest.fixture
def models(wrapped: Any) -> list[Any]:
    return [wrapped(exact(architectures.build("qwen3")), small(4 << 20, f"cpu#{i}"), variants=[HALF]) for i in range(2)]


@pytest.mark.slow
def test_a_fleet_of_two_models_serves_as_one_engine(models: list[Any]) -> None:
    before = [bits(model) for model in models]
    expected = [continuation(exact(architectures.build("qwen3")), prompt, 40) for prompt in PROMPTS]
    with Fleet.of(*models, engine=ENGINE, beat_timeout_s=60) as fleet:
        assert fleet.serving
        assert fleet.health()
        requests = [Request(prompt, 40) for prompt in PROMPTS]
        heard = serve(fleet, requests)
        assert [heard.tokens[request.id] for request in requests] == expected
        fleet.apply("r0", Swap((0,), "half"))
        assert fleet.look("r0").status.residencies != fleet.look("r1").status.residencies
        fleet.check()
        with pytest.raises(ConfigError, match="no rank 'r7'"):
            fleet.look("r7")
    assert not fleet.serving
    models[0].elastic.restore()
    for model, was in zip(models, before, strict=True):
        assert_same_bits(model, was)


@pytest.mark.slow
def test_a_request_moves_between_two_models_and_computes_nothing_again(models: list[Any]) -> None:
    with Fleet.of(*models, engine=ENGINE, beat_timeout_s=60) as fleet:
        heard, request = Collector(), Request(PROMPTS[2], 200)
        fleet.submit(request, heard)
        moved = []
        for tokens in (10, 60, 110):
            heard.wait_for_tokens(request.id, tokens)
            (target,) = {"r0", "r1"} - {fleet.instance_of(request.id)}
            moved.append(fleet.move(request.id, target))
        heard.wait([request.id])
        assert is_continuation(exact(architectures.build("qwen3")), PROMPTS[2], 200, heard.tokens[request.id])
        assert [move.recomputed_tokens for move in moved] == [0, 0, 0]
        assert all(move.moved_bytes > 0 and move.rounds > 0 for move in moved)


@pytest.mark.slow
def test_small_caches_of_sliding_and_full_layers_serve_what_fits_them_under_a_policy_of_drops(wrapped: Any) -> None:
    """Sectors are counted as the engines do: a rank has two or three, and each group of layers takes its own."""
    places = [replace(small(800 << 10, f"cpu#{i}"), page_bytes=16384) for i in range(2)]
    models = [wrapped(architectures.build("gpt-oss"), place) for place in places]
    engine = {"block_tokens": 12, "max_batch_tokens": 64}
    with Fleet.of(*models, engine=engine, beat_timeout_s=60, policy="drop") as fleet:
        hello, longest = fleet._dispatcher.instances["r0"].hello, fleet.longest_request(500)
        assert len(hello.sector_blocks) == 2
        assert not hello.shares_prefixes
        for tokens in (17, longest):
            heard = serve(fleet, [request := Request((5,) * (tokens - 8), 8, ignore_eos=True)])
            assert heard.ends[request.id].finish == "length"
        assert fleet.status().totals.routed == 2


@pytest.mark.slow
def test_requests_of_an_engine_that_hangs_go_on_at_another(models: list[Any]) -> None:
    expected = continuation(exact(architectures.build("qwen3")), PROMPTS[0], 60)
    gate, calls = threading.Event(), []

    def stand_still(*_: Any) -> None:
        calls.append(1)
        if len(calls) > 10:
            gate.wait(120)

    hook = models[0].register_forward_pre_hook(stand_still)
    try:
        with Fleet.of(*models, engine=ENGINE, beat_timeout_s=60, hang_timeout_s=3) as fleet:
            requests = [Request(PROMPTS[0], 60) for _ in range(4)]
            heard = serve(fleet, requests)
            assert all(heard.tokens[request.id] == expected for request in requests)
            assert "began no step" in fleet.status().ranks[0].why
            gate.set()
    finally:
        gate.set()
        hook.remove()


def test_models_with_other_weights_make_no_fleet(models: list[Any]) -> None:
    other = architectures.build("qwen3", seed=1)
    elastic.wrap(other, places=small(4 << 20, "cpu#other"), variants=[HALF])
    try:
        with pytest.raises(ConfigError, match="'r1' is refused"):
            Fleet.of(models[0], other, engine=ENGINE).start()
    finally:
        elastic.unwrap(other)
    with pytest.raises(ConfigError, match="at least one model"):
        Fleet.of()


def test_a_model_that_cannot_be_served_says_so(models: list[Any]) -> None:
    plain = architectures.build("bloom")
    with pytest.raises((ConfigError, StateError)):
        Fleet.of(plain).start()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 0}, "ranks=0"),
        ({"ranks": 2, "cores": [(0,)]}, "cores"),
        ({"ranks": ["cpu=1MiB"]}, "list of places"),
        ({"launch": "join"}, "JoinLauncher"),
        ({"launch": "mpi"}, "launch='mpi'"),
        ({"max_queue": 0}, "max_queue=0"),
        ({"routing": "random"}, "routing="),
        ({"policy": "scale"}, "policy="),
        ({"beat_timeout_s": 0}, "beat_timeout_s=0"),
        ({"beat_timeout_s": None}, "beat_timeout_s=None cannot be"),
        ({"hang_timeout_s": True}, "hang_timeout_s=True cannot be"),
        ({"ranks": 2.5}, "ranks=2.5 cannot be"),
        ({"ranks": True}, "ranks=True cannot be"),
        ({"ranks": "2"}, "ranks='2' cannot be"),
        ({"ranks": [["cpu"], None]}, "places=None cannot be"),
        ({"ranks": 1, "places": 64}, "places=64 cannot be"),
        ({"ranks": 1, "places": [64]}, r"places=\[64\] cannot be"),
        ({"ranks": 1, "cores": [0]}, "cores=0 cannot be"),
        ({"ranks": 1, "cores": [(-1,)]}, r"cores=\(-1,\) cannot be"),
        ({"pp": "2"}, "pp='2' cannot be"),
        ({"pp": 2.5}, "pp=2.5 cannot be"),
        ({"pp": [2, None]}, r"pp=\[2, None\] cannot be"),
        ({"policy": 5}, "policy=5 must be"),
        ({"policy": [["drop"]]}, "must be 'balance', 'drop'"),
        ({"max_queue": 2.5}, "max_queue=2.5 cannot be"),
        ({"replace": "no"}, "replace='no' cannot be"),
        ({"grammars": "llguidance"}, "grammars='llguidance' cannot be"),
        ({"wrap": "int4"}, "wrap='int4' cannot be"),
        ({"wrap": {"polcy": "balanced"}}, "wrap: no option 'polcy'; did you mean 'policy'"),
        ({"wrap": {"places": ["cpu"]}}, "wrap: no option 'places'; say places= of the fleet itself"),
        ({"engine": {"max_request": 4}}, "engine: no option 'max_request'; did you mean 'max_requests'"),
        ({"engine": [1]}, r"engine=\[1\] cannot be"),
        ({"environment": {"OMP_NUM_THREADS": 1}}, "environment=.* cannot be"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_words(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Fleet("model", **options)


@pytest.mark.slow
def test_ranks_that_compute_layers_for_each_other_tell_bubbles_and_wires(wrapped: Any) -> None:
    models = [wrapped(architectures.build("qwen3"), small(4 << 20, f"cpu#{i}")) for i in range(2)]
    with Fleet.of(*models, engine=ENGINE, beat_timeout_s=60) as fleet:
        serve(fleet, [Request(PROMPTS[0], 4)])
        alone = [fleet.look(rank) for rank in ("r0", "r1")]
        assert [(view.times.bubble_s, view.times.waiting_s, view.wires) for view in alone] == [(0.0, 0.0, ())] * 2
        layers = alone[0].status.layers
        fleet.migrate("r0", [layers - 1], "r1")
        serve(fleet, [Request(PROMPTS[0], 20) for _ in range(4)])  # some of them at r0
        home = fleet.look("r0")
        assert 0 < home.times.bubble_s <= home.times.waiting_s
        assert home.times.busy_s > alone[0].times.busy_s
        (there,) = home.wires
        late = "what the other rank sent is not counted"  # it may be here before that
        wait_until(lambda: fleet.look("r1").wires[0].sent_bytes >= there.received_bytes, late)
        (back,) = fleet.look("r1").wires
        assert (there.rank, back.rank) == ("r1", "r0")
        assert (there.sent_bytes, there.received_bytes) == (back.received_bytes, back.sent_bytes)
        assert there.sent_bytes > 0
