"""One deployed model: its fleet, its configuration, and how that is changed while it serves. (iServe; I15)"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

from elastic.cluster.deployment.choice import Chooser, no_place
from elastic.cluster.deployment.devices import DeviceBook
from elastic.cluster.deployment.hysteresis import Hysteresis, Replanning
from elastic.cluster.deployment.load_meter import LoadMeter
from elastic.cluster.deployment.price import StepPrices
from elastic.cluster.deployment.ranks import DeployedRanks, RankViews, forms_in
from elastic.cluster.deployment.status import DeploymentStatus, Replanned, StageStatus, TransitionStep, links_of
from elastic.cluster.deployment.steps import as_seen, same, steps_between, whole
from elastic.cluster.fleet.ticks import Attempts
from elastic.errors import ConfigError, ElasticError, StateError
from elastic.estimation.profile import CostProfile
from elastic.estimation.profiles.store import ProfileStore
from elastic.planning.deployment.placing import Deployment, Refusal
from elastic.planning.deployment.replicas import ReplicaRange, best_deployment, most_served
from elastic.planning.estimate.configuration import FULL, Configuration, forms_of
from elastic.planning.estimate.intent import Intent
from elastic.planning.estimate.performance import Load
from elastic.planning.estimate.ranking import Estimate, RankBytes
from elastic.quant.variants.variant import Variant
from elastic.runtime.options import one_or_several


class Deployed:
    """A model on some of the devices. Its fleet is an engine. Changes wait for each other.

    `fleet_options` are further ones of `Fleet`. Raises `ConfigError` for a model that cannot be estimated, and
    `CapacityError` with the reasons where no configuration fits.
    """

    def __init__(
        self,
        name: str,
        path: str,
        chooser: Chooser,
        book: DeviceBook,
        intent: Intent,
        load: Load,
        settings: Replanning,
        fleet_options: Mapping[str, Any],
        store: ProfileStore,
        replicas: ReplicaRange = ReplicaRange(),  # noqa: B008  (frozen)
    ) -> None:
        self.name, self.path, self.intent, self.replicas = name, path, intent, replicas
        self.chooser, self.changes = chooser, 0
        self.forms = forms_of(chooser.weights, chooser.kv)
        """The forms of weights, keys and values that it may have."""
        chooser.use_profile(store.load(path, chooser.devices[0].kind.type, self.forms))
        self._book, self._settings = book, settings
        self._lock = threading.RLock()  # one change at a time
        self._kept_bytes = chooser.kept_bytes()
        self._prices = StepPrices()
        self.meter = LoadMeter(load)
        states = book.states(name, self._kept_bytes)

        def of(count: int, load: Load) -> Deployment | Refusal:
            return chooser.choose(load, intent, states, replicas=count)

        within = replicas.within(len(states))
        chosen = best_deployment(within, load, intent.objective, of, better=settings.better)
        if isinstance(chosen, Refusal):
            raise no_place(name, chosen)
        self.plan = chosen
        self._carried_out: dict[str, str] = {}  # device -> the rank with which the plan was; none: it was not
        free, needed = book.free(name), chooser.begin_bytes(self.load) + self._kept_bytes
        self._fixed = any(free[device] < needed for device in chosen.devices)  # for all layers in full weights
        alike = len({tuple(stage.layers for stage in stages) for stages in chosen.instances}) == 1
        self._by_shares = chosen.configuration.ranks > 1 and alike and (self._fixed or set(chooser.weights) == {FULL})
        if self._fixed and not alike:
            why = "replicas that begin with their shares need room for the same layers in each stage"
            raise no_place(name, Refusal(((chosen.configuration, why),)))
        self._check_follows(replicas)
        self.ranks = DeployedRanks(name, book, path, chosen.devices, self._options(dict(fleet_options)))
        self.fleet = self.ranks.fleet
        self.hysteresis = Hysteresis(settings, time.monotonic())
        self.looks = Attempts(f"deployment {name} cannot be planned anew")
        """Looks whether it should change: what one raises ends no other."""

    @property
    def load(self) -> Load:
        """The requests that it is planned for: those of the last minute, and no less than is expected."""
        return self.chooser.bounded(self.meter.load)

    def start(self) -> None:
        """Start the ranks, and have them be as is planned. Raises what they raise; then nothing is left."""
        with self._lock:
            began_s = time.monotonic()
            try:
                self.fleet.start()
                self._prices.begin_s = time.monotonic() - began_s
                self.ranks.follow()
                begun = whole(self.plan)
                if self._by_shares:  # these begin without limits
                    begun = replace(self.plan, stages=tuple(replace(stage, nbytes=0) for stage in self.plan.stages))
                for step in steps_between(begun, self.plan):
                    self._do(step, self.plan)
            except BaseException:
                self.ranks.stop(drain=False)
                raise
            self._become(self.plan, "it was deployed")

    def measured(self, profile: CostProfile) -> None:
        """Estimate it by what was measured from now on."""
        with self._lock:
            self.chooser.use_profile(profile)
            self.plan = replace(self.plan, estimate=self.estimate())

    def observed(self, views: RankViews | None = None, aim: Deployment | None = None) -> Configuration:
        """Return the configuration that its ranks are in now, as they say: of several forms one that is not planned.

        Where a change was stopped, `aim` is what was planned: it is done where all layers are in its form.
        """
        with self._lock:
            present, planned = self.plan.configuration, (aim or self.plan).configuration
            forms = _forms(self.ranks.look() if views is None else views).values()
            others = sorted(({*chain(*forms)} or {present.weights}) - {planned.weights})
            tp, pp = map(max, zip((1, 1), *self.ranks.instances().values(), strict=True))
            return replace(present, tp=tp, pp=pp, weights=next(iter(others), planned.weights))

    def estimate(self, load: Load | None = None, intent: Intent | None = None) -> Estimate:
        """Return what is expected of it as it is."""
        estimate = self.chooser.now(load or self.load, intent or self.intent, self.plan)
        return replace(estimate, why_not=estimate.why_not or self._book.lacking(self.name))

    def best(
        self,
        load: Load | None = None,
        intent: Intent | None = None,
        replicas: ReplicaRange | None = None,
        *,
        slack: float = 0.0,
    ) -> Deployment | Refusal:
        """Return the best that it could be, if what it has of devices were free. Keys and values keep their form.

        What it is counts as having room, whatever is planned for others. `slack`: see `best_deployment`.
        """
        load, intent, present = load or self.load, intent or self.intent, len(self.plan.instances)
        within = (replicas or self.replicas).within(len(self._book.devices))

        def of(count: int, load: Load) -> Deployment | Refusal:
            best = self._best_of(count, load, intent)
            stays = isinstance(best, Refusal) and present == count and self.estimate(load, intent).fits
            return self.plan if stays else best

        better = self._settings.better
        return best_deployment(within, load, intent.objective, of, present=present, slack=slack, better=better)

    def change(
        self,
        intent: Intent | None = None,
        load: Load | None = None,
        replicas: ReplicaRange | None = None,
        *,
        dry_run: bool = False,
    ) -> Replanned:
        """Have it be as is best for an intent and a load, by actions, while it serves; with `dry_run`, say how.

        What is None is what it was last. Raises `CapacityError` with the reasons where nothing fits; then it stays as
        it is, with the intent it had. One that is stopped on the way is `partial`, and stays so until it is changed
        again.
        """
        with self._lock:
            intent, replicas = intent or self.intent, replicas or self.replicas
            self._check_follows(replicas)
            views, why = self.ranks.look(), f"the intent is {_in_words(intent)}"
            present, best = self._present(views), self.best(load, intent, replicas)
            if isinstance(best, Refusal):
                raise no_place(self.name, best)
            planned = self._planned(present, best, views, why)
            if dry_run:
                return planned
            self.intent, self.replicas, self.meter.expected = intent, replicas, load or self.meter.expected
            return self._carry_out(present, best, planned)

    def give_back(self) -> None:
        """Give back what live requests had above the limits of ranks, where they have ended since."""
        with self._lock:
            if self.ranks.above_limits and self._carried_out == self.ranks.by_device and not self.ranks.replaced():
                self.ranks.limit(self._shares(self.plan), wait_s=0.0)

    def look(self, now_s: float, views: RankViews) -> Replanned | None:
        """Look whether it should change by itself, and do that; None: it stays as it is. `views`: of its ranks."""
        with self._lock:
            self.meter.tell(now_s, self.fleet.counters.read())
            if self.ranks.replaced():
                return None
            present = self._present(views)
            if self._carried_out != self.ranks.by_device:
                why = "a rank was lost, and replaced" if self._carried_out else "a change was interrupted"
                return self._carry_out(present, self.plan, self._planned(present, self.plan, views, why))
            self.plan = present
            estimate, best = self.estimate(), self._best_now()
            moved = isinstance(best, Deployment) and not (estimate.fits and same(present, best))
            wants = self.hysteresis.look(now_s, present, estimate, best, self.intent, moved=moved)
            if not wants or isinstance(best, Refusal):
                return None
            return self._carry_out(present, best, self._planned(present, best, views, self.hysteresis.reason))

    def status(self) -> DeploymentStatus:
        """Return what it is."""
        plan = self.plan
        return DeploymentStatus(
            self.name,
            self.path,
            str(plan.configuration),
            tuple(StageStatus((each.layers[0], each.layers[-1]), each.devices, each.nbytes) for each in plan.stages),
            self.intent,
            self.load,
            plan.estimate,
            self.hysteresis.reason,
            self.changes,
            len(plan.instances),
            str(self.replicas),
            links_of(plan, self.chooser.estimator(Load(1, 1)).costs),
        )

    # -- inside

    def _best_of(self, count: int, load: Load, intent: Intent) -> Deployment | Refusal:
        """Return the best that it could be with so many instances."""
        plan, states, only = self.plan, self._book.states(self.name, self._kept_bytes), None
        if self._fixed and self._by_shares:  # no rank could hold all of it, on the way to anything else
            only = self.chooser.allowed(plan.configuration)
            states = tuple(state for state in states if state.name in plan.devices)
        return self.chooser.choose(load, intent, states, plan.configuration.kv, plan.devices, only, count)

    def _best_now(self) -> Deployment | Refusal:
        """Return the best for the load there is; where no number of instances serves it, of more of them."""
        best = self.best(slack=self._settings.better)
        if isinstance(best, Deployment) or self.replicas.least == self.replicas.most:
            return best
        load, intent, present = self.load, self.intent, len(self.plan.instances)
        within = self.replicas.within(len(self._book.devices))
        more = most_served(within, load, lambda count, load: self._best_of(count, load, intent), present)
        return more or best

    def _present(self, views: RankViews) -> Deployment:
        """Return the plan as it is now, where ranks were lost, or layers swapped by hand, since it was carried out.

        Raises `StateError` where that is not known yet, and where no rank is left.
        """
        if lost := self.ranks.replaced():
            rank = min(lost)
            raise StateError(f"rank {rank} of {self.name!r} was lost, and another one begins in its place; try again")
        if not self.ranks.by_device:
            raise StateError(f"no rank of {self.name!r} is left, and none comes; remove it, and deploy it anew")
        if self._carried_out != self.ranks.by_device:
            return as_seen(self.observed(views), self.ranks.instances(), self.plan)
        planned, forms = self.plan.configuration, _forms(views)
        if not forms or any(planned.weights in each for each in forms.values()):
            return self.plan
        weights = self.observed(views).weights
        present = replace(self.plan, configuration=replace(planned, weights=weights))
        return replace(present, estimate=self.chooser.now(self.load, self.intent, present))

    def _planned(self, present: Deployment, best: Deployment, views: RankViews, why: str) -> Replanned:
        """Return what is to be done for the best, with prices; ranks that were replaced have no limits yet."""
        steps = steps_between(present, best, _forms(views))
        if not steps and self._carried_out != self.ranks.by_device:
            steps = (TransitionStep("limit", best.devices),)
        steps = self._prices.priced(steps, self.chooser, present.configuration, best)
        return Replanned(
            "planned" if any(step.kind != "limit" for step in steps) else "unchanged",
            str(present.configuration),
            str(best.configuration),
            steps,
            why,
            sum(step.seconds for step in steps),
            sum(step.moved_bytes for step in steps),
        )

    def _check_follows(self, replicas: ReplicaRange) -> None:
        if replicas.least < replicas.most and self._fixed:
            raise ConfigError(
                f"replicas={str(replicas)!r}: instances of {self.name!r} cannot come and go with the load, where a "
                "device has no room for a rank with all of its layers; give a number"
            )

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of the fleet."""
        chosen = self.plan.configuration
        engine = {"kv_cache_dtype": "auto" if chosen.kv == FULL else chosen.kv}
        wrap = {"variants": (), **options.pop("wrap", {})}
        if not self._by_shares:
            said = one_or_several(wrap["variants"], (str, Variant), "variants", "'int4'")
            names = {FULL, *(getattr(each, "name", each) for each in said)}
            wrap["variants"] = (*said, *(form for form in self.chooser.weights if form not in names))
        stages = tuple(len(stage.layers) for stage in self.plan.instances[0])
        return {
            "shards": self.chooser.shards,
            "tp": chosen.tp if self._by_shares else 1,
            "pp": stages if self._by_shares and len(stages) > 1 else 1,
            "wrap": wrap,
            "engine": {**engine, **options.pop("engine", {})},
            **options,
        }

    def _become(self, plan: Deployment, why: str) -> None:
        """Note what it is now, with the ranks that there are."""
        self.plan, self._carried_out = plan, dict(self.ranks.by_device)
        self.hysteresis.changed(time.monotonic(), why)

    def _carry_out(self, present: Deployment, best: Deployment, planned: Replanned) -> Replanned:
        """Do what was planned, and return what it came to."""
        began_s, self._carried_out = time.monotonic(), {}
        try:
            if planned.steps:
                self._book.reserve_all(self.name, [*present.devices, *best.devices])
            for step in planned.steps:
                step_s = time.monotonic()
                self._do(step, best)
                self._prices.note(step, time.monotonic() - step_s)
        except ElasticError as error:
            with suppress(ElasticError):  # a rank is lost meanwhile: the next look sees what there is
                present = self._stopped(present, best)
                if all(stage.nbytes for stage in present.stages):  # it is what it was, or as it was to be
                    self.ranks.limit(self._shares(present))
            self._become(present, f"stopped on the way to {best.configuration}: {error}")
            after, seconds = str(present.configuration), time.monotonic() - began_s
            return replace(planned, status="partial", after=after, why=str(error), seconds=seconds, moved_bytes=0)
        moved = planned.status == "planned"
        self.changes += moved
        self._become(best, planned.why)
        return replace(planned, status="applied" if moved else "unchanged", seconds=time.monotonic() - began_s)

    def _do(self, step: TransitionStep, wanted: Deployment) -> None:
        if step.kind == "limit":
            self.ranks.limit(self._shares(wanted))
        else:
            self.ranks.do(step)

    def _shares(self, wanted: Deployment) -> dict[str, RankBytes]:
        """Return what the rank of each device is to have: all that is free where a stopped change has left it."""
        estimator, free, shares = self.chooser.estimator(self.load), self._book.free(self.name), dict[str, RankBytes]()
        for stage in wanted.stages:
            for device in stage.devices:
                about = wanted.configuration, stage.layers, stage.nbytes or free[device], wanted.requests
                shares[device] = self.chooser.rank_bytes(estimator, *about)
        return shares

    def _stopped(self, before: Deployment, best: Deployment) -> Deployment:
        """Return what there is where a change was stopped on the way to the best."""
        seen = self.observed(aim=best)
        if not self.ranks.by_device:  # the last rank was lost, and none comes
            return before
        return as_seen(seen, self.ranks.instances(), before, best)


def _in_words(intent: Intent) -> str:
    bounds = {"latency, s": intent.latency_s, "GiB s": intent.cost, "nats of loss": intent.quality_loss}
    kept = [f"at most {value:g} {name}" for name, value in bounds.items() if value is not None]
    return ", ".join([f"the least {intent.objective}", *kept])


def _forms(views: RankViews) -> dict[str, frozenset[str]]:
    """Return the forms that layers are in on each device of which that is known."""
    return {device: forms for (device, _), view in views.items() if (forms := forms_in(view))}
