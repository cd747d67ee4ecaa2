"""Every request gets in and ends: a large one under a stream of small ones, and all without promises."""

from __future__ import annotations

from typing import Any

import pytest

import elastic.vllm
from elastic import ConfigError
from elastic.engines.vllm.kv.admission import PATIENCE, GroupDemand, PromiseLedger
from support.vllm_engine.engine import TEXTS, counted_preemptions, elastic_engine, expected, run, sector_bytes


def test_a_large_request_gets_in_under_a_stream_of_small_ones() -> None:
    from vllm import SamplingParams

    with elastic_engine("16MiB") as llm:
        engine, ended, started = llm.llm_engine, list[str](), False

        def add(name: str, length: int) -> None:
            sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            engine.add_request(name, {"prompt": TEXTS[len(ended) % len(TEXTS)]}, sampling)

        def step() -> Any:
            nonlocal started
            for output in engine.step():
                started |= output.request_id == "large" and bool(output.outputs[0].token_ids)
                if output.finished:
                    ended.append(output.request_id)
                    add(f"next{len(ended)}", 15 + len(ended) * 11 % 40)

        for number in range(12):
            add(f"s{number}", 15 + number * 11 % 40)
        step()
        add("large", 230)
        while not started:
            step()
            assert len(ended) < 12 + 2 * PATIENCE, "it starves"
        engine.abort_request([f"s{n}" for n in range(12)] + [f"next{n}" for n in range(1, len(ended) + 1)] + ["large"])
        engine.step()


def test_a_session_is_promised_what_its_prompt_may_grow_to() -> None:
    """vLLM lets in what it gets later without asking."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from elastic.engines.vllm.scheduler_side import _tokens

    ledger = PromiseLedger([GroupDemand(32)], longest=256, lookahead=1)
    sampling = SamplingParams(max_tokens=6)
    demands = [
        ledger.demand(_tokens(Request("s", [1] * 20, sampling, None, resumable=resumable)))
        for resumable in (False, True)
    ]
    assert demands == [1, ledger.largest]


def test_without_promises_a_limit_below_one_request_is_no_end(reference: list[list[int]]) -> None:
    with elastic_engine("24MiB", promise=False) as llm:
        elastic.vllm.runtime(llm).kv.resize(sector_bytes(llm))
        assert run(llm, [190, 190, 190]) == expected(reference, [190, 190, 190])


def test_without_promises_a_budget_below_one_request_is_refused() -> None:
    refused = pytest.raises(ConfigError, match="lower max_model_len or raise the budget")
    with refused, elastic_engine("13MiB", promise=False):
        pass


@pytest.mark.parametrize("promise", [True, False])
def test_requests_that_read_no_prefix_wait_for_room_like_others(reference: list[list[int]], promise: bool) -> None:
    """vLLM lets those in of which log-probabilities of the prompt are wanted, whatever a connector answers."""
    lengths = [190] * 14
    with elastic_engine("16MiB", promise=promise, enable_prefix_caching=True) as llm:
        with counted_preemptions(llm) as preempted:
            assert run(llm, lengths, prompt_logprobs=1) == expected(reference, lengths)
        assert bool(preempted) != promise
        assert run(llm, lengths) == expected(reference, lengths)
