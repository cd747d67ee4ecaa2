"""Real runs of a fleet that a simulator is held against, and the steps that its ranks computed meanwhile."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import SEED
from serving import fleet, prompt, warm_up
from sim_behaviour import Behaviour, actions, bubble_share
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import elastic
from elastic.assets import MODEL_DIR
from elastic.bench.traces.trace import Trace, TraceRequest
from elastic.engines.base import Output, Request
from elastic.engines.core.restart import RestartingScheduler
from elastic.engines.pipeline.turn import StageTimes, Turn
from elastic.planning.pipeline.chunk_cost import Chunk
from elastic.sim.core.instance import PlacePages
from elastic.sim.report import Report
from elastic.sim.workload import RequestArrival

ENGINE = {"block_tokens": 32, "max_requests": 32, "max_batch_tokens": 256, "share_prefixes": False}
CORES = [(0,), (1,)]
LONGEST, LAYERS, HIDDEN, PAGE_BYTES = 4096, 4, 256, 64 << 10
SAMPLE_S = 0.1
BEAT_TIMEOUT_S = 20.0
"""Of ranks that other processes keep from their cores."""


def save_attentive_model(folder: Path) -> Path:
    """Write a Llama in which attention takes as long as all else at 1,000 tokens: 4 layers, hidden 256."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LONGEST,
        dtype=torch.float32,
        eos_token_id=None,
    )
    torch.manual_seed(SEED)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# -- the steps of ranks


class Recorded:
    """As the engine's option `step_budget`: no budget, but a rank that reads it writes its steps to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return record_steps, (str(self.folder),)


def record_steps(folder: str) -> None:
    """Have each step of this process be written down: when it began and ended, with what the engine does besides."""
    name = Path(folder) / f"{os.getpid()}.steps"
    lines: list[str] = []
    ended: list[float] = []  # when the step before was over, if the engine had work left
    schedule, update = RestartingScheduler.schedule, RestartingScheduler.update
    began: dict[int, float] = {}
    turns_s = note_turns()

    @functools.wraps(schedule)
    def noted_schedule(self: Any) -> Any:
        now = time.perf_counter()
        step = schedule(self)
        turns_s[threading.get_ident()] = 0.0
        if step is not None:
            began[step.number] = ended[0] if ended else now
        return step

    @functools.wraps(update)
    def noted_update(self: Any, step: Any, result: Any) -> Any:
        produced = update(self, step, result)
        now = time.perf_counter()
        ended[:] = [now] if self.has_work else []
        chunks = " ".join(f"{chunk.start}:{len(chunk.tokens)}" for chunk in step.chunks)
        lines.append(f"{began.pop(step.number)} {now} {turns_s[threading.get_ident()]} {chunks}\n")
        if len(lines) >= 32 or not self.sequences:
            with name.open("a") as file:
                file.writelines(lines)
            lines.clear()
        return produced

    RestartingScheduler.schedule, RestartingScheduler.update = noted_schedule, noted_update  # type: ignore[method-assign]


def note_turns() -> dict[int, float]:
    """Return what will have the seconds of each thread in which it had the turn to compute, or waited inside of it."""
    enter, leave = Turn.__enter__, Turn.__exit__
    entered_s: dict[int, float] = {}
    seconds: dict[int, float] = {}

    def noted_enter(self: Turn) -> None:
        entered_s[threading.get_ident()] = time.perf_counter()
        enter(self)

    def noted_exit(self: Turn, *raised: Any) -> None:
        leave(self, *raised)
        thread = threading.get_ident()
        seconds[thread] = seconds.get(thread, 0.0) + time.perf_counter() - entered_s[thread]

    Turn.__enter__, Turn.__exit__ = noted_enter, noted_exit  # type: ignore[method-assign]
    return seconds


@dataclass(frozen=True)
class TimedStep:
    """A step that a rank computed, by the clock of all processes of the machine."""

    rank: int
    """The process id of its home."""
    begin_s: float
    end_s: float
    chunks: tuple[tuple[int, int], ...]
    """(earlier tokens, new tokens) of each."""
    turn_s: float = 0.0
    """In which its home computed layers, or waited for its turn or for other ranks."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    @property
    def as_chunks(self) -> list[Chunk]:
        return [Chunk("", *chunk) for chunk in self.chunks]


def recorded(folder: Path, since_s: float) -> list[TimedStep]:
    """Read what ranks have written down since then, in order."""
    time.sleep(0.2)  # they write when they have nothing to do
    found = []
    for file in folder.glob("*.steps"):
        for line in file.read_text().splitlines():
            begin_s, end_s, turn_s, *chunks = line.split()
            pairs = ((int(start), int(count)) for start, _, count in (chunk.partition(":") for chunk in chunks))
            found.append(TimedStep(int(file.stem), float(begin_s), float(end_s), tuple(pairs), float(turn_s)))
    return sorted((step for step in found if step.begin_s >= since_s), key=lambda step: step.begin_s)


# -- runs


@dataclass(frozen=True)
class System:
    """How a fleet serves."""

    ranks: int
    busy: float
    """The share of the time in which prompts, and answers by fours, keep two ranks busy."""
    policy: Any = None
    tp: int = 1
    """So many ranks share each layer from the start,"""
    stages: int = 1
    """or compute the layers one after another."""
    kill: float | None = None
    """When its second rank is killed, as a share of a run; none comes in its place."""

    @property
    def alone(self) -> bool:
        """Whether each rank computes all layers itself, as far as no policy has it otherwise."""
        return self.tp == self.stages == 1


@dataclass(frozen=True)
class Load:
    """Arrivals of a kind: (seconds, requests a second) one after another, and lengths."""

    name: str
    rates: Sequence[tuple[float, float]]
    prompt: tuple[float, float]
    """Median, and sigma of the logarithm."""
    answer: tuple[float, float]

    def trace(self, seed: int) -> Trace:
        choose, found, begin_s = random.Random(f"{self.name} {seed}"), [], 0.0
        for length_s, rate in self.rates:
            at_s = begin_s + choose.expovariate(rate)
            while at_s < begin_s + length_s:
                found.append(TraceRequest(at_s, self._drawn(choose, self.prompt), self._drawn(choose, self.answer)))
                at_s += choose.expovariate(rate)
            begin_s += length_s
        return Trace(tuple(found), self.name, window=(0.0, begin_s)).with_tokens(1.0, most=LONGEST // 2)

    def _drawn(self, choose: random.Random, median_sigma: tuple[float, float]) -> int:
        median, sigma = median_sigma
        return max(4, round(median * choose.lognormvariate(0.0, sigma)))


@contextmanager
def serving(
    path: Path, place: str, system: System, begun: Callable[[elastic.Fleet], object], **engine: Any
) -> Iterator[tuple[elastic.Fleet, PlacePages]]:
    """Serve with a core for each rank; give the fleet, and the pages of a rank before layers are shared.

    `begun` is called before they are.
    """
    options: dict[str, Any] = {"policy": system.policy, "shards": system.tp, "beat_timeout_s": BEAT_TIMEOUT_S}
    options["replace"] = system.kill is None
    with fleet(path, CORES[: system.ranks], place=place, engine={**ENGINE, **engine}, **options) as started:
        warm_up(started)
        pages = pages_of(started, system.tp)
        begun(started)
        if not system.alone:
            together(started, system)
            warm_up(started)
        yield started, pages


def together(engine: elastic.Fleet, system: System) -> None:
    """Have ranks compute layers with each other, as the system has it."""
    names = [instance.name for instance in engine.status().instances]
    if system.tp > 1:
        engine.reshard(names, tp=system.tp)
    if system.stages > 1:
        bounds = [LAYERS * stage // system.stages for stage in range(system.stages + 1)]
        kept = {name: range(*pair) for name, pair in zip(names, pairwise(bounds), strict=True)}
        engine.drop(layers={name: set(range(LAYERS)) - set(layers) for name, layers in kept.items()})


def pages_of(engine: elastic.Fleet, parts: int) -> PlacePages:
    """Return the pages of a rank; a block of this model is a page in each layer, or a share of one in each part."""
    (place,) = engine.look(engine.status().ranks[0].name).status.places
    owners = {owner: nbytes // PAGE_BYTES for owner, nbytes in place.owners.items() if owner != "kv"}
    layer = sum(pages for owner, pages in owners.items() if owner.startswith("layer:")) // LAYERS
    return PlacePages(place.budget_bytes // PAGE_BYTES, sum(owners.values()), LAYERS * parts, parts, LAYERS, layer)


@dataclass(frozen=True)
class Played:
    """What came of requests."""

    report: Report
    begin_s: float
    """By the clock of all processes."""
    others: float
    """Cores that processes other than this one and the ranks kept busy meanwhile, in the mean."""
    behaviour: Behaviour
    frontend_s: float
    """Processor seconds of this process."""


def played(engine: elastic.Fleet, trace: Trace, kill_s: float | None = None) -> Played:
    """Have the requests of a trace come when they are due; return what came of them, as the simulator tells it.

    The second rank is killed so long after the run began, if that is said.
    """
    report, choose = Report(), random.Random(SEED)
    pids = [rank.pid for rank in engine.status().ranks if rank.serves]
    others, before = OthersWork([os.getpid(), *pids]), stage_times(engine)
    prompts = [prompt(request.prompt_tokens, choose) for request in trace.requests]
    ended, lock = threading.Semaphore(0), threading.Lock()
    begin_s, begin_wall_s, frontend_s = time.perf_counter(), time.time(), time.process_time()
    stopping = threading.Event()
    if kill_s is not None:
        killer = threading.Timer(kill_s, os.kill, (pids[1], signal.SIGKILL))
        killer.start()

    def sample() -> None:
        while not stopping.wait(SAMPLE_S):
            loads = [instance.load for instance in engine.status().instances]
            use = 1 - sum(load.free_blocks for load in loads) / max(1, sum(load.total_blocks for load in loads))
            running, waiting = (sum(getattr(load, name) for load in loads) for name in ("running", "waiting"))
            others.look()
            at_s = time.perf_counter() - begin_s
            if at_s <= trace.duration_s:
                report.sample(at_s, use, running, waiting)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    for one, tokens in zip(trace.requests, prompts, strict=True):
        time.sleep(max(0.0, begin_s + one.arrival_s - time.perf_counter()))
        job = RequestArrival(
            time.perf_counter() - begin_s, one.prompt_tokens, one.output_tokens, one.output_tokens, 0, "r"
        )
        hear = report.listener(job, ended.release)

        def listener(output: Output, hear: Any = hear) -> None:
            with lock:
                hear(replace(output, at_s=output.at_s - begin_s, scheduled_s=_since(output.scheduled_s, begin_s)))

        engine.submit(Request(tokens, one.output_tokens, ignore_eos=True), listener)
    for _ in trace.requests:
        if not ended.acquire(timeout=120):
            raise TimeoutError("a request has not ended after 120 s")
    stopping.set()
    sampler.join()
    events = ((event.kind, event.when_s - begin_wall_s) for event in engine.events())
    spent = [since(before[name], times) for name, times in stage_times(engine).items() if name in before]
    behaviour = Behaviour(actions(events, trace.duration_s), bubble_share(spent))
    return Played(report, begin_s, others.cores, behaviour, time.process_time() - frontend_s)


def stage_times(engine: elastic.Fleet) -> dict[str, StageTimes]:
    """Return what ranks that compute layers with each other have done with their time."""
    names = [instance.name for instance in engine.status().instances if len(set(instance.path)) > 1]
    return {name: engine.look(name).times for name in names}


def since(before: StageTimes, now: StageTimes) -> StageTimes:
    return StageTimes(now.busy_s - before.busy_s, now.bubble_s - before.bubble_s)


class OthersWork:
    """What processes other than some compute, from its making on. For Linux."""

    def __init__(self, own: Sequence[int]) -> None:
        self._own = dict.fromkeys(own, 0)  # and what each has computed, in ticks
        self._at_s, self._since_s = time.perf_counter(), self._busy_s()

    @property
    def cores(self) -> float:
        """The cores that they kept busy, in the mean."""
        return max(0.0, self._busy_s() - self._since_s) / (time.perf_counter() - self._at_s)

    def add(self, own: Sequence[int]) -> None:
        """Have more processes be own ones, which have begun since."""
        self._own |= {pid: 0 for pid in own if pid not in self._own}
        self.look()

    def look(self) -> None:
        """Note what the own processes have computed, as long as they are there: one that ends says nothing more."""
        for pid in self._own:
            with suppress(FileNotFoundError, ProcessLookupError):
                ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
                self._own[pid] = sum(map(int, ticks))

    def _busy_s(self) -> float:
        """Return the processor seconds of all, since the machine began, without those of the own processes."""
        user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split()[1:9])
        self.look()
        return (user + nice + system + sum(interrupts) - sum(self._own.values())) / os.sysconf("SC_CLK_TCK")


def _since(at_s: float | None, begin_s: float) -> float | None:
    return None if at_s is None else at_s - begin_s
