"""What configurations really take: ranks in processes of their own, a core each, that serve requests of each point.

Each configuration has a fleet of its own: ranks keep pages that swaps and keys and values have had, and memory that
batches have had, so that in one fleet the bytes of a configuration would depend on those before it.
"""

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
from estimate_shapes import POINTS, STEP_TOKENS, Point, answer_tokens, at_rest
from serving import Answer, Load, fleet, prompt

import elastic
from elastic.cluster.fleet.planning import choice
from elastic.engines.base import Request
from elastic.planning.sharding.share import even_stages

ENGINE = {"max_batch_tokens": STEP_TOKENS, "share_prefixes": False}
PLACE = "cpu#{}=2GiB"
"""Much more than a rank fills, so that its ledger has all pages that nobody uses among the free ones (`held_bytes`)."""
RANKS = ("r0", "r1")


@dataclass
class Measured:
    """What one configuration took, by point (its text); of seconds medians of the rounds."""

    ttft_s: dict[str, float] = field(default_factory=dict)
    """For one request at a time."""
    tpot_s: dict[str, float] = field(default_factory=dict)
    latency_s: dict[str, float] = field(default_factory=dict)
    """From the first request to the last token of one alone; of batches, TPOT."""
    rank_bytes: Sequence[int] = ()
    """Of each rank: what it holds, and the most that its process had more outside of pages."""
    batch_bytes: Sequence[int] = ()
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
def ranks(path: Path, forms: Sequence[str], shards: int, **options: Any) -> Iterator[tuple[elastic.Fleet, OneRank]]:
    """Serve with two ranks, a core each, whose layers are cut in so many parts, or have variants.

    `options` are others of the fleet.
    """
    route = OneRank()
    wrap = {"variants": tuple(form for form in forms if form != "full")}
    cores = [(0,), (1,)]
    with (
        patch.object(choice, "route", route),
        fleet(
            path, cores, place=PLACE, engine=ENGINE, shards=shards, wrap=wrap, beat_timeout_s=60.0, **options
        ) as engine,
    ):
        yield engine, route


def measure(path: Path, layers: int, form: str, tp: int, pp: int, rounds: int) -> Measured:
    """Measure a model of so many layers in one configuration. Layers in a variant are shared by no ranks."""
    with configured(path, layers, form, tp, pp) as engine:
        serve(engine, at_rest(pp))
        held = [held_bytes(engine, rank) for rank in RANKS]
        outside = [outside_bytes(pid_of(engine, rank)) for rank in RANKS]
        most = most_outside(engine)
        measured = seconds(engine, rounds)
    measured.batch_bytes = [max(0, nbytes - rest) for nbytes, rest in zip(most, outside, strict=True)]
    measured.rank_bytes = [nbytes + more for nbytes, more in zip(held, measured.batch_bytes, strict=True)]
    return measured


@contextmanager
def configured(path: Path, layers: int, form: str, tp: int, pp: int) -> Iterator[elastic.Fleet]:
    """Serve with two ranks that have the whole model each, that share all layers, or that are stages."""
    own = dict(zip(RANKS, even_stages(layers, pp) if pp > 1 else [range(layers)] * 2, strict=True))
    with ranks(path, (form,), tp) as (engine, route):
        route.spread = pp > 1
        if pp > 1:
            done(engine.drop(layers={"r0": own["r1"], "r1": own["r0"]}))
        if tp > 1:
            done(engine.reshard(RANKS, tp=tp))
        if form != "full":
            for rank in RANKS:
                engine.apply(rank, elastic.Swap(tuple(own[rank]), form))
        yield engine


def seconds(engine: elastic.Fleet, rounds: int) -> Measured:
    """Serve each point so many times, in random order, and return the seconds; bytes are not measured."""
    taken: dict[Point, list[tuple[float, float]]] = {point: [] for point in POINTS}
    for _ in range(rounds):
        for point in random.sample(POINTS, len(POINTS)):
            answers = serve(engine, point)
            taken[point].append((max(a.ttft_s for a in answers), tpot_s(answers)))
    measured = Measured()
    for point, pairs in taken.items():
        name = str(point)
        measured.tpot_s[name] = measured.latency_s[name] = statistics.median(tpot for _, tpot in pairs)
        if point[0] == 1:
            measured.ttft_s[name] = statistics.median(ttft for ttft, _ in pairs)
            measured.latency_s[name] = statistics.median(ttft + (point[2] - 1) * tpot for ttft, tpot in pairs)
    return measured


def serve(engine: elastic.Fleet, point: Point) -> list[Answer]:
    batch, length, _ = point
    load, choose, new = Load(engine), random.Random(SEED), answer_tokens(point)
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


def held_bytes(engine: elastic.Fleet, rank: str) -> int:
    """Return the bytes that a rank holds: pages that the kernel has of its memory files and that are in use.

    Not in use are those that its ledger has as idle or parked. What is fixed is in no page, and counted by the ledger.
    Raises `RuntimeError` where the ledger may not tell all of them: it takes pages that are kept for keys and values to
    come for those that were not created, as long as there are such.
    """
    (place,) = engine.look(rank).status.places
    fixed = sum(nbytes for owner, nbytes in place.owners.items() if owner.startswith("fixed:"))
    unused = place.idle_bytes + place.parked_bytes
    if unused >= place.free_bytes:
        raise RuntimeError(f"{rank} has {unused} unused bytes, all that are free there; give its place more memory")
    return fixed + memory_file_bytes(pid_of(engine, rank)) - unused


def most_outside(engine: elastic.Fleet) -> list[int]:
    """Return the most bytes that the process of each rank has outside of pages while it serves each point once.

    The kernel tells the most of both together, so that keys and values are to have all of their pages before.
    """
    serve(engine, max(POINTS, key=lambda point: point[0] * (point[1] + answer_tokens(point))))
    pids = [pid_of(engine, rank) for rank in RANKS]
    for pid in pids:
        forget_most(pid)
    for point in POINTS:
        serve(engine, point)
    return [outside_bytes(pid, "VmHWM") for pid in pids]


def outside_bytes(pid: int | str, name: str = "VmRSS") -> int:
    """Return the bytes of a process outside of pages: now, or the most (`VmHWM`) since `forget_most`."""
    return resident(pid, name) - resident(pid, "RssShmem")


def forget_most(pid: int | str) -> None:
    """Have the most bytes of a process be those since now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


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
