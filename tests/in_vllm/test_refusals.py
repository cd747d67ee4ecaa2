"""What cannot work is refused in words when the engine starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import elastic.vllm
from elastic import ConfigError
from elastic.engines.vllm.kv import sectors
from elastic.errors import BackendUnavailable, StateError
from elastic.memory import places
from support.vllm_engine.engine import MODEL, PLAIN, elastic_engine, run


@pytest.fixture(scope="module", autouse=True)
def groups_of_engines_that_did_not_start() -> Iterator[None]:
    """End them after all: vLLM does not, and a model with experts that started then would lack its own."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    yield
    cleanup_dist_env_and_memory()


def test_a_budget_too_small_for_the_longest_request_is_refused_and_a_larger_one_serves() -> None:
    with pytest.raises(ConfigError, match="lower max_model_len or raise the budget"), elastic_engine("14MiB"):
        pass
    with elastic_engine("20MiB") as llm:
        assert len(run(llm, [4])[0]) == 4


def test_a_cache_of_variants_that_cannot_be_made_is_refused() -> None:
    refused = pytest.raises(ConfigError, match=r"variant_cache='/proc/none' cannot be made")
    with refused, elastic_engine("20MiB", variant_cache="/proc/none"):
        pass
    assert not places._open


def answer_nothing(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("where", ["addresses", "allocation", "vLLM"])
def test_another_engine_starts_after_one_that_did_not(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = {"addresses": 17, "vLLM": 1 << 40}  # no whole pages; more bytes than there are addresses for
    options = {"num_gpu_blocks_override": blocks[where]} if where in blocks else {}
    with monkeypatch.context() as patch:
        if where == "allocation":
            patch.setattr(sectors._AnswerZeros, "__torch_function__", answer_nothing)
        with pytest.raises(Exception, match=r"KV cache|memory") as raised, elastic_engine("24MiB", **options):
            pass
    if where != "vLLM":
        assert isinstance(raised.value, ConfigError | BackendUnavailable)
        assert not places._open
    del raised
    with elastic_engine("24MiB") as llm:
        assert len(run(llm, [4])[0]) == 4


def test_a_worker_without_a_model_and_a_connector_on_the_wrong_side_say_so() -> None:
    from elastic.engines.vllm.connector import ElasticConnector
    from elastic.engines.vllm.worker import CpuWorker

    with pytest.raises(StateError, match="no elastic model: it was shut down"):
        CpuWorker.__new__(CpuWorker).execute_model(None)
    connector = ElasticConnector.__new__(ElasticConnector)
    for asked in (connector.get_num_new_matched_tokens, connector.request_finished_all_groups):
        with pytest.raises(StateError, match="ask the one beside the scheduler"):
            asked(None, 0)


def test_a_cache_in_another_dtype_than_the_models_is_refused() -> None:
    ours = r"kv_cache_dtype='bfloat16': .* dtype, float32, or in fp8"
    vllms = 'kv_cache_dtype="bfloat16" is incompatible with dtype="float32"'  # from 0.33 on
    refused = pytest.raises(ValueError, match=f"{ours}|{vllms}")
    with refused, elastic_engine("24MiB", kv_cache_dtype="bfloat16"):
        pass
    assert not places._open


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": None},
        {"kv_transfer_config": None},
        {"additional_config": {}},
        {"quantization": None, "kv_transfer_config": None},
    ],
)
def test_an_engine_without_all_of_our_options_is_refused(options: dict[str, Any]) -> None:
    """It would serve, with weights that cannot move, or KV blocks outside the budget."""
    with pytest.raises(ConfigError, match=f"its own {', '.join(options)}; give"), elastic_engine("24MiB", **options):
        pass
    assert not places._open


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "compressed-tensors"])
def test_a_quantized_checkpoint_is_refused_by_vllm(method: str, tmp_path: Path) -> None:
    """It takes one quantization method, and elastic's is one."""
    shutil.copytree(MODEL, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    declared = {"quant_method": method, "bits": 4, "group_size": 32, "zero_point": True, "desc_act": False}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": declared}))
    refused = pytest.raises(ValueError, match=rf"\({method}\) does not match .* argument \(elastic\)")
    with refused, elastic_engine("24MiB", str(tmp_path / "model")):
        pass
    assert not places._open


def test_stages_of_a_pipeline_are_refused_by_each_worker() -> None:
    from vllm.engine.arg_utils import EngineArgs

    from elastic.engines.vllm.worker import CpuWorker

    options = {**PLAIN, **elastic.vllm.options("24MiB"), "pipeline_parallel_size": 2}
    worker = CpuWorker.__new__(CpuWorker)
    worker.vllm_config = EngineArgs(MODEL, distributed_executor_backend="mp", **options).create_engine_config()
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2: .* use tensor_parallel_size"):
        worker.load_model()
