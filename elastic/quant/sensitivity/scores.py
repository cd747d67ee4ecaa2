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
"""Called with candidates done and candidates in all."""
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
    """The profile of a model, from one trace for each batch of calibration text.

    `quantize` is called once for each layer, and its layers are held to the end. `begun` is a profile with some rounds
    done, to go on from; `save` is called with the profile after the local scores and after each round. Ways of
    candidates are kept if they take no more than `most_kept_bytes` on the devices of the layers.
    """
    walks = _walks(traces, layers, cache(quantize), most_kept_bytes)
    if begun is None:
        begun = Profile(setting, *_local_scores(walks))
        save(begun)
    else:
        for walk in walks:
            walk.go_on_from(begun.order)
    profile = begun
    for round_ in _greedy(walks, begun, progress):
        profile = replace(profile, rounds=(*profile.rounds, round_))
        save(profile)
    return profile


def _walks(
    traces: Sequence[LayerTrace], layers: Sequence[nn.Module], variants: Quantize, most_kept_bytes: int
) -> Sequence[IncrementalForward | FullForward]:
    """One walk for each batch, layer by layer where the model allows it."""
    keeps = sum(_way_bytes(trace) for trace in traces) <= most_kept_bytes
    walks = [IncrementalForward(trace, layers, variants, keeps=keeps) for trace in traces]
    why_not = traces[0].why_not_alone(variants(0), walks[0].attempt(0))
    if why_not is None:
        return walks
    _log.warning("each candidate takes a pass through the whole model, because its layers share state: %s", why_not)
    return [FullForward(trace, layers, variants) for trace in traces]


def _local_scores(walks: Sequence[IncrementalForward | FullForward]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """LTS and LRS of each layer, on what it is given in the full-precision model."""
    lts, lrs = [], []
    for p in range(len(walks[0].layers)):
        scores = [walk.local(p) for walk in walks]
        lts.append(_mean(walks, [score[0] for score in scores], p))
        lrs.append(_mean(walks, [score[1] for score in scores], p))
    return tuple(lts), tuple(lrs)


def _greedy(
    walks: Sequence[IncrementalForward | FullForward], begun: Profile, progress: Progress
) -> Iterator[SearchRound]:
    """The rounds that are left. A lazy search chooses the same layers: it only skips candidates that cannot win."""
    setting, layers = begun.setting, len(begun.lts)
    local = [setting.alpha1 * a + setting.alpha2 * b for a, b in zip(begun.lts, begun.lrs, strict=True)]
    known = [1.0] * layers
    for round_ in begun.rounds:
        known = _updated(known, round_)
    total = layers * (layers + 1) // 2
    while left := [p for p in range(layers) if p not in walks[0].chosen]:
        done = total - len(left) * (len(left) + 1) // 2
        if setting.lazy:
            left.sort(key=lambda p: -(local[p] + setting.beta * known[p]))
        search = _Search(walks, setting)
        for p in left:
            search.attempt(p, local[p])
            progress(done := done + 1, total)
        round_ = search.finish()
        known = _updated(known, round_)
        yield round_


class _Search:
    """One round: the scores so far, and the best candidate with its logits."""

    def __init__(self, walks: Sequence[IncrementalForward | FullForward], setting: ProfileSettings) -> None:
        self._walks = walks
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
        for walk in self._walks:
            if self._lazy and self._hopeless(sums, local):
                break
            logits.append(walk.attempt(p))
            sums.append(cosine(walk.logits, logits[-1]))
        else:
            self._mds[p] = _mean(self._walks, sums, p)
            self._lis[p] = local + self._beta * self._mds[p]
            if (self._lis[p], -p) > (self._highest, -self._best):
                p, self._best, self._highest, self._logits = self._best, p, self._lis[p], logits
        for walk in self._walks:
            walk.lost(p)

    def finish(self) -> SearchRound:
        """Choose the best."""
        for walk, logits in zip(self._walks, self._logits, strict=True):
            walk.choose(self._best, logits)
        return SearchRound(self._best, dict(sorted(self._mds.items())), dict(sorted(self._lis.items())))

    def _hopeless(self, sums: Sequence[float], local: float) -> bool:
        """Whether the LIS would not be the highest even if all batches to come were unharmed: no cosine is above 1."""
        unharmed = sum(walk.tokens for walk in self._walks[len(sums) :])
        most = (sum(sums) + unharmed) / sum(walk.tokens for walk in self._walks)
        return local + self._beta * most + _ROUNDING < self._highest


def _updated(known: Sequence[float], round_: SearchRound) -> list[float]:
    """The MDS that each layer had last."""
    return [round_.mds.get(p, before) for p, before in enumerate(known)]


def _mean(walks: Sequence[IncrementalForward | FullForward], sums: Sequence[float], p: int) -> float:
    mean = sum(sums) / sum(walk.tokens for walk in walks)
    if not math.isfinite(mean):
        raise _not_finite(p)
    return mean


def _not_finite(p: int) -> ConfigError:
    return ConfigError(
        f"the scores of layer {p} are not finite: activations overflow; load the model in a dtype of wider range"
    )


def _way_bytes(trace: LayerTrace) -> int:
    """What all the ways take at most."""
    layers = len(trace.outputs)
    return trace.states[0].nbytes * layers * (layers + 1) // 2
