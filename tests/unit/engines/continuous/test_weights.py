"""Requests with a common beginning while layers change their variants: each gets the tokens of the weights in use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from elastic.engines.base import Request
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.continuous.variant_recorder import VariantRecorder
from elastic.quant.formats.kernel_table import paths
from support import architectures
from support.serving.generations import Collector, is_continuation, prompts, serve
from support.serving.tracked_engine import TrackedEngine
from support.wrapped_model import small

(PROMPT,) = prompts([80], architectures.VOCAB)
TOKENS = 12
FORMS: list[list[int] | list[str]] = [
    [0, 1, 2],
    [],
    [0],
    [0, 2],
    ["model.layers.0.mlp"],
    ["model.layers.0.self_attn"],
    [0, 1, 2],
]
"""What is in int4, one after another."""


class Served:
    """An engine in one form after another."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.engine = ContinuousEngine(model, block_tokens=8, max_batch_tokens=64, **options)
        self.engine.start()

    def use(self, layers: list[int] | list[str]) -> None:
        self.engine.runtime.restore()
        if layers:
            self.engine.runtime.swap(layers, "int4")

    def serve(self) -> tuple[list[int], int | None]:
        """Return the tokens of a request, and how many of its prompt were there."""
        request = Request(PROMPT, TOKENS, ignore_eos=True)
        heard = serve(self.engine, [request])
        return heard.tokens[request.id], heard.first[request.id].cached_tokens


@pytest.fixture
def engines(wrapped: Any) -> Iterator[Any]:
    """With one kernel for all numbers of tokens: they round differently, and a shared prompt has fewer to compute."""
    made: list[Served] = []

    def engine(**options: Any) -> Served:
        model = architectures.build("llama-gqa")
        wrapped(model, small(8 << 20), variants=["int4"])
        made.append(Served(model, **options))
        return made[-1]

    with paths.forced("expanded_float32"):
        yield engine
    for each in made:
        each.engine.stop()
        each.engine.check()


def test_a_prompt_that_was_computed_by_other_weights_is_computed_anew(engines: Any) -> None:
    sharing, alone = engines(), engines(share_prefixes=False)
    found = {}
    for layers in [layers for layers in FORMS if layers]:  # before the full weights have computed anything
        for each in (sharing, alone):
            each.use(layers)
        expected, _ = alone.serve()
        tokens, cached = sharing.serve()
        assert tokens == expected, layers
        assert cached == (72 if str(layers) in found else 0), layers
        assert sharing.serve() == (expected, 72), layers
        found[str(layers)] = expected
    sharing.use([])
    tokens, cached = sharing.serve()
    assert cached == 0
    assert is_continuation(architectures.build("llama-gqa"), PROMPT, TOKENS, tokens)
    assert sharing.serve() == (tokens, 72)
    assert tokens not in found.values(), "int4 says the same: nothing was tested"
    assert len(set(map(tuple, found.values()))) > 2, "forms say the same"


def test_what_the_full_weights_have_computed_is_shared_by_all_and_stays_theirs(engines: Any) -> None:
    sharing = engines()
    whole, _ = sharing.serve()
    for layers in FORMS:
        sharing.use(layers)
        assert sharing.serve()[1] == 72, layers
        sharing.use([])
        assert sharing.serve() == (whole, 72), layers


def test_a_release_leaves_what_requests_share(engines: Any) -> None:
    sharing = engines()
    whole, _ = sharing.serve()
    sharing.engine.runtime.release([0, 2])
    assert sharing.serve() == (whole, 72)


@pytest.mark.parametrize("form", ["float32", "int4"])
def test_of_a_request_that_came_others_share_what_the_full_weights_computed(form: str) -> None:
    models = [architectures.build("llama-gqa") for _ in range(2)]
    here, there = (TrackedEngine(model, 6 << 20, wrap={"variants": ["int4"]}) for model in models)
    if form == "int4":
        here.engine.runtime.swap([0, 1, 2], "int4")
    heard, request = Collector(), Request(PROMPT, 30, ignore_eos=True)
    here.engine.submit(request, heard)
    heard.wait_for_tokens(request.id, 3)
    states, kv = here.engine.moves.hand_over(request.id)
    assert [each.exact for each in kv] == [form == "float32"]
    there.engine.moves.receive(states, kv, here.sources_of(kv))
    there.engine.adopt(states, heard, kv=kv)
    here.engine.moves.release(request.id)
    heard.wait([request.id])
    again = replace(request, id="again")
    found = serve(there.engine, [again])
    assert found.first["again"].cached_tokens == (72 if form == "float32" else 0)
    assert is_continuation(architectures.build("llama-gqa"), PROMPT, 30, found.tokens["again"])
    for each in (here, there):
        each.close()


def test_weights_that_were_others_for_a_while_have_changed(engines: Any) -> None:
    """So that a pass which waited for other ranks meanwhile counts as one of both."""
    engine = engines().engine
    recorder = VariantRecorder(engine.runtime, lambda: False)  # which nobody else asks
    assert recorder.weights() == (0, b"")
    engine.runtime.swap([1], "int4")
    engine.runtime.restore()
    assert recorder.weights() == (1, b"")
    engine.runtime.release([1])
    engine.runtime.restore()
    assert recorder.weights() == (1, b"")
