"""What a replay wrote of its requests, read back."""

from __future__ import annotations

import json
from pathlib import Path

from elastic.bench.replay.records import Record


def read_records(path: Path) -> list[Record]:
    """Read a file of `write_records`."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Record(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in rows]
