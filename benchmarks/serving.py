"""Requests to an engine and what came of them; a model, a fleet and an engine in this process to serve it with."""

from __future__ import annotations

import random
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import SEED, show
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import elastic
from elastic.assets import MODEL_DIR
from elastic.engines.base import Engine, Output, Request
from elastic.engines.continuous import ContinuousEngine

PLACE = "cpu#{}=1GiB"
ENGINE = {"max_requests": 64, "max_batch_tokens": 256}


@dataclass
class Answer:
    """What came of one request, by the clock of this process."""

    sent_s: float = 0.0
    at_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    queued_s: float = 0.0
    """From its arrival until it was first in a step."""

    @property
    def ttft_s(self) -> float:
        return self.at_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.at_s, self.at_s[1:], strict=False)]


class Load:
    """Requests to an engine, and their answers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ended = threading.Semaphore(0)
        self.answers: dict[str, Answer] = {}

    def submit(self, request: Request) -> Answer:
        answer = self.answers[request.id] = Answer(time.perf_counter())

        def listener(output: Output) -> None:
            now = time.perf_counter()
            answer.at_s.extend([now] * len(output.tokens))
            answer.tokens.extend(output.tokens)
            if output.scheduled_s is not None:
                answer.queued_s = max(0.0, output.scheduled_s - answer.sent_s)
            if output.finish:
                answer.finish = output.finish
                self._ended.release()

        self._engine.submit(request, listener)
        return answer

    def wait(self) -> None:
        for _ in self.answers:
            if not self._ended.acquire(timeout=300):
                raise TimeoutError("a request has not ended after 300 s")

    def tokens_per_s(self) -> float:
        begin = min(answer.sent_s for answer in self.answers.values())
        end = max(answer.at_s[-1] for answer in self.answers.values())
        return sum(len(answer.tokens) for answer in self.answers.values()) / (end - begin)


def save_model(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32, **config: int) -> Path:
    """Write the model that is served, made on a device; `config` is what is other than of the 40M parameters."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    }
    made = LlamaConfig(vocab_size=len(tokenizer), dtype=dtype, eos_token_id=None, **(sizes | config))
    torch.manual_seed(SEED)
    with torch.device(device):
        LlamaForCausalLM(made).to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def fleet(
    path: Path,
    cores: Sequence[Sequence[int]],
    *,
    place: str = PLACE,
    places: Sequence[str] = (),
    engine: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[elastic.Fleet]:
    """Serve with a rank on each of `cores`; `places` are their memory, or `place` is that of each, `{}` its number."""
    memory = [[each] for each in places] or [[place.format(number)] for number in range(len(cores))]
    started = elastic.Fleet(path, ranks=memory, cores=cores, engine=ENGINE | (engine or {}), **options)
    started.start()
    try:
        yield started
    finally:
        started.stop(drain=False)


@contextmanager
def in_process(path: Path) -> Iterator[ContinuousEngine]:
    """Serve in this process, as a rank does in its own."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    elastic.wrap(model, places=[PLACE.format(0)])
    engine = ContinuousEngine(model, **ENGINE)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(drain=False)
        elastic.unwrap(model)


def prompt(length: int, choose: random.Random) -> tuple[int, ...]:
    return tuple(choose.randrange(3, 1000) for _ in range(length))


def served(engine: Engine, requests: Sequence[Request]) -> Load:
    """Have requests computed, all at once, after a few that warm up."""
    warm_up(engine)
    load = Load(engine)
    for request in requests:
        load.submit(request)
    load.wait()
    return load


def warm_up(engine: Engine) -> None:
    """Have every rank compute a prompt and some tokens."""
    load = Load(engine)
    choose = random.Random(SEED + 1)
    for _ in range(8):
        load.submit(Request(prompt(64, choose), 8, ignore_eos=True))
    load.wait()


SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
"""Ways in which a rank is lost: its process ends, or is silent until it is fenced."""


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def flat(figures: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in figures.items():
        if isinstance(value, dict) and "median" in value:
            yield prefix + name, show(value)
        elif isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}, ")
        else:
            yield prefix + name, f"{value:.3g}" if isinstance(value, float) else str(value)
