"""The sensitivity order of MorphServe (section 3.2): which layers to swap first, so that the model loses least.

Greedy: in each round every layer that is left is tried in addition to those chosen before, and the one with the highest
LIS = alpha1 * LTS + alpha2 * LRS + beta * MDS joins them.

What a layer was given is kept, so that a pass with layer p replaced starts at p; and so is the way of every candidate
from there on: when layer c is chosen, what a candidate before c went through up to c is still true, and its next pass
starts at c. Nothing that is known is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import nn

from elastic.errors import ConfigError
from elastic.quant.capture import Trace
from elastic.quant.profile_file import Profile, Round, Setting

Quantize = Callable[[int], nn.Module]
"""The index of a layer -> the quantized layer."""
Progress = Callable[[int, int], None]
"""Called with candidates done and candidates in all."""
Saver = Callable[[Profile], None]
MOST_KEPT_BYTES = 2 << 30
_CHUNK = 1 << 18
_ROUNDING = 1e-12


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """The cosine over the last dimension, in float64, summed over all others."""
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    chunks = -(-a.numel() // _CHUNK)
    parts = [_cosines(x.double(), y.double()).sum() for x, y in zip(a.chunk(chunks), b.chunk(chunks), strict=True)]
    return float(torch.stack(parts).sum())


def measure(
    traces: Sequence[Trace],
    layers: Sequence[nn.Module],
    quantize: Quantize,
    setting: Setting,
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
    variants = cache(quantize)
    keeps = sum(_way_bytes(trace) for trace in traces) <= most_kept_bytes
    walks = [Walk(trace, layers, variants, keeps=keeps) for trace in traces]
    if begun is None:
        check_that_layers_are_alone(walks[0])
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


@dataclass
class Walk:
    """f^(Q) on one batch, layer by layer, and on its way f^(Q + {p}) for each candidate p, as far as it is known."""

    trace: Trace
    layers: Sequence[nn.Module]
    variants: Quantize
    keeps: bool = True
    """Whether ways are kept when their candidate was not chosen."""

    chosen: set[int] = field(default_factory=set)
    _ways: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.states = list(self.trace.states)
        self.logits = self.trace.logits
        self.tokens = self.trace.ids.numel()

    def step(self, p: int) -> torch.Tensor:
        """What the quantized layer p returns for what layer p is given now."""
        way = self._ways.setdefault(p, [])
        if not way:
            way.append(self.trace.run(p, self.variants(p), self.states[p]))
        return way[0]

    def attempt(self, p: int) -> torch.Tensor:
        """The logits with layer p among the chosen ones. No layer before p is run."""
        self.step(p)
        way = self._ways[p]
        for i in range(p + len(way), len(self.layers)):
            layer = self.variants(i) if i in self.chosen else self.layers[i]
            way.append(self.trace.run(i, layer, way[-1]))
        return self.trace.head(way[-1])

    def choose(self, p: int, logits: torch.Tensor) -> None:
        """Layer p, which was attempted last with these logits, is quantized from now on."""
        self.chosen.add(p)
        self.states[p + 1 :] = self._ways.pop(p)
        self.logits = logits
        for candidate, way in self._ways.items():
            del way[max(0, p - candidate) :]

    def lost(self, p: int) -> None:
        """Layer p is not the best of this round."""
        if not self.keeps:
            self._ways.pop(p, None)

    def go_on_from(self, chosen: Sequence[int]) -> None:
        """As after `choose` for each of these layers."""
        self.chosen.update(chosen)
        for i in range(min(chosen, default=len(self.layers)), len(self.layers)):
            layer = self.variants(i) if i in self.chosen else self.layers[i]
            self.states[i + 1] = self.trace.run(i, layer, self.states[i])
        self.logits = self.trace.head(self.states[-1])


def check_that_layers_are_alone(walk: Walk) -> None:
    """Raise `ConfigError` where layers pass more than hidden states to one another, so that they cannot run alone.

    Layer 0 is replaced, and the rest run one by one: that must be a plain pass with layer 0 replaced. Then each layer
    alone, the last first, is given what it was given at the outset: what others left behind since must not matter.
    """
    trace = walk.trace
    tolerance = max(1e-5, torch.finfo(trace.logits.dtype).eps)
    whole, before = trace.whole({0: walk.variants(0)}).double(), trace.logits.double()
    effect, error = (whole - before).norm(), (whole - walk.attempt(0).double()).norm()
    if not effect.isfinite():
        raise _not_finite(0)
    if error > 0.01 * effect + tolerance * before.norm():
        raise _not_alone(f"the logits of a pass layer by layer are {error:.3g} from those of a plain one")
    for i, layer in reversed(list(enumerate(walk.layers))):
        expected = trace.outputs[i].double()
        apart = (trace.run(i, layer, trace.states[i]).double() - expected).norm()
        if not torch.equal(trace.outputs[i], trace.states[i + 1]) or apart > tolerance * expected.norm():
            raise _not_alone(f"layer {i} does not always return the same, or the next one is given something else")


def _local_scores(walks: Sequence[Walk]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """LTS and LRS of each layer, on what it is given in the full-precision model."""
    lts, lrs = [], []
    for p in range(len(walks[0].layers)):
        lts.append(_mean(walks, [cosine(w.trace.outputs[p], w.trace.states[p]) for w in walks], p))
        lrs.append(_mean(walks, [cosine(w.trace.outputs[p], w.step(p)) for w in walks], p))
        for walk in walks:
            walk.lost(p)
    return tuple(lts), tuple(lrs)


def _greedy(walks: Sequence[Walk], begun: Profile, progress: Progress) -> Iterator[Round]:
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

    def __init__(self, walks: Sequence[Walk], setting: Setting) -> None:
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

    def finish(self) -> Round:
        """Choose the best."""
        for walk, logits in zip(self._walks, self._logits, strict=True):
            walk.choose(self._best, logits)
        return Round(self._best, dict(sorted(self._mds.items())), dict(sorted(self._lis.items())))

    def _hopeless(self, sums: Sequence[float], local: float) -> bool:
        """Whether the LIS would not be the highest even if all batches to come were unharmed: no cosine is above 1."""
        unharmed = sum(walk.tokens for walk in self._walks[len(sums) :])
        most = (sum(sums) + unharmed) / sum(walk.tokens for walk in self._walks)
        return local + self._beta * most + _ROUNDING < self._highest


def _updated(known: Sequence[float], round_: Round) -> list[float]:
    """The MDS that each layer had last."""
    return [round_.mds.get(p, before) for p, before in enumerate(known)]


def _mean(walks: Sequence[Walk], sums: Sequence[float], p: int) -> float:
    mean = sum(sums) / sum(walk.tokens for walk in walks)
    if not math.isfinite(mean):
        raise _not_finite(p)
    return mean


def _not_finite(p: int) -> ConfigError:
    return ConfigError(
        f"the scores of layer {p} are not finite: activations overflow; load the model in a dtype of wider range"
    )


def _not_alone(why: str) -> ConfigError:
    return ConfigError(f"this model cannot be profiled: its layers share more than hidden states ({why})")


def _cosines(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    squares = torch.linalg.vecdot(a, a) * torch.linalg.vecdot(b, b)
    return torch.clamp(torch.linalg.vecdot(a, b) / squares.clamp(min=1e-300).sqrt(), -1, 1)


def _way_bytes(trace: Trace) -> int:
    """What all the ways take at most."""
    layers = len(trace.outputs)
    return trace.states[0].nbytes * layers * (layers + 1) // 2
