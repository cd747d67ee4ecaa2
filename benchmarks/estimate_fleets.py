"""What configurations really take: ranks in processes of their own, a core each, that serve requests of each point."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from common import SEED
from estimate_shapes import FORMS, POINTS, STEP_TOKENS
from serving import Answer, Load, fleet, prompt

import elastic
from elastic.cluster.fleet.planning import choice
from elastic.engines.base import Request

ENGINE = {"max_batch_tokens": STEP_TOKENS, "share_prefixes": False}
PLACE = "cpu#{}=1GiB"
RANKS = ("r0", "r1")
Point = tuple[int, int, int]
"""Requests at a time, tokens of a prompt, tokens of an answer."""


@dataclass
class Measured:
    """What one configuration took; of seconds medians of the rounds."""

    ttft_s: dict[Point, float] = field(default_factory=dict)
    """For one request at a time."""
    tpot_s: dict[Point, float] = field(default_factory=dict)
    latency_s: dict[Point, float] = field(default_factory=dict)
    """From the first request to the last token of one alone; of batches, TPOT."""
    rank_bytes: tuple[int, ...] = ()
    """Of each rank: what it holds, and the most that its process had more outside of pages."""
    batch_bytes: tuple[int, ...] = ()
    """The second of these alone."""


class OneRank:
    """Sends requests to one instance, or to each in turn: a batch of each is in a stage of a pipeline."""

    def __init__(self) -> None:
        self.spread = False
        self._count = 0

    def __call__(self, candidates: Sequence[Any], blocks: int, routing: str = "prefix") -> Any:
        chosen = sorted(candidates, key=lambda each: each.name)
        self._count += 1
        return chosen[self._count % len(chosen) if self.spread else 0] if chosen else None


@contextmanager
def ranks(path: Path, forms: Sequence[str], shards: int) -> Iterator[tuple[elastic.Fleet, OneRank]]:
    """Serve with two ranks, a core each, whose layers are cut in so many parts, or have variants."""
    route = OneRank()
    wrap = {"variants": tuple(form for form in forms if form != "full")}
    cores = [(0,), (1,)]
    with (
        patch.object(choice, "route", route),
        fleet(path, cores, place=PLACE, engine=ENGINE, shards=shards, wrap=wrap, beat_timeout_s=60.0) as engine,
    ):
        yield engine, route


def measure(path: Path, layers: int, rounds: int, forms: Sequence[str] = FORMS) -> dict[tuple[str, int, int], Measured]:
    """Measure each form of a model at each degree that can be had: layers in a variant are shared by no ranks."""
    found: dict[tuple[str, int, int], Measured] = {}
    half = layers // 2
    stages = {"r0": range(half), "r1": range(half, layers)}
    with ranks(path, forms, 1) as (engine, route):
        for form in forms:
            with in_form(engine, dict.fromkeys(RANKS, range(layers)), form):
                found[form, 1, 1] = points(engine, rounds, 1)
        done(engine.drop(layers={"r0": stages["r1"], "r1": stages["r0"]}))
        route.spread = True
        for form in forms:
            with in_form(engine, stages, form):
                found[form, 1, 2] = points(engine, rounds, 2)
    with ranks(path, ("full",), 2) as (engine, route):
        done(engine.reshard(RANKS, tp=2))
        found["full", 2, 1] = points(engine, rounds, 1)
    return found


@contextmanager
def in_form(engine: elastic.Fleet, own: dict[str, range], form: str) -> Iterator[None]:
    """Have the layers of each rank in a variant meanwhile."""
    if form != "full":
        for rank in RANKS:
            engine.apply(rank, elastic.Swap(tuple(own[rank]), form))
    yield
    if form != "full":
        for rank in RANKS:
            engine.apply(rank, elastic.Restore(tuple(own[rank])))


def points(engine: elastic.Fleet, rounds: int, pp: int) -> Measured:
    """Serve each point so many times, in random order, behind a short request to each rank."""
    serve(engine, (2 * pp, 8, 4))
    rest = [at_rest(engine, rank) for rank in RANKS]
    taken: dict[Point, list[tuple[float, float]]] = {point: [] for point in POINTS}
    for _ in range(rounds):
        for point in random.sample(POINTS, len(POINTS)):
            answers = serve(engine, point)
            taken[point].append((max(a.ttft_s for a in answers), tpot_s(answers)))
    batches = tuple(most(engine, rank, before) for rank, (_, before) in zip(RANKS, rest, strict=True))
    held = tuple(nbytes + more for (nbytes, _), more in zip(rest, batches, strict=True))
    found = Measured(rank_bytes=held, batch_bytes=batches)
    for point, pairs in taken.items():
        found.tpot_s[point] = found.latency_s[point] = statistics.median(tpot for _, tpot in pairs)
        if point[0] == 1:
            found.ttft_s[point] = statistics.median(ttft for ttft, _ in pairs)
            found.latency_s[point] = statistics.median(ttft + (point[2] - 1) * tpot for ttft, tpot in pairs)
    return found


def serve(engine: elastic.Fleet, point: Point) -> list[Answer]:
    batch, length, new = point
    load, choose = Load(engine), random.Random(SEED)
    new += 4 * (batch - 1)  # prompts are computed one after another: the first to begin waits for the last
    answers = [load.submit(Request(prompt(length, choose), new, ignore_eos=True)) for _ in range(batch)]
    load.wait()
    return answers


def tpot_s(answers: Sequence[Answer]) -> float:
    """Return the median gap between tokens, of all while all generate."""
    begin, end = max(a.at_s[0] for a in answers), min(a.at_s[-1] for a in answers)
    gaps = []
    for answer in answers:
        at = [s for s in answer.at_s if begin <= s <= end]
        gaps += [(at[-1] - at[0]) / (len(at) - 1)] if len(at) > 1 else []
    return statistics.mean(gaps)


def at_rest(engine: elastic.Fleet, rank: str) -> tuple[int, int]:
    """Return the bytes that a rank holds, and of its process outside of pages; the most is looked for from now on.

    It holds the pages that the kernel has of its memory files, but for those that nobody uses: parked ones, and such as
    are kept for the next keys and values. What is fixed is in no page, and counted by the ledger.
    """
    (place,), pid = engine.look(rank).status.places, pid_of(engine, rank)
    fixed = sum(nbytes for owner, nbytes in place.owners.items() if owner.startswith("fixed:"))
    pages = memory_file_bytes(pid) - place.idle_bytes - place.parked_bytes
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return fixed + pages, resident(pid, "VmRSS") - resident(pid, "RssShmem")


def most(engine: elastic.Fleet, rank: str, before: int) -> int:
    """Return the most that a rank's process had more outside of pages since then."""
    pid = pid_of(engine, rank)
    return max(0, resident(pid, "VmHWM") - resident(pid, "RssShmem") - before)


def memory_file_bytes(pid: int | str) -> int:
    """Return the bytes that the kernel has of the memory files that a process has open."""
    files = {}
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if os.readlink(descriptor).startswith("/memfd:"):
                told = descriptor.stat()
                files[told.st_dev, told.st_ino] = 512 * told.st_blocks
    return sum(files.values())


def pid_of(engine: elastic.Fleet, rank: str) -> int:
    return next(each.pid for each in engine.status().ranks if each.name == rank)


def resident(pid: int | str, name: str) -> int:
    """Return the bytes of a process that are in memory now, or the most since they were cleared."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def done(change: Any) -> None:
    """Raise `RuntimeError` for a change of a group that was not made."""
    if change.status != "applied":
        raise RuntimeError(f"a change was {change.status}: {change.why}")
