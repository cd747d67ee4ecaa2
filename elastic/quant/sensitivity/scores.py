"""The sensitivity order of MorphServe (section 3.2): which layers to swap first, so that the model loses least.

Greedy: in each round every layer that is left is tried in addition to those chosen before, and the one with the highest
LIS = alpha1 * LTS + alpha2 * LRS + beta * MDS joins them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from elastic.errors import ConfigError
from elastic.quant.sensitivity.incremental_forward import FullForward, IncrementalForward, Quantize, cosine
from elastic.quant.sensitivity.layer_trace import LayerTrace
from elastic.quant.sensitivity.profile_file import Profile, ProfileSettings, SearchRound

Progress = Callable[[int, int], None]
"""A function that is called with the candidates done and the candidates in all."""
Saver = Callable[[Profile], None]
MOST_KEPT_BYTES = 2 << 30
_ROUNDING = 1e-12
_log = logging.getLogger(__name__)


def measure(
    traces: Sequence[LayerTrace],
    layers: Sequence[nn.Module],
    quantize: Quantize,
    setting: ProfileSettings,
    *,
    begun: Profile | None = None,
    progress: Progress = lambda done, total: None,
    save: Saver = lambda profile: None,
    most_kept_bytes: int = MOST_KEPT_BYTES,
) -> Profile:
    """Profile a model, from one trace for each batch of calibration text.

    `quantize` is called once for each layer, and its layers are held to the end. `begun` is a profile with some rounds
    done, to go on from; `save` is called with the profile after the local scores and after each round. States of
    candidates are kept if they take no more than `most_kept_bytes` on the devices of the layers.
    """
    forwards = _forwards(traces, layers, cache(quantize), most_kept_bytes)
    if begun is None:
        begun = Profile(setting, *_local_scores(forwards))
        save(begun)
    else:
        for forward in forwards:
            forward.resume(begun.order)
    profile = begun
    for round_ in _greedy(forwards, begun, progress):
        profile = replace(profile, rounds=(*profile.rounds, round_))
        save(profile)
    return profile


def _forwards(
    traces: Sequence[LayerTrace], layers: Sequence[nn.Module], variants: Quantize, most_kept_bytes: int
) -> Sequence[FullForward]:
    """Return a forward for each batch, layer by layer where the model allows it."""
    keeps = sum(kept_bytes(trace) for trace in traces) <= most_kept_bytes
    incremental = [IncrementalForward(trace, layers, variants, keeps=keeps) for trace in traces]
    why_not = traces[0].shared_state_of(variants(0), incremental[0].attempt(0))
    if why_not is None:
        return incremental
    _log.warning("each candidate takes a pass through the whole model, because its layers share state: %s", why_not)
    return [FullForward(trace, layers, variants) for trace in traces]


def kept_bytes(trace: LayerTrace) -> int:
    """Return how many bytes the states of all candidates of a batch take at most."""
    layers = len(trace.outputs)
    return trace.states[0].nbytes * layers * (layers + 1) // 2


def _local_scores(forwards: Sequence[FullForward]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return LTS and LRS of each layer, on its input in the full-precision model."""
    lts, lrs = [], []
    for p in range(len(forwards[0].layers)):
        scores = [forward.local(p) for forward in forwards]
        lts.append(_mean(forwards, [score[0] for score in scores], p))
        lrs.append(_mean(forwards, [score[1] for score in scores], p))
    return tuple(lts), tuple(lrs)


def _greedy(forwards: Sequence[FullForward], begun: Profile, progress: Progress) -> Iterator[SearchRound]:
    """Yield the rounds still to do. A lazy search chooses the same layers: it only skips candidates that cannot win."""
    setting, layers = begun.setting, len(begun.lts)
    local = [setting.alpha1 * a + setting.alpha2 * b for a, b in zip(begun.lts, begun.lrs, strict=True)]
    last_mds = dict.fromkeys(range(layers), 1.0)
    for round_ in begun.rounds:
        last_mds |= round_.mds
    total = layers * (layers + 1) // 2
    while candidates := [p for p in range(layers) if p not in forwards[0].chosen]:
        done = total - len(candidates) * (len(candidates) + 1) // 2
        if setting.lazy:
            candidates.sort(key=lambda p: -(local[p] + setting.beta * last_mds[p]))
        search = _RoundSearch(forwards, setting)
        for p in candidates:
            search.attempt(p, local[p])
            progress(done := done + 1, total)
        round_ = search.finish()
        last_mds |= round_.mds
        yield round_


class _RoundSearch:
    """One round: the scores so far, and the best candidate with its logits."""

    def __init__(self, forwards: Sequence[FullForward], setting: ProfileSettings) -> None:
        self._forwards = forwards
        self._beta = setting.beta
        self._lazy = setting.lazy
        self._mds: dict[int, float] = {}
        self._lis: dict[int, float] = {}
        self._best = -1
        self._highest = -math.inf
        self._logits: list[torch.Tensor] = []

    def attempt(self, p: int, local: float) -> None:
        """Measure a candidate, unless it is clear before the last batch that it cannot win."""
        sums: list[float] = []
        logits: list[torch.Tensor] = []
        tokens = sum(forward.tokens for forward in self._forwards)
        for number, forward in enumerate(self._forwards):
            unharmed = sum(later.tokens for later in self._forwards[number:])  # if all to come have a cosine of 1
            most = local + self._beta * ((sum(sums) + unharmed) / tokens)
            if self._lazy and most + _ROUNDING < self._highest:
                break
            logits.append(forward.attempt(p))
            sums.append(cosine(forward.logits, logits[-1]))
        else:
            self._mds[p] = _mean(self._forwards, sums, p)
            self._lis[p] = local + self._beta * self._mds[p]
            if (self._lis[p], -p) > (self._highest, -self._best):
                p, self._best, self._highest, self._logits = self._best, p, self._lis[p], logits
        for forward in self._forwards:
            forward.discard(p)

    def finish(self) -> SearchRound:
        """Choose the best candidate."""
        for forward, logits in zip(self._forwards, self._logits, strict=True):
            forward.choose(self._best, logits)
        return SearchRound(self._best, dict(sorted(self._mds.items())), dict(sorted(self._lis.items())))


def _mean(forwards: Sequence[FullForward], sums: Sequence[float], p: int) -> float:
    mean = sum(sums) / sum(forward.tokens for forward in forwards)
    if not math.isfinite(mean):
        raise ConfigError(
            f"the scores of layer {p} are not finite: activations overflow; load the model in a dtype of wider range"
        )
    return mean
