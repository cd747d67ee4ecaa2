"""The configuration map: it is read back as it was written, and only where it is true; and the guest that fills it."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.errors import ConfigError, StateError
from elastic.estimation.profile import CostProfile, measure_fingerprints
from elastic.estimation.profiles import store as profile_store
from elastic.estimation.profiles.guest import GuestProcess, ProfilingProcess, guest_bytes
from elastic.estimation.profiles.store import ProfileKey, ProfileStore, merged, model_digest, to_json
from elastic.planning.estimate.layer_cost import LayerCost
from elastic.planning.measured_cost import LinearLatency
from elastic.planning.pipeline.chunk_cost import ChunkCost
from support import architectures


def profile(weights: str = "full", token: float = 0.1 + 0.2) -> CostProfile:
    cost = ChunkCost(1e-9, 2e-9, token, 4e-4, 1e-4)
    layer = LayerCost(((1, token), (64, 2.0)), 1e-5, 1e-9, 1e-8, 1e-8, 128, 32)
    key = "Layer full_attention", weights
    link = LinearLatency(1e-5, 1e-9)
    return CostProfile("cpu", {key: layer}, {weights: cost}, link, {weights: 0.5}, {weights: 7}, {key: 0.9}, 0.25)


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    architectures.build("llama-gqa").save_pretrained(path)
    return path


@pytest.fixture
def store(tmp_path: Path) -> ProfileStore:
    return ProfileStore(tmp_path, beside=False)


def test_what_was_measured_is_read_back_to_the_bit(model: Path, store: ProfileStore) -> None:
    assert store.load(model, "cpu") is None
    store.save(model, profile())
    assert store.load(model, "cpu") == profile()
    assert store.load(model, "cuda") is None if torch.cuda.is_available() else True


def test_a_measurement_is_added_to_what_is_known(model: Path, store: ProfileStore) -> None:
    store.save(model, profile("full", 1.0))
    store.save(model, profile("int8"))
    store.save(model, profile("full", 2.0))
    assert store.load(model, "cpu") == merged(profile("int8"), profile("full", 2.0))


def test_it_is_beside_the_checkpoint_where_that_can_be_written(model: Path, tmp_path: Path) -> None:
    at = ProfileStore(tmp_path / "cache").save(model, profile())
    assert at.parent == model
    at.unlink()
    away = ProfileStore(tmp_path / "cache", beside=False).save(model, profile())
    assert away.is_relative_to(tmp_path / "cache")
    assert ProfileStore(tmp_path / "cache").load(model, "cpu") == profile()


@pytest.mark.parametrize("field", ["model", "device", "torch", "elastic"])
def test_one_of_another_model_device_or_version_is_none(
    model: Path, store: ProfileStore, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    path = store.save(model, profile())
    key = ProfileKey.here(model, "cpu")
    content = json.loads(path.read_text())
    content["key"][field] = "another"
    path.write_text(json.dumps(content))
    assert store.load(model, "cpu") is None
    content["key"][field] = getattr(key, field)
    path.write_text(json.dumps(content))
    assert store.load(model, "cpu") == profile()


def test_a_changed_model_has_another_digest(model: Path, tmp_path: Path) -> None:
    wider = tmp_path / "wider"
    architectures.build("llama-mha").save_pretrained(wider)
    assert model_digest(wider) != model_digest(model)
    trained = tmp_path / "trained"
    architectures.build("llama-gqa", seed=5).save_pretrained(trained)
    assert model_digest(trained) == model_digest(model), "other values take the same seconds"
    with pytest.raises(ConfigError, match="no model there"):
        model_digest(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": "elastic configuration map 4"}'])
def test_a_damaged_map_is_as_none(model: Path, store: ProfileStore, text: str) -> None:
    path = store.save(model, profile())
    path.write_text(text)
    assert store.load(model, "cpu") is None


def test_what_cannot_be_written_beside_a_checkpoint_adds_to_what_is_there(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is only read, with a map of one form: the other form is not measured for ever."""
    store, write = ProfileStore(tmp_path / "cache"), profile_store._write
    at = store.save(model, profile("full"))

    def read_only(path: Path, *rest: Any) -> None:
        if path.parent == model:
            raise PermissionError("read-only")
        write(path, *rest)

    monkeypatch.setattr(profile_store, "_write", read_only)
    store.save(model, profile("int8"))
    try:
        whole = store.load(model, "cpu")
        assert whole is not None
        assert whole.around.keys() == {"full", "int8"}
        assert store.load(model, "cpu", ("full", "int8")) == whole
    finally:
        at.unlink()


def test_seconds_below_zero_are_none(model: Path, store: ProfileStore) -> None:
    wrong = replace(next(iter(profile().layers.values())), chunk=-1.0), ChunkCost(0, 0, -1.0, 0, 0)
    for cost in wrong:
        store.save(model, replace(profile(), layers={("Layer full_attention", "full"): cost}))
        assert store.load(model, "cpu") is None


def test_a_map_that_can_be_written_nowhere_says_where_to(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"set {profile_store.CACHE}"):
        ProfileStore(tmp_path / "file", beside=False).save(model, profile())


def test_a_paced_measurement_waits_behind_each_batch_and_can_be_ended(model: Path) -> None:
    measured: list[float] = []

    class LoadRoseError(Exception):
        pass

    def pace(seconds: float) -> None:
        measured.append(seconds)
        if len(measured) > 3:
            raise LoadRoseError

    with pytest.raises(LoadRoseError):
        measure_fingerprints(model, context=32, step_tokens=16, most_s=0.05, pace=pace)
    assert len(measured) == 4
    assert min(measured) > 0


def test_a_guest_says_in_words_what_it_cannot_measure(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model there"):
        guest_bytes(tmp_path, ("full",), 32)


def test_a_guest_ends_whatever_it_has_to_say(tmp_path: Path) -> None:
    cost = ChunkCost(1e-9, 2e-9, 3e-6, 4e-4, 1e-4)
    layers = {(f"kind {number}", "full"): cost for number in range(2000)}
    told = CostProfile("cpu", layers, {"full": cost})
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(to_json(told)))
    guest = GuestProcess("json.tool", ["--compact", str(path)])
    guest._process.wait(timeout=60)
    assert guest.result() == told


def test_a_guest_needs_no_directory_for_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers may have none that can be written to."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    guest = GuestProcess("this", [])
    guest.cancel()


def test_a_guest_may_be_cancelled_while_it_is_asked_for_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a thread that wants its memory: what it measured is not known then, and can be measured again."""
    guest = GuestProcess("this", [])

    def cancel() -> None:
        monkeypatch.undo()
        guest.cancel()

    monkeypatch.setattr(guest._process, "wait", cancel)
    with pytest.raises(StateError, match="was cancelled"):
        guest.result()


@pytest.mark.slow
def test_a_guest_that_others_kill_says_so_and_not_that_its_model_cannot_be_measured(model: Path) -> None:
    guest = ProfilingProcess(model, ("full",), "cpu", context=32, share=0.5)
    os.kill(guest._process.pid, signal.SIGKILL)
    guest._process.wait()
    assert guest.ended
    with pytest.raises(StateError, match="was killed by signal 9"):
        guest.result()


@pytest.mark.slow
def test_a_guest_that_is_cancelled_leaves_no_process(model: Path) -> None:
    guest = ProfilingProcess(model, ("full",), "cpu", context=32, share=0.5)
    assert not guest.ended
    assert os.getpriority(os.PRIO_PROCESS, guest._process.pid) == 19  # from the beginning: imports take a core, too
    guest.cancel()
    assert guest.ended
    with pytest.raises(StateError, match="was cancelled"):
        guest.result()
