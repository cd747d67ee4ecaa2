"""The controller on vLLM: it swaps layers when requests wait for blocks, and brings them back when they do not."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import elastic.vllm
from elastic import ConfigError
from elastic.config import Policy
from elastic.engines.vllm import assembly
from elastic.memory import places
from elastic.types import Restore, Swap
from support.vllm_engine.engine import (
    MODEL,
    come_back,
    counted_preemptions,
    elastic_engine,
    expected,
    run,
    wait_for,
)

FULL = ("float32",) * 12


def test_layers_leave_under_pressure_and_return_after_it() -> None:
    policy = Policy(tick_s=0.01, pressure_ticks=1, recovery_ticks=1, cooldown_s=0.05, dwell_s=0.1, idle_s=0.1)
    with elastic_engine("14MiB", policy=policy, variants=("int4",)) as llm, counted_preemptions(llm) as preempted:
        runtime = elastic.vllm.runtime(llm)
        start = runtime.kv.capacity_bytes
        forms: set[tuple[str, ...]] = set()
        capacities: list[int] = [start]

        def look(step: int) -> None:
            if step % 10 == 0:
                forms.add(runtime.form())
                capacities.append(runtime.kv.capacity_bytes)

        run(llm, [160] * 24, each_step=look)
        assert any("int4" in form for form in forms)
        assert max(capacities) > start > 0, "known before the first step"
        assert preempted == []
        deadline = time.monotonic() + 60
        while runtime.form() != FULL:
            assert time.monotonic() < deadline, (runtime.form(), runtime.health())
            time.sleep(0.05)
        done = {type(event.action) for event in runtime.events() if event.ok}
        assert done >= {Swap, Restore}
        assert runtime.health().faults == ()
        runtime.check()


def test_a_first_release_under_a_policy_waits_for_blocks(reference: list[list[int]]) -> None:
    """KV blocks begin with all that weights leave: there is no prefetch buffer yet."""
    with elastic_engine("16MiB", policy=Policy(tick_s=3600.0)) as llm:
        rt, lengths = elastic.vllm.runtime(llm), [64] * 8
        assert rt.release([1, 2]).status == "deferred"
        wait_for(lambda: rt.form()[1:3] == ("absent", "absent"))
        assert run(llm, lengths) == expected(reference, lengths)
        rt.restore()
        come_back(rt)

        def act(step: int) -> None:
            if step == 20:
                assert rt.release(range(6)).status == "deferred"

        with counted_preemptions(llm) as preempted:
            assert run(llm, lengths, each_step=act) == expected(reference, lengths)
        assert preempted == []
        wait_for(lambda: rt.form()[:6] == ("absent",) * 6)
        assert run(llm, lengths) == expected(reference, lengths)
        rt.check()


def test_a_profile_of_the_checkpoint_orders_its_layers_and_one_of_another_model_is_refused(tmp_path: Path) -> None:
    """vLLM has joined matrices, of which no profile can be: it is compared with the files."""
    ids, model = torch.arange(32).view(2, 16), AutoModelForCausalLM.from_pretrained(MODEL)
    profile = elastic.profile(model, ids, path=tmp_path / "own.json")
    with elastic_engine("16MiB", policy="balanced", order=tmp_path / "own.json"):
        (rank,) = assembly._models.values()
        path = tuple(step.layer for step in rank.runtime.controller.policy._path)
        assert path == profile.order[:8], "as many as the policy may swap"
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight.mul_(2)
    elastic.profile(model, ids, path=tmp_path / "others.json")
    refused = pytest.raises(ConfigError, match=r"weights of 1 of 12 layers differ \(the first is layer 3\)")
    with refused, elastic_engine("16MiB", policy="balanced", order=tmp_path / "others.json"):
        pass
    assert not places._open


def test_the_files_of_a_model_are_in_its_directory_or_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    from elastic.engines.vllm.worker import _directory

    def config(model: str) -> SimpleNamespace:
        return SimpleNamespace(
            model_config=SimpleNamespace(model=model, revision=None),
            load_config=SimpleNamespace(download_dir=str(tmp_path)),
        )

    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)
    assert _directory(config(MODEL)) == MODEL
    assert _directory(config("some/model")) == str(snapshot)
    for absent in ("some/other", "s3://bucket/model"):
        with pytest.raises(ConfigError, match=f"model {absent}: its files are in no directory of this machine"):
            _directory(config(absent))
