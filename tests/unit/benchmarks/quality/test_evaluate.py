"""Replays of requests under the weights that computed them, against generations by hand."""

from __future__ import annotations

import random
from functools import cache
from itertools import groupby
from typing import Any

import pytest
import torch
import transformers as t
from hypothesis import given, settings
from hypothesis import strategies as st
from quality.evaluate import (
    Quality,
    QualityReplayer,
    ReplayedRequest,
    RequestQuality,
    share_of_loss,
)

from elastic.errors import ConfigError, StateError
from elastic.quant.formats.kernel_table import paths
from support.architectures import build, prompt
from support.static_quant import pack_static
from support.wrapped_model import tight

FULL, INT4, MIXED = ("float32",) * 3, ("int4",) * 3, ("float32", "int8", "int4")
FORMS = (FULL, INT4, MIXED, ("absent", "float32", "absent"))
PROMPT = tuple(prompt()["input_ids"][0].tolist())
NEW = 12


def eager() -> Any:
    """A model that writes many different tokens, on whose attention elastic caches change nothing."""
    model = build("llama-gqa", seed=1)
    model.set_attn_implementation("eager")
    return model


@cache
def packed(form: tuple[str, ...]) -> Any:
    """A statically quantized model."""
    model = eager()
    for layer, variant in zip(model.model.layers, form, strict=True):
        if variant not in ("float32", "absent"):
            pack_static(layer, variant)
    return model


def computes_as(index: int) -> tuple[str, ...]:
    """A form, with released layers as the full ones."""
    return tuple("float32" if variant == "absent" else variant for variant in FORMS[index])


def by_hand(request: ReplayedRequest, reference: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
    """The greedy text, and the reference's mean nats, when a model of its own computes each token."""
    before = request.prompt_weights or request.weights[:1] * len(PROMPT)
    cache, text, nats = t.DynamicCache(config=eager().config), [], []
    begin, ids = 0, torch.tensor([PROMPT, PROMPT])
    for form, run in groupby(before, key=computes_as):  # cut nowhere else: int4 rounds what differs in the last bit
        end = begin + len(list(run))
        last = packed(form)(ids[:, begin:end], past_key_values=cache, logits_to_keep=1).logits[:, -1]
        begin = end
    for index, wanted in zip((*request.weights[1:], None), reference, strict=True):
        text.append(int(last[0].argmax()))
        goes_on = torch.tensor([text[-1], wanted])
        nats.append(torch.nn.functional.cross_entropy(last, goes_on, reduction="none")[1].double())
        if index is not None:
            last = packed(FORMS[index])(goes_on[:, None], past_key_values=cache).logits[:, -1]
    return tuple(text), float(torch.stack(nats).mean())


def greedy(model: Any, new: int = NEW) -> tuple[int, ...]:
    ids = model.generate(torch.tensor([PROMPT]), max_new_tokens=new, do_sample=False)
    return tuple(ids[0, len(PROMPT) :].tolist())


def test_full_precision_loses_nothing_released_or_not(wrapped: Any) -> None:
    model = wrapped(eager(), variants=("int4",))
    weights = ((0,) * NEW, (3,) * NEW, (0, 3) * (NEW // 2))
    quality = QualityReplayer(model).replay([ReplayedRequest(PROMPT, w) for w in weights], FORMS)
    assert (quality.loss, quality.rouge_l, quality.agreement, quality.lost_likelihood) == (0.0, 1.0, 1.0, 0.0)
    assert quality.requests[0].text == quality.requests[0].reference == greedy(eager())
    assert quality.text_nats == quality.full_nats > 0
    assert quality.tokens == 3 * NEW


def test_static_int4_is_the_statically_quantized_model_bit_for_bit(wrapped: Any) -> None:
    model = wrapped(eager(), variants=("int4", "int8"))
    request = ReplayedRequest(PROMPT, (1,) * NEW)
    found = QualityReplayer(model).replay([request], FORMS).requests[0]
    assert (found.text, found.nats) == by_hand(request, found.reference)
    assert found.text == greedy(packed(INT4))
    assert found.text != found.reference
    assert 0 < found.rouge_l < 1
    assert 0 < found.agreement < 1
    assert found.loss > 0
    assert {where[0].variant for where in model.elastic.status().residencies.values()} == {"float32"}


def test_changes_in_the_middle_are_those_of_a_run_by_hand(wrapped: Any) -> None:
    """The cache goes on: entries of one precision are attended in another."""
    model = wrapped(eager(), variants=("int4", "int8"))
    request = ReplayedRequest(PROMPT, (1,) * 3 + (0,) * 5 + (2,) * 4)
    found = QualityReplayer(model).replay([request], FORMS).requests[0]
    assert (found.text, found.nats) == by_hand(request, found.reference)
    assert found.text[:3] == greedy(packed(INT4))[:3]
    assert found.text not in (found.reference, greedy(packed(INT4)))


def test_any_record_is_replayed_as_by_hand(wrapped: Any) -> None:
    """Whatever computed the prompt, a part at a time, and each token after it."""
    replayer = QualityReplayer(wrapped(eager(), variants=("int4", "int8")))
    indices = st.integers(0, len(FORMS) - 1)

    @settings(max_examples=25, deadline=None)
    @given(st.lists(indices, min_size=1, max_size=6), st.lists(st.tuples(indices, st.integers(1, 11)), max_size=2))
    def check(weights: list[int], runs: list[tuple[int, int]]) -> None:
        before = [index for index, count in runs for _ in range(count)]
        before += weights[:1] * (len(PROMPT) - len(before))
        request = ReplayedRequest(PROMPT, tuple(weights), tuple(before))
        found = replayer.replay([request], FORMS).requests[0]
        if found.text != found.reference or found.loss:
            text, nats = by_hand(request, found.reference)
            assert (found.text, found.nats) == (text, pytest.approx(nats, rel=1e-6))
        else:
            assert {FORMS[index] for index in (*before, *weights)} <= {FULL, FORMS[3]}

    check()


def test_the_likelihood_of_the_text_is_that_of_the_full_model(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"), variants=("int4",))
    found = QualityReplayer(model).replay([ReplayedRequest(PROMPT, (1,) * NEW)], FORMS).requests[0]
    ids = torch.tensor([PROMPT + found.text])
    logits = build("llama-gqa")(ids).logits[0, len(PROMPT) - 1 : -1]
    assert found.text_nats == pytest.approx(float(torch.nn.functional.cross_entropy(logits, ids[0, len(PROMPT) :])))


@pytest.mark.slow
def test_many_requests_at_once_are_what_they_are_one_by_one(assets: Any, wrapped: Any) -> None:
    """Of any lengths; and in the order in which they were given."""
    model, tokenizer = assets
    wrapped(model, ["cpu=64MiB"], variants=("int8",))
    text = tuple(
        tokenizer("import os\n\n\nclass Reader:\n    def read(self, path):\n        return open(path)")["input_ids"]
    )
    choose, forms = random.Random(1), (("float32",) * 12, ("int8",) * 12, ("int8",) * 6 + ("float32",) * 6)
    requests = [
        ReplayedRequest(text[: choose.randint(5, len(text))], (i % 3,) * choose.randint(2, 9)) for i in range(5)
    ]
    requests.append(ReplayedRequest(text, (0, 0, 1, 1)))
    with paths.forced("expanded_float32"):  # else a product goes by another path for one token than for many
        together = QualityReplayer(model, batch=4).replay(requests, forms).requests
        alone = [QualityReplayer(model, batch=1).replay([request], forms).requests[0] for request in requests]
    for one, other in zip(together, alone, strict=True):
        assert (one.text, one.reference) == (other.text, other.reference)
        assert one.full_nats == pytest.approx(other.full_nats, abs=1e-5)
        assert one.nats == pytest.approx(other.nats, abs=1e-5)


def test_what_was_replayed_once_is_kept(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"), variants=("int4", "int8"))
    replayer, calls = QualityReplayer(model), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    requests = [
        ReplayedRequest(PROMPT, (1,) * NEW),
        ReplayedRequest(PROMPT, (2,) * NEW),
        ReplayedRequest(PROMPT, (1,) * NEW),
    ]
    told: list[tuple[int, int]] = []
    first = replayer.replay(requests, FORMS, progress=lambda done, total: told.append((done, total)))
    assert told == [(2, 3), (3, 3)]
    made = len(calls)
    assert replayer.replay(requests, FORMS) == first
    other_order = replayer.replay([ReplayedRequest(PROMPT, (0,) * NEW)], (INT4, FULL))
    assert other_order.requests[0] == first.requests[0], "the same weights under another index"
    assert len(calls) == made


def test_the_share_of_a_static_variants_loss() -> None:
    def quality(loss: float, reference: tuple[int, ...] = (1, 2)) -> Quality:
        return Quality((RequestQuality(reference, (1, 3), 1.0, 1.0 + loss, 1.5, 0.5, 0.5),))

    assert share_of_loss(quality(0.125), quality(0.5)) == 0.25
    assert share_of_loss(quality(0.0), quality(0.5)) == 0.0
    assert share_of_loss(quality(0.1), quality(0.0)) is None
    with pytest.raises(ConfigError, match="same requests"):
        share_of_loss(quality(0.1), quality(0.5, (1, 4)))
    summary = quality(0.5).summary()
    assert summary["lost_likelihood"] == pytest.approx(1 - torch.tensor(-0.5).exp().item())
    assert (summary["loss"], summary["tokens"], summary["text_nats"]) == (0.5, 2, 1.5)


def test_means_are_over_tokens() -> None:
    requests = (
        RequestQuality((1,), (1,), 1.0, 2.0, 1.0, 0.0, 1.0),
        RequestQuality((1, 2, 3), (4,), 1.0, 1.0, 1.0, 1.0, 0.0),
    )
    quality = Quality(requests)
    assert (quality.loss, quality.agreement, quality.rouge_l) == (0.25, 0.75, 0.5)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ReplayedRequest((), (0,)), "at least"),
        (ReplayedRequest(PROMPT, ()), "at least"),
        (ReplayedRequest(PROMPT, (0, 9)), r"weights \[9\] are not recorded: there are 4 forms"),
        (ReplayedRequest(PROMPT, (0, -1)), r"weights \[-1\]"),
        (ReplayedRequest(PROMPT, (0,), (0,)), "one for each of the 24 tokens"),
        (ReplayedRequest(PROMPT, (0,), (0,) * 23 + (1,)), "the last as the first generated token"),
        (ReplayedRequest(PROMPT, (2,)), "int8"),
    ],
)
def test_what_makes_no_sense_is_refused(request_: ReplayedRequest, words: str, wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"), variants=("int4",))
    with pytest.raises(ConfigError, match=words):
        QualityReplayer(model).replay([request_], FORMS)
    for requests, forms, message in (([], FORMS, "empty"), ([ReplayedRequest(PROMPT, (0,))], (("int4",),), "1 layers")):
        with pytest.raises(ConfigError, match=message):
            QualityReplayer(model).replay(requests, forms)
    with pytest.raises(ConfigError, match="batch=0"):
        QualityReplayer(model, batch=0)
    assert {where[0].variant for where in model.elastic.status().residencies.values()} == {"float32"}


def test_a_model_that_is_not_wrapped_and_pages_that_are_short(wrapped: Any) -> None:
    model = build("llama-gqa")
    with pytest.raises(StateError, match="not wrapped"):
        QualityReplayer(model)
    rt = wrapped(model, tight(model, 4, variants=("int4",)), variants=("int4",)).elastic
    rt.swap([0, 1, 2], "int4")
    cache = model(**prompt(1, 100)).past_key_values
    with pytest.raises(StateError, match="wait for pages"):
        QualityReplayer(model).replay([ReplayedRequest(PROMPT, (0,))], FORMS)
    del cache
