"""The host store and checkpoints by mmap."""

from __future__ import annotations

import gc
import json
import logging
import mmap
import struct
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from elastic.errors import CapacityError, ConfigError
from elastic.memory import host_store as module
from elastic.memory.checkpoint_file import Checkpoint
from elastic.memory.checksum import digest
from elastic.memory.copy_engine import ThreadCopyEngine, copy
from elastic.memory.host_store import HostStore, HostTensor
from support.child_process import in_fork


def keep(store: HostStore, source: torch.Tensor, **options: Any) -> HostTensor:
    return store.keep(source, module.digest(source), **options)


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_kept_is_a_copy_of_the_bits(dtype: torch.dtype) -> None:
    source = torch.randint(0, 255, (33, dtype.itemsize * 7), dtype=torch.uint8).view(dtype)
    kept = keep(HostStore(), source)
    before = source.clone()
    source.view(torch.uint8).zero_()
    assert torch.equal(kept.tensor.view(torch.uint8), before.view(torch.uint8))
    assert kept.digest == digest(before)


def test_equal_tensors_are_held_once_and_go_when_nobody_needs_them() -> None:
    store = HostStore()
    one, two = keep(store, torch.ones(100)), keep(store, torch.ones(100))
    assert one is two
    other = keep(store, torch.ones(10, 10))
    assert store.status().memory_bytes == 800
    del one, two, other
    gc.collect()
    assert store.status().memory_bytes == 0


def test_what_two_threads_keep_at_once_is_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, others, copied = HostStore(), list[HostTensor](), HostStore._copy

    def copy_while_another_does(store: HostStore, source: torch.Tensor, lock: bool) -> torch.Tensor:
        monkeypatch.setattr(HostStore, "_copy", copied)
        others.append(keep(store, source))
        return store._copy(source, lock)

    monkeypatch.setattr(HostStore, "_copy", copy_while_another_does)
    assert keep(store, torch.ones(100)) is others[0]
    assert store.status().memory_bytes == 400


def test_bytes_are_compared_and_not_values() -> None:
    store, weights = HostStore(), torch.full((300, 3), float("nan"))
    assert keep(store, weights) is not keep(store, weights.abs().neg())
    one = keep(store, weights.t())
    assert keep(store, weights.t().clone()) is one


def test_tensors_with_equal_digests_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "digest", lambda tensor: 0)
    store = HostStore()
    one, two = keep(store, torch.ones(8)), keep(store, torch.zeros(8))
    assert one is not two
    assert bool(one.tensor.all())
    assert not bool(two.tensor.any())


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 900), st.data())
def test_a_digest_tells_any_changed_byte_and_any_swapped_rows(size: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(size)
    tensor = torch.randint(0, 255, (size,), dtype=torch.uint8, generator=generator)
    other = tensor.clone()
    other[data.draw(st.integers(0, size - 1))] += 1
    assert digest(other) != digest(tensor)
    wide = torch.randn(4, 256, generator=generator)
    assert digest(wide) != digest(wide[[1, 0, 2, 3]])
    assert digest(wide) == digest(wide.t().contiguous().t())


def test_host_memory_that_is_short_is_an_error_that_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(CapacityError, match=r"host memory is short.*checkpoint=PATH"):
        keep(HostStore(), torch.ones(8))


def test_a_refused_page_lock_is_one_warning_and_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "page_lock", lambda tensor: False)
    store = HostStore()
    with caplog.at_level(logging.WARNING):
        kept = [keep(store, torch.full((8,), float(i)), lock=True) for i in range(3)]
    assert [k.tensor[0].item() for k in kept] == [0, 1, 2]
    assert caplog.text.count("page-lock") == 1


def test_copies_run_in_order_and_an_error_reaches_who_waits() -> None:
    copier = ThreadCopyEngine()
    target = torch.zeros(8)
    copier.start([(target, torch.ones(8))])
    last = copier.start([(target, torch.full((8,), 2.0))])
    last.wait()
    assert target.tolist() == [2.0] * 8
    failing = copier.start([(target, torch.ones(3))])
    failing.discard()
    with pytest.raises(RuntimeError, match="size"):
        failing.finish()
    copier.close()


def test_a_copy_minds_strides() -> None:
    target, source = torch.zeros(3, 4).t(), torch.randn(4, 3)
    copy(target, source)
    assert torch.equal(target, source)


# -- checkpoints


def test_a_checkpoint_gives_the_bits_of_its_tensors_by_mmap(tmp_path: Path) -> None:
    tensors = {f"model.{str(d)[6:]}": torch.randn(5, 6).to(d) for d in DTYPES if d.is_floating_point}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    for name, tensor in tensors.items():
        found = checkpoint.find(f"base_model.{name}")
        assert found is not None
        assert found.dtype == tensor.dtype
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
        assert found.untyped_storage().nbytes() == tensor.nbytes
    assert checkpoint.find("model.other") is None
    assert checkpoint.find("model.base_layer.float32") is not None


def test_a_checkpoint_is_used_only_for_equal_bits(tmp_path: Path) -> None:
    tensor = torch.randn(64, 64)
    save_file({"weight": tensor}, tmp_path / "m.safetensors")
    file = Checkpoint(tmp_path / "m.safetensors").find("weight")
    store = HostStore()
    assert keep(store, tensor, file=file).from_file
    assert not keep(store, tensor + 1, file=file).from_file
    assert not keep(store, tensor.double(), file=file).from_file
    assert store.status().file_bytes == 0, "nobody holds it any more"


@pytest.mark.slow
def test_processes_share_the_pages_of_a_checkpoint(tmp_path: Path) -> None:
    save_file({"weight": torch.randn(1 << 20)}, tmp_path / "m.safetensors")
    out = in_fork(f"""
    import torch, re
    from elastic.memory.checkpoint_file import Checkpoint
    tensor = Checkpoint({str(tmp_path)!r}).find("weight")
    tensor.sum()
    smaps = open("/proc/self/smaps").read()
    part = smaps[smaps.index("m.safetensors"):][:900]
    print({{key: int(re.search(rf"^{{key}}:\\s+(\\d+)", part, re.M)[1]) for key in ("Rss", "Anonymous")}})
    """)
    counts = json.loads(out.replace("'", '"'))
    assert counts["Rss"] >= 4096
    assert counts["Anonymous"] == 0, "no page is this process's own"


@pytest.mark.parametrize("what", ["nothing there", "empty folder", "text"])
def test_what_is_no_checkpoint_is_refused_by_name(what: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    if what == "text":
        path.write_text("this is no safetensors file at all")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        Checkpoint(tmp_path if what == "empty folder" else path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [-4, -4], "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": [4.0, 4], "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64.0]},
        {"dtype": "F6_E2M3", "data_offsets": [0, 12]},
    ],
)
def test_a_header_with_sizes_that_no_tensor_has_is_refused(entry: dict[str, Any], tmp_path: Path) -> None:
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(ConfigError, match=f"{path} is damaged"):
        Checkpoint(path)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_an_error_of_ours_or_harmless(data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / f"{uuid.uuid4()}.safetensors"
    save_file({"a": torch.ones(16), "b": torch.zeros(4, 4)}, path)
    raw = bytearray(path.read_bytes())
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    raw[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(8, len(raw)))])
    try:
        checkpoint = Checkpoint(path)
    except ConfigError:
        return
    for name in "ab":
        found = checkpoint.find(name)
        assert found is None or found.numel() <= 16
