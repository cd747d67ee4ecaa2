"""Weights of a vLLM engine in pages: the tokens are those of vLLM without elastic, whatever is released meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import elastic.vllm
from elastic.errors import ConfigError, StateError
from elastic.types import Release, Swap
from support.vllm_engine.engine import FULL, TEXTS, come_back, elastic_engine, expected, run

LENGTHS = [100] * len(TEXTS)


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with elastic_engine("32MiB") as engine:
        yield engine


@pytest.fixture
def rt(llm: Any) -> Iterator[Any]:
    runtime = elastic.vllm.runtime(llm)
    yield runtime
    runtime.restore()
    come_back(runtime)
    runtime.check()


def test_tokens_are_those_of_plain_vllm(llm: Any, rt: Any, reference: list[list[int]]) -> None:
    assert rt.form() == FULL
    assert run(llm, LENGTHS) == expected(reference, LENGTHS)


def test_released_layers_are_streamed(llm: Any, rt: Any, reference: list[list[int]]) -> None:
    change = rt.release([3, "model.layers.7"])
    assert change.layers == (3, 7)
    assert rt.form()[3] == rt.form()[7] == "absent"
    assert run(llm, LENGTHS) == expected(reference, LENGTHS)


@pytest.mark.usefixtures("llm")
def test_products_of_a_released_layer_are_to_the_bit_those_of_a_resident_one(rt: Any) -> None:
    from elastic.engines.vllm.linear import _layers

    modules = [module for name, module in _layers.items() if ".layers.1." in name]
    inputs = [torch.randn(5, module.weight.shape[1], generator=torch.Generator().manual_seed(0)) for module in modules]

    def products() -> list[torch.Tensor]:
        with torch.inference_mode():
            return [m.quant_method.apply(m, x, m.bias) for m, x in zip(modules, inputs, strict=True)]

    resident = products()
    rt.release([1])
    assert rt.form()[1] == "absent"
    assert modules
    assert all(map(torch.equal, products(), resident))


def test_layers_leave_and_return_between_steps(llm: Any, rt: Any, reference: list[list[int]]) -> None:
    def change(step: int) -> None:
        if step % 6 == 2:
            rt.release([step % 12, (step + 5) % 12])
        elif step % 6 == 5:
            rt.restore()

    assert run(llm, LENGTHS, each_step=change) == expected(reference, LENGTHS)
    assert all(event.ok for event in rt.events())


def test_after_a_swap_full_weights_return_bit_for_bit(llm: Any, rt: Any, reference: list[list[int]]) -> None:
    first = run(llm, LENGTHS, each_step=lambda step: rt.swap([2, 5, 9], "int4") if step == 0 else None)
    again = run(llm, LENGTHS)
    assert first == again  # the same weights, the same tokens
    assert first != expected(reference, LENGTHS)
    rt.restore()
    come_back(rt)
    assert run(llm, LENGTHS) == expected(reference, LENGTHS)


def test_what_a_layer_gives_up_are_blocks_at_the_next_step(llm: Any, rt: Any) -> None:
    before = rt.kv.capacity_bytes
    released = rt.release(range(6)).released_bytes
    run(llm, [8, 8])
    assert rt.kv.capacity_bytes > before
    assert rt.kv.capacity_bytes - before <= released


def test_a_plan_says_what_would_be_done(rt: Any) -> None:
    steps = rt.plan([Release((1,)), Swap((2,), "int4")])
    assert [step.released_pages > 0 for step in steps] == [True, True]
    assert rt.form() == FULL


def test_all_actions_of_a_call_are_done_or_none(rt: Any) -> None:
    with pytest.raises(ConfigError, match="int3"):
        rt.apply([Release((1,)), Swap((2,), "int3")])
    assert rt.form() == FULL


@pytest.mark.parametrize("wrong", [[99], ["model.layers.77"]])
def test_what_is_no_layer_is_refused(rt: Any, wrong: list[Any]) -> None:
    with pytest.raises(ConfigError):
        rt.release(wrong)


def test_a_worker_without_options_says_what_is_missing() -> None:
    from elastic.engines.vllm.assembly import model_of

    class Config:
        instance_id = "none"

        class parallel_config:  # noqa: N801
            rank = 0

    with pytest.raises(StateError, match=r"elastic\.vllm\.options"):
        model_of(Config)


@pytest.mark.usefixtures("llm")
def test_a_second_engine_in_one_process_is_refused() -> None:
    with pytest.raises(StateError, match="one KV connector"), elastic_engine("16MiB"):
        pass
