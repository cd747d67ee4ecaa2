"""Engines of vLLM in this process, and requests that are stepped by hand."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import elastic
import elastic.vllm
from elastic.memory import places

MODEL = str(Path(elastic.__file__).parent / "assets" / "stdlib-2.6m")
LONGEST = 256
TEXTS = (
    "import os\n\ndef walk(top):\n", "class Thread:\n    def __init__(self", 'def parse(text, start=0):\n    """',
    "import re\nimport sys\n\n", "    def close(self):\n        if self", "for name in names:\n    ",
    "try:\n    import", "def main(argv=None):\n",
)  # fmt: skip
LONG_TEXTS = [f"{text}{'# what makes it longer than two blocks of 32 tokens, again and again' * 3}\n" for text in TEXTS]
"""Prompts that requests can share: of more than two blocks."""
FULL = ("float32",) * 12
"""The form of the model when all layers are there."""
MIXED = [90, 20, 60, 40] * 3
PLAIN: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": LONGEST, "max_num_seqs": 16, "block_size": 32,
    "enable_prefix_caching": False,
}  # fmt: skip


@contextmanager
def plain_engine(model: str = MODEL, **options: Any) -> Iterator[Any]:
    """Run vLLM as it is."""
    from vllm import LLM

    llm = LLM(model, **{**PLAIN, **options})
    try:
        yield llm
    finally:
        stop(llm)


@contextmanager
def elastic_engine(budget: str = "20MiB", model: str = MODEL, **options: Any) -> Iterator[Any]:
    """Run vLLM with elastic; options of `elastic.vllm.options` go there, the others to vLLM."""
    names = ("policy", "order", "promise", "move_blocks", "connector", "page_bytes", "slo", "variant_cache")
    ours = {name: options.pop(name) for name in names if name in options}
    ours = {"variants": options.pop("variants", ("int4",)), **ours}
    with plain_engine(model, **{**elastic.vllm.options(budget, **ours), **options}) as llm:
        yield llm
    assert not places._open, f"places still open: {list(places._open)}"


def stop(llm: Any) -> None:
    """End an engine in this process, so that another can start."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()


def scheduler(llm: Any) -> Any:
    """Return vLLM's scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def side(llm: Any) -> Any:
    """Return what our connector keeps beside the scheduler, also where it is the first of several."""
    connector = scheduler(llm).connector
    return getattr(connector, "sub_connectors", [connector])[0].scheduler


def coordinator(llm: Any) -> Any:
    """Return the coordinator beside the scheduler."""
    return side(llm).coordinator


def sector_bytes(llm: Any) -> int:
    """Return the bytes of one sector."""
    sectors = side(llm)._local.sectors
    return int(sectors.sector_pages * sectors.kv.pool.page_bytes)


def run(
    llm: Any,
    lengths: Sequence[int],
    *,
    each_step: Callable[[int], object] = lambda step: None,
    texts: Any = TEXTS,
    adapters: Sequence[Any] = (None,),
    **sampled: Any,
) -> list[list[int]]:
    """Decode one request of each length greedily, with texts and LoRA adapters in turn; return their tokens.

    `sampled`: more of vLLM's `SamplingParams`.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    for number, length in enumerate(lengths):
        sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, **sampled)
        prompt, adapter = {"prompt": texts[number % len(texts)]}, adapters[number % len(adapters)]
        engine.add_request(f"r{number}", prompt, sampling, lora_request=adapter)
    tokens: dict[str, list[int]] = {}
    step = 0
    while engine.has_unfinished_requests():
        each_step(step)
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
        assert step < 20_000, "requests do not end"
    return [tokens[f"r{number}"] for number in range(len(lengths))]


def expected(reference: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Return what `run` gives in an engine without elastic."""
    return [list(reference[number % len(reference)][:length]) for number, length in enumerate(lengths)]


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until something is so that comes by itself."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def come_back(runtime: Any) -> None:
    """Wait until deferred layers are back: vLLM's scheduler gives blocks up beside us."""
    wait_for(lambda: runtime.form() == FULL)


def restore_all(runtime: Any) -> None:
    """Bring all layers back in full, and wait for those that are deferred."""
    runtime.restore()
    wait_for(lambda: {*runtime.form()} <= {"float32", "bfloat16"})


@contextmanager
def counted_preemptions(llm: Any) -> Iterator[list[str]]:
    """Note which requests lose their blocks."""
    target, preempted = scheduler(llm), list[str]()
    original = target._preempt_request

    def count(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return original(request, *args, **kwargs)

    target._preempt_request = count
    try:
        yield preempted
    finally:
        target._preempt_request = original


def require_plain_tokens(
    model: str,
    budget: str,
    *,
    only_elastic: Mapping[str, Any] = MappingProxyType({}),
    adapters: Sequence[Any] = (None,),
    then: Callable[[Any], object] = lambda llm: None,
    **options: Any,
) -> None:
    """Compare a run under releases, restores and limits with plain vLLM's, and one after `then` was given the engine.

    It may change layers, which are restored.
    """
    with plain_engine(model, **options) as llm:
        reference = run(llm, MIXED, adapters=adapters)
    with elastic_engine(budget, model, **{"variants": (), **options, **only_elastic}) as llm:
        rt, most = elastic.vllm.runtime(llm), coordinator(llm).mapped

        def act(step: int) -> None:
            if step % 20 == 5:
                rt.release([1, 3])
            if step % 20 == 10:
                rt.kv.resize(max(1, most // 2) * sector_bytes(llm))
            if step % 20 == 15:
                rt.kv.resize("max")
                rt.restore()
            coordinator(llm).capacity.check()

        with counted_preemptions(llm) as preempted:
            tokens = run(llm, MIXED, each_step=act, adapters=adapters)
        rt.kv.resize("max")
        rt.check()
        assert preempted == []
        assert [t == r for t, r in zip(tokens, reference, strict=True)] == [True] * len(MIXED)
        restore_all(rt)
        then(llm)
        restore_all(rt)
        assert run(llm, MIXED[:4], adapters=adapters) == reference[:4]
        rt.check()
