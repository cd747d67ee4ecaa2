"""`worker_extension_cls`: weights alone, attached to an engine with vLLM's own worker and KV cache."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

import elastic.vllm
from elastic.engines.vllm.client.messages import encode
from elastic.engines.vllm.client.settings import EngineSettings
from elastic.errors import ConfigError, StateError
from elastic.memory import places
from support.vllm_engine.engine import TEXTS, elastic_engine, expected, plain_engine, run, wait_for

LENGTHS = [60] * len(TEXTS)


def test_weights_alone_move_in_an_engine_that_runs(reference: list[list[int]]) -> None:
    with plain_engine(
        quantization="elastic", worker_extension_cls="elastic.engines.vllm.worker.ElasticExtension"
    ) as llm:
        settings = EngineSettings(64 << 20, variants=("int4",))
        assert llm.collective_rpc("elastic_attach", args=(encode(settings.to_json()),)) == [12]
        runtime = elastic.vllm.runtime(llm)

        def change(step: int) -> None:
            if step % 6 == 2:
                runtime.release([step % 12])
            elif step % 6 == 5:
                runtime.restore()

        assert run(llm, LENGTHS, each_step=change) == expected(reference, LENGTHS)
        runtime.restore()
        runtime.swap([2, 5], "int4")
        assert runtime.form()[2] == "int4"
        runtime.restore()
        assert run(llm, LENGTHS) == expected(reference, LENGTHS)
        runtime.check()
        runtime.release([4])
        llm.collective_rpc("elastic_detach")
        assert run(llm, LENGTHS) == expected(reference, LENGTHS)
        with pytest.raises(StateError, match="elastic_attach"):
            runtime.status()


def test_weights_are_attached_once_and_go_with_an_engine_that_was_not_detached() -> None:
    with plain_engine(
        quantization="elastic", worker_extension_cls="elastic.engines.vllm.worker.ElasticExtension"
    ) as llm:
        attach = encode(EngineSettings(64 << 20, variants=("int4",), policy="balanced").to_json())
        llm.collective_rpc("elastic_attach", args=(attach,))
        with pytest.raises(StateError, match="elastic_detach"):
            llm.collective_rpc("elastic_attach", args=(attach,))
        llm.collective_rpc("elastic_detach")
        llm.collective_rpc("elastic_attach", args=(attach,))
        elastic.vllm.runtime(llm).release([1])
    del llm
    gc.collect()
    wait_for(lambda: not places._open)
    with elastic_engine("24MiB") as llm:
        assert len(run(llm, [4])[0]) == 4


def test_no_policy_is_attached_to_one_rank_of_several() -> None:
    from vllm.config import CompilationMode

    from elastic.engines.vllm.worker import ElasticExtension

    worker = ElasticExtension()
    worker.vllm_config = SimpleNamespace(  # type: ignore[attr-defined]
        compilation_config=SimpleNamespace(mode=CompilationMode.NONE),
        model_config=SimpleNamespace(quantization="elastic"),
        parallel_config=SimpleNamespace(world_size=2),
    )
    settings = EngineSettings(64 << 20, variants=("int4",), policy="balanced")
    with pytest.raises(ConfigError, match="policy='balanced' would change one of 2 ranks"):
        worker.elastic_attach(encode(settings.to_json()))
