"""Which configuration a model gets for an intent, and on which devices, of those that a fleet can have. (iServe, 6)"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from elastic.errors import CapacityError, ConfigError
from elastic.estimation.estimate import Estimator
from elastic.estimation.model_layout import ModelLayout, layout_of
from elastic.estimation.options import ModelOption, options
from elastic.estimation.profile import CostProfile
from elastic.planning.deployment.assign import assign
from elastic.planning.deployment.devices import DeviceState
from elastic.planning.deployment.placing import Deployment, Refusal, place
from elastic.planning.deployment.policies import THETA, PolicyName
from elastic.planning.estimate.configuration import FULL, Configuration
from elastic.planning.estimate.devices import Device
from elastic.planning.estimate.intent import Intent
from elastic.planning.estimate.performance import Load
from elastic.planning.estimate.ranking import Estimate, RankBytes
from elastic.planning.sharding.heads import kv_shards
from elastic.weights.decoder import batch_context_length

HEADROOM = 2
"""So many times the requests that run at a time on the average there is room for, where devices have it."""
STEP_TOKENS = 512
LOADS_KEPT = 32
"""Of so many loads a chooser keeps what it estimated."""
MOST_SHARDS = 4
"""In so many parts layers are cut, at the most."""


@dataclass(frozen=True)
class FleetOption(ModelOption):
    """A configuration as a fleet can have it: with even stages it says why it cannot, too."""

    begin_bytes: int = 0
    """Of a rank with all layers in full weights: so does one begin that shares layers, or has a part of them, later.
    0: ranks begin with no more than they are to have."""
    shards: int = 1
    """In so many parts layers are cut."""

    def need(self, layers: range, requests: int) -> int:
        """Return the bytes that a rank needs at any time, also before it shares layers."""
        begin = self.begin_bytes if self.configuration.ranks > 1 else 0
        return max(begin, self.held(layers, requests))

    def held(self, layers: range, requests: int) -> int:
        """Return the bytes that a rank needs as soon as it is as it is to be.

        Beyond an estimate's, each part of the heads has pages of its own, and each rank requests of its own.
        """
        estimator, own = self.estimator, self.configuration
        kv, tokens = estimator.layout.kv_shape(own.kv), estimator.load.tokens
        whole, part = estimator.room(kv, own.tp, layers), estimator.room(kv, self.shards, layers)
        parts = kv_shards(self.shards, kv.heads) // kv_shards(own.tp, kv.heads)
        pages = parts * (part.pages(requests, tokens) + (own.ranks - 1) * part.pages(1, tokens))
        more = (pages - whole.pages(requests, tokens)) * estimator.pages.page_bytes
        return super().need(layers, requests) + math.ceil(more / (1 - estimator.copied_share(own, layers)))


class Chooser:
    """Chooses configurations of one model on devices of one kind. Not thread-safe.

    `weights` and `kv` are the forms that it may have, `engine` the options of the engine of its ranks. Raises
    `ConfigError` for a model that cannot be estimated.
    """

    def __init__(
        self,
        path: str | Path,
        devices: Sequence[Device],
        weights: Sequence[str],
        kv: Sequence[str],
        policy: PolicyName = "hybrid",
        theta: float = THETA,
        losses: Mapping[str, float] | None = None,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        self.devices, self.weights, self.kv, self.order = devices, tuple(weights), tuple(kv), (policy, theta)
        self.losses = losses or {}
        self._step_tokens = (engine or {}).get("max_batch_tokens", STEP_TOKENS)
        self._block_tokens = (engine or {}).get("block_tokens")
        self.profile: CostProfile | None = None
        """What was measured of it; None: seconds of data sheets."""
        self._options = lru_cache(LOADS_KEPT)(self._estimated)
        self._dtype = torch.float32 if devices[0].kind.type == "cpu" else None
        self._path = path

    def use_profile(self, profile: CostProfile | None) -> None:
        """Estimate by what was measured from now on."""
        self.profile = profile
        self._options.cache_clear()

    @cached_property
    def layout(self) -> ModelLayout:
        """The model without weights. Raises `ConfigError` for one that engines refuse, before ranks are started."""
        layout = layout_of(self._path, self._dtype)
        if layout.refusal:
            raise ConfigError(f"MODEL {self._path}: {layout.refusal}")
        return layout

    @cached_property
    def shards(self) -> int:
        """In how many parts layers are cut: as many as the most ranks that could share them."""
        uncompressed = options(self.estimator(Load(1, 1)), "latency", (FULL,), (FULL,))
        degrees = [each.configuration.tp for each in uncompressed if each.estimate.ranks]
        return max((tp for tp in degrees if tp <= MOST_SHARDS), default=1)

    def estimator(self, load: Load) -> Estimator:
        """Return what estimates configurations for such requests."""
        sizes = self._step_tokens, self._block_tokens
        return Estimator(self.layout, self.devices, load, *sizes, 0, self.profile, losses=self.losses)

    def bounded(self, load: Load) -> Load:
        """Return a load whose requests are no longer than the model was made for."""
        most = batch_context_length(self.layout.decoder.config)
        if not most or load.tokens <= most:
            return load
        prompt = min(load.prompt, max(1, most - min(load.new, most // 4)))
        return replace(load, prompt=prompt, new=max(1, most - prompt))

    def kept_bytes(self) -> int:
        """Return what each rank keeps back, so that it can swap to any of the forms."""
        pages = self.estimator(Load(1, 1)).pages
        return max(pages.staging(name, 0) for name in self.weights) * pages.page_bytes

    def begin_bytes(self, load: Load) -> int:
        """Return what a rank needs that begins with all layers in full weights."""
        layers = range(len(self.layout.decoder.layers))
        return self.rank_bytes(self.estimator(load), Configuration(), layers, 0, 1).used

    def options(
        self, load: Load, intent: Intent, kv: str | None = None, *, begins: bool = False
    ) -> Sequence[FleetOption]:
        """Return all configurations, the best for the intent first; `kv`: only those with this form.

        With `begins` no rank is there yet: each can begin with what it is to have, in full weights. Those of the last
        loads are kept: they are asked for every second.
        """
        return self._options(load, intent, kv, begins)

    def _estimated(self, load: Load, intent: Intent, kv: str | None, begins: bool) -> tuple[FleetOption, ...]:
        estimator, begin = self.estimator(load), self.begin_bytes(load)
        candidates = options(estimator, intent, self.weights, self.kv if kv is None else (kv,))
        return tuple(
            FleetOption(
                each.estimator,
                each.intent,
                self._of_fleet(each.estimate),
                begin_bytes=0 if begins and each.configuration.weights == FULL else begin,
                shards=self.shards,
            )
            for each in candidates
        )

    def _of_fleet(self, estimate: Estimate) -> Estimate:
        """Return an estimate, which does not fit where more ranks share a layer than it is cut for."""
        tp = estimate.configuration.tp
        if tp <= self.shards or not estimate.fits:
            return estimate
        return replace(estimate, why_not=f"{tp} ranks share a layer, which deployments cut in {self.shards} parts")

    def choose(
        self,
        load: Load,
        intent: Intent,
        states: Sequence[DeviceState],
        kv: str | None = None,
        stays: Collection[str] = (),
        only: Configuration | None = None,
        replicas: int = 1,
    ) -> Deployment | Refusal:
        """Return the best configuration that the devices have room for, and where it goes.

        On devices that it `stays` on it goes where these suffice: nothing is gained by going elsewhere with it. Without
        any no rank is there yet. `only` is one that it cannot leave. Each of `replicas` has its share of the load.
        """
        candidates = self.options(load.shared(replicas), intent, kv, begins=not stays or only is not None)
        candidates = [each for each in candidates if only in (None, each.configuration)]
        placed = place(candidates, states, *self.order, replicas)
        if isinstance(placed, Refusal):
            return placed
        chosen = next(each for each in candidates if each.configuration == placed.configuration)
        again = place([chosen], [state for state in states if state.name in stays], *self.order, replicas)
        return settled(chosen, again if isinstance(again, Deployment) else placed, states)

    def allowed(self, configuration: Configuration) -> Configuration:
        """Return a configuration in a form that it may have: where it may not, in the first one that it may."""
        is_allowed = configuration.weights in self.weights
        return configuration if is_allowed else replace(configuration, weights=self.weights[0])

    def now(self, load: Load, intent: Intent, present: Deployment) -> Estimate:
        """Return what is expected of the worst instance that is there, with other requests or another intent.

        It says why it cannot stay so. Layers in a form that it may not have, as after the loss of a rank or a swap by
        hand, are taken for one of `allowed`.
        """
        own, taken = present.configuration, self.allowed(present.configuration)
        candidates = self.options(load.shared(len(present.instances)), intent, own.kv)
        option = next(each for each in candidates if each.configuration == taken)
        requests = max(present.requests, option.estimate.running)
        estimates = [option.judge(stages, requests) for stages in present.instances]
        worst = max(estimates, key=lambda each: (not each.fits, each.latency_s))
        if own == taken:
            return worst
        return replace(worst, configuration=own, why_not=f"it may have {' or '.join(self.weights)}")

    def rank_bytes(
        self, estimator: Estimator, configuration: Configuration, layers: range, nbytes: int, running: int
    ) -> RankBytes:
        """Return what a rank has of so many bytes for each purpose."""
        return estimator.rank(Device("", self.devices[0].kind, nbytes), layers, configuration, running)


def settled(chosen: FleetOption, placed: Deployment, states: Sequence[DeviceState]) -> Deployment:
    """Return a deployment with what its ranks have when they are as they are to be, with more room where there is."""
    requests = HEADROOM * placed.requests
    roomy = [
        assign(chosen, [state for state in states if any(state.name in stage.devices for stage in stages)], requests)
        for stages in placed.instances
    ]
    if any(isinstance(stages, str) for stages in roomy):
        roomy, requests = list(placed.instances), placed.requests
    instances = [
        [replace(each, nbytes=chosen.held(each.layers, requests)) for each in stages]
        for stages in roomy
        if not isinstance(stages, str)
    ]
    estimates = [chosen.judge(stages, requests) for stages in instances]
    if not all(estimate.fits for estimate in estimates):
        return placed
    slowest = max(estimates, key=lambda each: each.latency_s)
    every = tuple(stage for stages in instances for stage in stages)
    return replace(placed, stages=every, requests=requests, estimate=slowest)


def no_place(name: str, refusal: Refusal) -> CapacityError:
    """Return the error that says why a model has no place."""
    reasons = "; ".join(f"{configuration}: {why}" for configuration, why in refusal.reasons[:4])
    return CapacityError(
        f"{name!r} has no place: {refusal}. ({reasons}) Give it devices, an intent with other bounds, or less load",
        requested_bytes=0,
        free_bytes=0,
        total_bytes=0,
    )
