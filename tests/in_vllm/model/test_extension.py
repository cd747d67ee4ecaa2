"""`worker_extension_cls`: weights alone, attached to an engine with vLLM's own worker and KV cache."""

from __future__ import annotations

import pytest

import elastic.vllm
from elastic.engines.vllm.client.messages import encode
from elastic.engines.vllm.client.settings import EngineSettings
from elastic.errors import StateError
from support.vllm_engine.engine import TEXTS, expected, plain_engine, run

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
