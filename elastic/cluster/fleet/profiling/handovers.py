"""What the engine takes for each batch, of a stage and of a rank for each exchange, besides computing and the link.

Two ranks serve a model whole, in two stages, and sharing its layers: the seconds from token to token differ by what is
around the links, and those of the whole model from the time that its rank computes. Nearly all of its weights are
attention's, which ranks read whole, however layers are cut, and no cache holds them: whoever sends or has waited finds
its code and what it touches in memory, as beside a model that is served. What two ranks that read the same memory take
longer for it is known, and left out.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.groups.results import Exchanged
from elastic.cluster.peers.link_profile import on_core, two_cores
from elastic.engines.base import Output, Request
from elastic.engines.continuous.chunk_profile import Pace
from elastic.errors import StateError
from elastic.estimation.estimate import EXCHANGES
from elastic.estimation.profile import cached_bytes, reading_rate
from elastic.planning.estimate.performance import Handovers
from elastic.planning.measured_cost import LinearLatency

LAYERS, TOKENS = 8, 16
"""Of the model, and of each answer."""
MOST_BYTES = 256 << 20
"""About so many of its weights, however large caches are."""
HANDOVER_ROUNDS = 3
ANSWER_S = 60.0
"""How long an answer may take."""
TOGETHER = ("whole", "staged", "shared")
_VOCAB, _HEAD, _KV_BYTES = 256, 64, 64 << 20
_MATRICES = 4
"""Of attention, [hidden, hidden] each."""


def hidden_size() -> int:
    """Return the hidden size of a model whose weights are twice what caches of this processor hold."""
    wanted = min(2 * cached_bytes("cpu"), MOST_BYTES)
    return 2 * _HEAD * max(1, math.ceil(math.sqrt(wanted / (LAYERS * _MATRICES * 4)) / (2 * _HEAD)))


def place_bytes() -> int:
    """Return the size of the place of a rank."""
    return _weight_bytes(hidden_size()) + _KV_BYTES


def measure_handovers(
    link: LinearLatency, contention: float = 0.0, rounds: int = HANDOVER_ROUNDS, pace: Pace | None = None
) -> Handovers:
    """Measure them with a rank on each of two cores.

    `link` is what is known of the link between them, `contention` by how much more slowly one reads while the other
    does. `pace` is called behind each answer, with its seconds, and may wait. Raises `StateError` where this process
    may run on one core alone, or ranks cannot be grouped.
    """
    cores = two_cores()
    answers: dict[str, list[TimedAnswer]] = {how: [] for how in TOGETHER}
    places = [[f"cpu#handover{number}={place_bytes()}"] for number in range(2)]
    hidden = hidden_size()
    with tempfile.TemporaryDirectory() as folder:
        _save_model(folder, hidden)
        with Fleet(folder, ranks=places, cores=[(core,) for core in cores], shards=2, replace=False) as fleet:
            for number in range(rounds + 1):  # what is made once is made in the first round
                for how, taken in answers.items():
                    with _grouped(fleet, how):
                        answer = _answer(fleet, pace)
                    taken += [answer] if number else []
    with on_core(cores[0]):
        reading_s = _weight_bytes(hidden) / reading_rate(_weight_bytes(hidden), torch.device("cpu"), pace)
    return fitted(answers, link(4 * hidden), contention * reading_s)


@dataclass(frozen=True)
class TimedAnswer:
    """What one answer took."""

    gaps_s: Sequence[float]
    """From token to token."""
    busy_s: float
    """For how long a rank computed all of its tokens; of several ranks, the one that computed for longest."""


def fitted(answers: Mapping[str, Sequence[TimedAnswer]], link_s: float, slower_s: float = 0.0) -> Handovers:
    """Return what answers say of ranks that are as `TOGETHER` has them. None is below 0.

    `link_s`: of the hidden state of a token; `slower_s`: that ranks take longer to read weights at the same time.
    """
    gaps = {how: statistics.median(gap for answer in taken for gap in answer.gaps_s) for how, taken in answers.items()}
    staged = (gaps["staged"] - gaps["whole"]) / 2 - link_s
    shared = (gaps["shared"] - gaps["whole"] - slower_s) / (EXCHANGES * LAYERS) - link_s
    steps = [statistics.mean(each.gaps_s) - each.busy_s / (len(each.gaps_s) + 1) for each in answers["whole"]]
    return Handovers(max(0.0, staged), max(0.0, shared), max(0.0, statistics.median(steps)))


def _weight_bytes(hidden: int) -> int:
    """Return the bytes of the weights of all layers, in float32."""
    return LAYERS * _MATRICES * hidden**2 * 4


def _save_model(folder: str | Path, hidden: int) -> None:
    sizes = {"hidden_size": hidden, "intermediate_size": _HEAD, "vocab_size": _VOCAB, "head_dim": _HEAD}
    config = LlamaConfig(
        num_hidden_layers=LAYERS, num_attention_heads=hidden // _HEAD, max_position_embeddings=512, **sizes
    )
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


def _answer(fleet: Fleet, pace: Pace | None) -> TimedAnswer:
    """Have a prompt of one token answered, so that all steps are alike."""
    at_s: list[float] = []
    ended = threading.Event()

    def listener(output: Output) -> None:
        at_s.extend([output.at_s] * len(output.tokens))
        if output.finish:
            ended.set()

    before_s = _busy_s(fleet)
    fleet.submit(Request((1,), TOKENS, ignore_eos=True), listener)
    if not ended.wait(ANSWER_S):
        raise StateError(f"two ranks gave no answer within {ANSWER_S:.0f} s; measure again")
    busy_s = max(after - before for before, after in zip(before_s, _busy_s(fleet), strict=True))
    if pace is not None:
        pace(at_s[-1] - at_s[0])
    return TimedAnswer(tuple(after - before for before, after in pairwise(at_s)), busy_s)


def _busy_s(fleet: Fleet) -> list[float]:
    """Return for how long each rank has computed so far."""
    return [fleet.look(instance.name).times.busy_s for instance in fleet.status().instances]
