"""What the engine takes of a stage for each batch, and of a rank for each exchange, besides computing and the link.

Two ranks serve a small model whole, in two stages, and sharing its layers: the seconds from token to token differ by
what is around the links, as the model is so small that its layers take what their calls do, however it is cut.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.groups.results import Exchanged
from elastic.engines.base import Output, Request
from elastic.engines.continuous.chunk_profile import Pace
from elastic.errors import StateError
from elastic.estimation.estimate import EXCHANGES
from elastic.planning.estimate.performance import Handovers
from elastic.planning.measured_cost import LinearLatency

LAYERS, HIDDEN, TOKENS = 8, 64, 16
"""Of the model, and of each answer."""
PLACE_BYTES = 64 << 20
HANDOVER_ROUNDS = 3
ANSWER_S = 60.0
"""How long an answer may take."""
TOGETHER = ("whole", "staged", "shared")
_VOCAB = 256


def measure_handovers(link: LinearLatency, rounds: int = HANDOVER_ROUNDS, pace: Pace | None = None) -> Handovers:
    """Measure them with a rank on each of two cores; `link` is what is known of the link between them.

    `pace` is called behind each answer, with its seconds, and may wait. Raises `StateError` where this process may run
    on one core alone, or ranks cannot be grouped.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise StateError("this process may run on one core alone: there is no other rank to measure beside")
    gaps: dict[str, list[float]] = {how: [] for how in TOGETHER}
    places = [[f"cpu#handover{number}={PLACE_BYTES}"] for number in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        _save_model(folder)
        with Fleet(folder, ranks=places, cores=[(core,) for core in cores], shards=2, replace=False) as fleet:
            for number in range(rounds + 1):  # what is made once is made in the first round
                for how, taken in gaps.items():
                    with _grouped(fleet, how):
                        seconds = _gaps(fleet, pace)
                    taken += seconds if number else ()
    return fitted({how: statistics.median(taken) for how, taken in gaps.items()}, link)


def fitted(gaps: Mapping[str, float], link: LinearLatency) -> Handovers:
    """Return what the seconds from token to token say, of ranks that are as `TOGETHER` has them. None is below 0."""
    hidden_s = link(4 * HIDDEN)
    staged = (gaps["staged"] - gaps["whole"]) / 2 - hidden_s
    shared = (gaps["shared"] - gaps["whole"]) / (EXCHANGES * LAYERS) - hidden_s
    return Handovers(max(0.0, staged), max(0.0, shared))


def _save_model(folder: str | Path) -> None:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "vocab_size": _VOCAB}
    config = LlamaConfig(num_hidden_layers=LAYERS, num_attention_heads=4, max_position_embeddings=512, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


@contextmanager
def _grouped(fleet: Fleet, how: str) -> Iterator[None]:
    """Have both ranks be grouped so meanwhile."""
    first, second = (instance.name for instance in fleet.status().instances)
    half = LAYERS // 2
    if how == "staged":
        _require(fleet.drop(layers={first: range(half, LAYERS), second: range(half)}))
    elif how == "shared":
        _require(fleet.reshard([first, second], tp=2))
    yield
    if how == "staged":
        _require(fleet.restore(first))
    elif how == "shared":
        _require(fleet.reshard([first, second], tp=1))


def _require(done: Exchanged) -> None:
    if done.status != "applied":
        raise StateError(f"layers did not change their rank ({done.status}): {done.why}; measure again")


def _gaps(fleet: Fleet, pace: Pace | None) -> Sequence[float]:
    """Return the seconds from token to token of one answer."""
    at_s: list[float] = []
    ended = threading.Event()

    def listener(output: Output) -> None:
        at_s.extend([output.at_s] * len(output.tokens))
        if output.finish:
            ended.set()

    fleet.submit(Request((1, 2, 3, 4), TOKENS, ignore_eos=True), listener)
    if not ended.wait(ANSWER_S):
        raise StateError(f"two ranks gave no answer within {ANSWER_S:.0f} s; measure again")
    if pace is not None:
        pace(at_s[-1] - at_s[0])
    return [after - before for before, after in pairwise(at_s)]
