"""Files whose JSON nests deeper than Python recurses: each reader says what it is that it cannot read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.bench.traces.readers import read_trace
from elastic.cli.main import main
from elastic.errors import ConfigError
from elastic.kvcache.decode_table import DecodeKernelTable
from elastic.memory.checkpoint_file import Checkpoint
from elastic.quant.checkpoints.config import read_declared
from elastic.quant.sensitivity.profile_file import Profile

DEEP = 100_000 * "["


def checkpoint(path: Path) -> Checkpoint:
    """Of which the header is such JSON."""
    header = path.read_bytes()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return Checkpoint(path)


@pytest.mark.parametrize(
    ("read", "name", "before"),
    [
        (read_trace, "trace.jsonl", '{"timestamp": '),
        (DecodeKernelTable().load, "table.json", ""),
        (Profile.load, "profile.json", ""),
        (checkpoint, "model.safetensors", '{"__metadata__": '),
        (lambda path: read_declared(path.parent), "quantize_config.json", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_nests_too_deep_is_named(
    read: Callable[[Path], Any], name: str, before: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(before + DEEP)
    with pytest.raises(ConfigError, match=name):
        read(tmp_path / name)


def test_a_connector_that_nests_too_deep_is_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm-args", "--budget", "1GiB", "--connector", DEEP]) == 2
    assert "is no JSON" in capsys.readouterr().err
