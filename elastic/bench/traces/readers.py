"""Readers of trace files: Azure 2023 CSV, BurstGPT CSV, Mooncake JSONL, known by their first line."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from elastic.bench.traces.trace import Trace, TraceRequest
from elastic.errors import ConfigError, require_path

Row = Mapping[str, Any]


@dataclass(frozen=True)
class _Columns:
    """The columns of one format, and its reading of times."""

    time: str
    prompt: str
    output: str
    seconds: Callable[[Any], float]


def read_trace(path: str | Path, *, seed: int = 0) -> Trace:
    """Read a trace file; requests come out in the order of their arrival.

    Azure 2023 (`TIMESTAMP,ContextTokens,GeneratedTokens`): its wall clock counts from the first row. BurstGPT
    (`Timestamp,...,Request tokens,Response tokens,...`, with or without `Session ID` and `Elapsed time`): times are
    as written; where all are whole seconds, the n requests of a second are spread over it, one in each n-th part, at a
    seeded place. Mooncake JSONL (`timestamp` in ms, `input_length`, `output_length`): times are as written.
    Rows without prompt or output tokens are failed requests: dropped, and counted in `Trace.dropped`.
    Raises `ConfigError` naming file, line and what is wrong.
    """
    path = require_path(path, "trace")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read: {error.strerror}") from error
    lines = data.decode("utf-8-sig", errors="replace").splitlines()
    columns, rows = _sniff(path, lines)
    read = [_request(path, number, row, columns) for number, row in rows]
    if not read:
        raise ConfigError(f"{path}: there is no request in it")
    good = sorted((r for r in read if r.prompt_tokens and r.output_tokens), key=lambda r: r.arrival_s)
    if not good:
        raise ConfigError(f"{path}: none of its {len(read)} requests has tokens of a prompt and of an output")
    if columns is _AZURE:
        zero_s = min(r.arrival_s for r in read)
        good = [replace(r, arrival_s=round(r.arrival_s - zero_s, 6)) for r in good]
    if columns is _BURSTGPT and all(r.arrival_s.is_integer() for r in good):
        good = _spread(good, seed)
    return Trace(tuple(good), path.name, hashlib.sha256(data).hexdigest(), None, len(read) - len(good), seed)


def _sniff(path: Path, lines: list[str]) -> tuple[_Columns, Iterable[tuple[int, Row]]]:
    first = lines[0] if lines else ""
    if first.lstrip().startswith("{"):
        return _MOONCAKE, _json_rows(path, lines)
    header = first.split(",")
    for columns in (_AZURE, _BURSTGPT):
        if {columns.time, columns.prompt, columns.output} <= set(header):
            return columns, _csv_rows(path, lines)
    raise ConfigError(
        f"{path}, line 1: {first[:80]!r} is no header of a known trace; Azure has TIMESTAMP,ContextTokens,"
        "GeneratedTokens, BurstGPT Timestamp, Request tokens and Response tokens, Mooncake one JSON object a line"
    )


def _csv_rows(path: Path, lines: list[str]) -> Iterator[tuple[int, Row]]:
    reader = csv.DictReader(lines)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise ConfigError(f"{path}, line {reader.line_num}: it has not as many columns as the header")
            yield reader.line_num, row
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: {error}") from error


def _json_rows(path: Path, lines: list[str]) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: it is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number}: {line[:80]!r} is not a JSON object")
        yield number, row


def _request(path: Path, number: int, row: Row, columns: _Columns) -> TraceRequest:
    try:
        arrival_s = columns.seconds(row[columns.time])
    except KeyError as error:
        raise ConfigError(f"{path}, line {number}: {columns.time} is missing") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{path}, line {number}: {columns.time} {row[columns.time]!r} is not a time") from error
    if not math.isfinite(arrival_s) or arrival_s < 0 or isinstance(row[columns.time], bool):
        raise ConfigError(
            f"{path}, line {number}: {columns.time} {row[columns.time]!r} must be a finite number, not below 0"
        )
    prompt, output = (_count(path, number, row, name) for name in (columns.prompt, columns.output))
    return TraceRequest(arrival_s, prompt, output)


def _count(path: Path, number: int, row: Row, name: str) -> int:
    try:
        count = int(row[name])
    except KeyError as error:
        raise ConfigError(f"{path}, line {number}: {name} is missing") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{path}, line {number}: {name} {row[name]!r} is not a number of tokens") from error
    if not 0 <= count < 2**63 or isinstance(row[name], bool) or (isinstance(row[name], float) and count != row[name]):
        words = "must be a whole number, not below 0, of 64 bits"
        raise ConfigError(f"{path}, line {number}: {name} {repr(row[name])[:40]} {words}")
    return count


def _wall_clock(text: str) -> float:
    """Return seconds since 1970, exact to a microsecond; without a zone, as if it were UTC: differences are used."""
    moment = datetime.fromisoformat(text)
    return (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()


def _spread(requests: list[TraceRequest], seed: int) -> list[TraceRequest]:
    """Spread requests of whole seconds over equal parts of the second: they would arrive as batches otherwise."""
    rng = random.Random(seed)
    spread: list[TraceRequest] = []
    for second, group in groupby(requests, key=lambda r: r.arrival_s):
        same = list(group)
        spread += [replace(r, arrival_s=second + (i + rng.random()) / len(same)) for i, r in enumerate(same)]
    return spread


_AZURE = _Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", _wall_clock)
_BURSTGPT = _Columns("Timestamp", "Request tokens", "Response tokens", float)
_MOONCAKE = _Columns("timestamp", "input_length", "output_length", lambda ms: float(ms) / 1000)
