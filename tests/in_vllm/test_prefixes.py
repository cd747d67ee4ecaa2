"""Cached prefixes under layers that change: no request gets keys and values that other weights computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import elastic.vllm
from support.vllm_engine.engine import LONG_TEXTS, come_back, coordinator, elastic_engine, plain_engine, run, wait_for

LENGTH = 20


def generate(llm: Any, prompts: Sequence[Any] = LONG_TEXTS) -> tuple[int, list[list[int]]]:
    """Return how many of the prompts' tokens were cached, and the tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    return sum(o.num_cached_tokens for o in outputs), [list(o.outputs[0].token_ids) for o in outputs]


def follow(llm: Any, tokens: Sequence[list[int]]) -> list[tuple[int, list[list[int]]]]:
    """Generate behind ever longer parts of what was generated, so that each prompt is shared as far as any can be."""
    prompts = [llm.get_tokenizer().encode(text) for text in LONG_TEXTS]
    return [
        generate(llm, [{"prompt_token_ids": p + t[:end]} for p, t in zip(prompts, tokens, strict=True)])
        for end in range(0, 81, 20)
    ]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    with plain_engine() as llm:
        return generate(llm)[1]


@pytest.fixture(scope="module")
def llm(plain: list[list[int]]) -> Iterator[Any]:
    with elastic_engine("32MiB", enable_prefix_caching=True) as engine:
        elastic.vllm.runtime(engine).kv.resize("12MiB")  # as much with packed layers: no blocks come or go
        wait_for(lambda: not coordinator(engine).busy)
        assert coordinator(engine).capacity.usable > 56  # which all prompts take at once, for the same sums each time
        yield engine


@pytest.fixture
def rt(llm: Any) -> Iterator[Any]:
    runtime = elastic.vllm.runtime(llm)
    yield runtime
    runtime.restore()
    come_back(runtime)
    llm.reset_prefix_cache()
    runtime.check()


def test_full_weights_do_not_find_what_packed_ones_computed(llm: Any, rt: Any, plain: list[list[int]]) -> None:
    rt.swap(range(6), "int4")
    cached, packed = generate(llm)
    assert (cached, packed == plain) == (0, False)
    cached, again = generate(llm)
    assert cached > 0
    assert again == packed
    rt.restore()
    come_back(rt)
    assert generate(llm) == (0, plain)
    assert generate(llm)[0] > 0


def test_packed_weights_do_not_find_what_full_ones_computed(llm: Any, rt: Any, plain: list[list[int]]) -> None:
    assert generate(llm) == (0, plain)
    rt.swap(range(6), "int4")
    cached, packed = generate(llm)
    llm.reset_prefix_cache()
    assert (cached, packed) == generate(llm)


def test_a_release_leaves_what_requests_share(llm: Any, rt: Any, plain: list[list[int]]) -> None:
    assert generate(llm) == (0, plain)
    rt.release([0, 2])
    cached, tokens = generate(llm)
    assert cached > 0
    assert tokens == plain


@pytest.mark.parametrize("begin", ["full", "int4"])
def test_what_lives_across_a_change_is_shared_with_nobody(
    llm: Any, rt: Any, plain: list[list[int]], begin: str
) -> None:
    """Half of its blocks are of weights that are gone, and those behind were computed from these."""

    def change(step: int) -> None:
        if step == 8 and begin == "full":
            rt.swap(range(6), "int4")
        elif step in (8, 40):
            rt.restore()

    if begin == "int4":
        rt.swap(range(6), "int4")
    mixed = run(llm, [100] * len(LONG_TEXTS), each_step=change, texts=LONG_TEXTS)
    come_back(rt)
    assert any(tokens[:LENGTH] != full for tokens, full in zip(mixed, plain, strict=True))
    followed = follow(llm, mixed)
    assert followed[0] == (0, plain)
    llm.reset_prefix_cache()
    assert follow(llm, mixed) == followed


def test_requests_that_wait_across_a_change_look_by_the_present_weights(
    llm: Any, rt: Any, plain: list[list[int]]
) -> None:
    from vllm import SamplingParams

    engine, tokens = llm.llm_engine, dict[int, list[int]]()
    rt.swap(range(6), "int4")
    generate(llm)
    for number, text in enumerate(LONG_TEXTS):
        sampling = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
        engine.add_request(str(number), {"prompt": text}, sampling)
    rt.restore()
    come_back(rt)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
    assert [tokens[number] for number in range(len(LONG_TEXTS))] == plain
    cached, again = generate(llm)
    assert cached > 0
    assert again == plain
