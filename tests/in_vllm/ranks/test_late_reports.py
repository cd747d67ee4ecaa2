"""What ranks in processes of their own did is known to the scheduler before it looks for the prefix of a request."""

from __future__ import annotations

import elastic.vllm
from support.vllm_engine.engine import LONG_TEXTS, TEXTS, elastic_engine


def test_what_comes_after_a_change_finds_nothing_of_before_though_no_step_has_told_of_it() -> None:
    """The worker is in a process of its own: the scheduler hears of its weights with the steps."""
    from vllm import SamplingParams

    with elastic_engine("32MiB", enable_prefix_caching=True, distributed_executor_backend="mp") as llm:
        rt, engine, ended = elastic.vllm.runtime(llm), llm.llm_engine, set[str]()
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        llm.generate(LONG_TEXTS, sampling, use_tqdm=False)
        assert llm.generate(LONG_TEXTS, sampling, use_tqdm=False)[0].num_cached_tokens > 0
        engine.add_request("lives", {"prompt": TEXTS[0]}, SamplingParams(max_tokens=100, ignore_eos=True))
        engine.step()
        rt.swap(range(6), "int4")
        for number, text in enumerate(LONG_TEXTS):
            engine.add_request(str(number), {"prompt": text}, sampling)
        while len(ended) < len(LONG_TEXTS):
            for output in engine.step():
                if output.finished and output.request_id != "lives":
                    assert output.num_cached_tokens == 0
                    ended.add(output.request_id)
        engine.abort_request(["lives"])
        engine.step()
