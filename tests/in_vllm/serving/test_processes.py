"""An engine in a process of its own: orders, answers and deferred layers travel, also while no request is there."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

import elastic.vllm
from support.vllm_engine.engine import MODEL, PLAIN, TEXTS, expected, run

LENGTHS = [100] * len(TEXTS)
FULL = ("float32",) * 12


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")


def test_release_swap_and_resize_across_processes(reference: list[list[int]]) -> None:
    from vllm import LLM

    llm = LLM(MODEL, **PLAIN, **elastic.vllm.options("20MiB", variants=("int4",)))
    try:
        runtime = elastic.vllm.runtime(llm)

        def change(step: int) -> None:
            if step % 10 == 3:
                runtime.release([1, 6])
            elif step % 10 == 8:
                runtime.restore()

        assert run(llm, LENGTHS, each_step=change) == expected(reference, LENGTHS)
        runtime.swap([2, 5, 9], "int4")
        run(llm, [20, 20])
        runtime.restore()  # blocks are in the way, and nobody asks for tokens
        deadline = time.monotonic() + 60
        while runtime.form() != FULL:
            assert time.monotonic() < deadline, runtime.form()
            time.sleep(0.02)
        runtime.kv.resize("4MiB")
        assert run(llm, LENGTHS) == expected(reference, LENGTHS)
        assert runtime.kv.capacity_bytes <= 4 << 20
        runtime.kv.resize("max")
        runtime.check()
    finally:
        llm.llm_engine.engine_core.shutdown()


def async_engine(budget: str, **more: Any) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    options: dict[str, Any] = {**PLAIN, **elastic.vllm.options(budget, variants=("int4",)), **more}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(model=MODEL, **options))


async def decode(engine: Any, number: int, length: int = 60) -> list[int]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    outputs = [output async for output in engine.generate(TEXTS[number], sampling, f"r{number}")]
    return list(outputs[-1].outputs[0].token_ids)


async def decode_all(engine: Any, requests: int = 8) -> list[list[int]]:
    return await asyncio.gather(*(decode(engine, number) for number in range(requests)))


def test_an_async_engine(reference: list[list[int]]) -> None:
    async def serve() -> list[list[list[int]]]:
        engine = async_engine("20MiB")
        try:
            runtime = elastic.vllm.runtime(engine)
            before = await decode_all(engine)
            running = asyncio.create_task(decode_all(engine))
            await runtime.release([3])
            await runtime.restore()
            await runtime.resize_kv("4MiB")
            await runtime.check()
            return [before, await running]
        finally:
            engine.shutdown()

    assert asyncio.run(serve()) == [[tokens[:60] for tokens in reference]] * 2


@pytest.mark.long
def test_engines_of_data_parallelism_have_layers_of_their_own(reference: list[list[int]]) -> None:
    async def serve() -> None:
        engine = async_engine("20MiB", data_parallel_size=2)
        plain = [tokens[:60] for tokens in reference]
        try:
            both, (first, second) = elastic.vllm.runtime(engine), elastic.vllm.runtimes(engine)
            assert await decode_all(engine) == plain
            await second.release([3, 7])
            assert [await rt.form() for rt in (both, first)] == [FULL, FULL]
            assert (await second.form()).count("absent") == 2
            assert await decode_all(engine) == plain
            await second.restore()
            running = asyncio.create_task(decode_all(engine))
            await both.release([1])
            await both.resize_kv("4MiB")
            assert await running == plain
            assert [(await rt.form())[1] for rt in (first, second)] == ["absent"] * 2
            assert {(await rt.status()).kv[0].limit_bytes for rt in (first, second)} == {4 << 20}
            await both.restore()
            assert await decode_all(engine) == plain
            await first.check()
            await second.check()
        finally:
            engine.shutdown()

    asyncio.run(serve())


def test_an_engine_is_paused_while_layers_wait_for_blocks_of_its_requests(reference: list[list[int]]) -> None:
    async def serve() -> list[list[int]]:
        engine = async_engine("16MiB")
        try:
            runtime = elastic.vllm.runtime(engine)
            await runtime.release(range(6))
            running = asyncio.gather(*(decode(engine, number, 200) for number in range(8)))
            while (await runtime.status()).kv[0].used_bytes < 4 << 20:
                await asyncio.sleep(0.01)
            assert (await runtime.restore()).status == "deferred"
            await asyncio.wait_for(engine.pause_generation(mode="keep", clear_cache=False), 60)
            assert "absent" in await runtime.form()
            await engine.resume_generation()
            return await running
        finally:
            engine.shutdown()

    assert asyncio.run(serve()) == [tokens[:200] for tokens in reference]
