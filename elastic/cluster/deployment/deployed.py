"""One deployed model: its fleet, its configuration, and how that is changed while it serves. (iServe; I15)"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from elastic.cluster.deployment.choice import Chooser, no_place
from elastic.cluster.deployment.devices import DeviceBook
from elastic.cluster.deployment.hysteresis import Hysteresis, Replanning
from elastic.cluster.deployment.load_meter import LoadMeter
from elastic.cluster.deployment.price import priced
from elastic.cluster.deployment.status import DeploymentStatus, Replanned, TransitionStep, links_of, stages_of
from elastic.cluster.deployment.steps import as_begun, same, steps_between, whole
from elastic.cluster.deployment.transition import DeploymentTransition, forms_at, observed
from elastic.cluster.fleet.fleet import Fleet
from elastic.errors import ConfigError, ElasticError, StateError
from elastic.estimation.profile import CostProfile
from elastic.estimation.profiles.store import ProfileStore
from elastic.planning.deployment.devices import Stage
from elastic.planning.deployment.placing import Deployment, Refusal
from elastic.planning.deployment.replicas import ReplicaRange, best_deployment, most_served
from elastic.planning.estimate.configuration import FULL, Configuration, forms_of
from elastic.planning.estimate.intent import Intent
from elastic.planning.estimate.performance import Load
from elastic.planning.estimate.ranking import Estimate


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
        chooser.profile = store.load(path, chooser.devices[0].kind.type, self.forms)
        self._book, self._settings = book, settings
        self._lock = threading.RLock()  # one change at a time
        self._kept_bytes = chooser.kept_bytes()
        self._numbers = itertools.count()
        self._ranks: dict[str, str] = {}
        self._places: dict[str, str] = {}  # device -> the place of its rank
        self._forms: frozenset[str] = frozenset()  # that layers were in at the last look
        self._begin_s: float | None = None  # that ranks took to begin
        self._above_limits = False  # whether ranks had more keys and values than their limits when these were set
        self.meter = LoadMeter(load)
        states = book.states(name, self._kept_bytes)

        def of(count: int, load: Load) -> Deployment | Refusal:
            return chooser.choose(load, intent, states, replicas=count)

        within = replicas.within(len(states))
        chosen = best_deployment(within, load, intent.objective, of, better=settings.better)
        if isinstance(chosen, Refusal):
            raise no_place(name, chosen)
        self.plan = chosen
        free, needed = book.free(name), chooser.begin_bytes(self.load) + self._kept_bytes
        self._fixed = any(free[device] < needed for device in chosen.devices)  # for all layers in full weights
        alike = len({tuple(stage.layers for stage in stages) for stages in chosen.instances}) == 1
        self._by_shares = chosen.configuration.ranks > 1 and alike and (self._fixed or set(chooser.weights) == {FULL})
        if self._fixed and not alike:
            why = "replicas that begin with their shares need room for the same layers in each stage"
            raise no_place(name, Refusal(((chosen.configuration, why),)))
        self._check_follows(replicas)
        self.fleet = self._make_fleet(dict(fleet_options))
        self._transition = DeploymentTransition(self.fleet, self._ranks, self._places, self._place)
        self.hysteresis = Hysteresis(settings, time.monotonic())

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms of weights, keys and values that it may have."""
        return forms_of(self.chooser.weights, self.chooser.kv)

    @property
    def load(self) -> Load:
        """The requests that it is planned for: those of the last minute, and no less than is expected."""
        return self.chooser.bounded(self.meter.load)

    @property
    def ranks(self) -> dict[str, str]:
        """Device -> the rank that is there."""
        return dict(self._ranks)

    def start(self) -> None:
        """Start the ranks, and have them be as is planned. Raises what they raise; then nothing is left."""
        with self._lock:
            began_s = time.monotonic()
            try:
                self.fleet.start()
                self._begin_s = time.monotonic() - began_s
                self._transition.follow()
                begun = whole(self.plan)
                if self._by_shares:  # these begin without limits
                    begun = replace(self.plan, stages=tuple(replace(stage, nbytes=0) for stage in self.plan.stages))
                for step in steps_between(begun, self.plan):
                    self._do(step, self.plan)
            except BaseException:
                self.stop(drain=False)
                raise
            self.hysteresis.changed(time.monotonic(), "it was deployed")

    def stop(self, *, drain: bool = True) -> None:
        """End its ranks, with `drain` when its requests have ended; what it had of devices is free then."""
        self.fleet.stop(drain=drain)
        self._book.release(self.name)

    def measured(self, profile: CostProfile) -> None:
        """Estimate it by what was measured from now on."""
        with self._lock:
            self.chooser.profile = profile
            self.plan = replace(self.plan, estimate=self.estimate())

    def observed(self) -> Configuration:
        """Return the configuration that its ranks are in now, as they say."""
        with self._lock:
            return replace(self._seen(self._ranks), kv=self.plan.configuration.kv)

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
        self, intent: Intent, load: Load, why: str, *, replicas: ReplicaRange | None = None, dry_run: bool = False
    ) -> Replanned:
        """Have it be as is best for an intent and a load, by actions, while it serves; with `dry_run`, say how.

        It has so many `replicas` then; None: as many as were said last.

        Raises `CapacityError` with the reasons where nothing fits; then it stays as it is, with the intent it had. One
        that is stopped on the way is `partial`, and stays so until it is changed again.
        """
        with self._lock:
            self._check_follows(replicas or self.replicas)
            has_begun = self._catch_up()
            best = self.best(load, intent, replicas)
            if isinstance(best, Refusal):
                raise no_place(self.name, best)
            seen = self.plan
            if not has_begun:
                self._note_form(best.configuration.weights)
            if not dry_run:
                self.intent, self.replicas = intent, replicas or self.replicas
                return self._become(best, why)
            told, before, self.plan = self._priced(best), self.plan, seen
            status: Literal["planned", "unchanged"] = "unchanged" if same(before, best) else "planned"
            seconds = sum(step.seconds for step in told)
            return Replanned(status, *_names(before, best), told, why, seconds, _moved(told))

    def give_back(self) -> None:
        """Give back what live requests had above the limits of ranks, where they have ended since."""
        with self._lock:
            if self._above_limits and not self._transition.awaited:
                self._do(TransitionStep("limit", self.plan.devices), self.plan)

    def look(self, now_s: float) -> Replanned | None:
        """Look whether it should change by itself, and do that; None: it stays as it is."""
        with self._lock:
            self.meter.tell(now_s, self.fleet.counters.read())
            if self._transition.awaited:
                return None
            wanted = self.plan
            if self._catch_up():
                steps = steps_between(self.plan, wanted) or (TransitionStep("limit", wanted.devices),)
                return self._carry_out(wanted, steps, "a rank was lost, and replaced")
            present, best = self.estimate(), self._best_now()
            moved = isinstance(best, Deployment) and not (present.fits and same(self.plan, best))
            wants = self.hysteresis.look(now_s, self.plan, present, best, self.intent, moved=moved)
            return self._become(best, self.hysteresis.reason) if wants and isinstance(best, Deployment) else None

    def status(self) -> DeploymentStatus:
        """Return what it is."""
        return DeploymentStatus(
            self.name,
            self.path,
            str(self.plan.configuration),
            stages_of(self.plan),
            self.intent,
            self.load,
            self.plan.estimate,
            self.hysteresis.reason,
            self.changes,
            len(self.plan.instances),
            str(self.replicas),
            links_of(self.plan, self.chooser.estimator(Load(1, 1)).costs),
        )

    # -- inside

    def _best_of(self, count: int, load: Load, intent: Intent) -> Deployment | Refusal:
        """Return the best that it could be with so many instances."""
        plan, states, only = self.plan, self._book.states(self.name, self._kept_bytes), None
        if self._fixed and self._by_shares:  # no rank could hold all of it, on the way to anything else
            only, states = plan.configuration, tuple(state for state in states if state.name in plan.devices)
        return self.chooser.choose(load, intent, states, plan.configuration.kv, plan.devices, only, count)

    def _best_now(self) -> Deployment | Refusal:
        """Return the best for the load there is; where no number of instances serves it, of more of them."""
        best = self.best(slack=self._settings.better)
        if isinstance(best, Deployment) or not self.replicas.follows:
            return best
        load, intent, present = self.load, self.intent, len(self.plan.instances)
        within = self.replicas.within(len(self._book.devices))
        more = most_served(within, load, lambda count, load: self._best_of(count, load, intent), present)
        return more or best

    def _become(self, best: Deployment, why: str) -> Replanned:
        """Become what is best, by actions; where nothing is to be done for that, say so."""
        if told := self._priced(best):
            return self._carry_out(best, told, why)
        self.hysteresis.changed(time.monotonic(), why)
        return Replanned("unchanged", *_names(self.plan, best), (), why)

    def _priced(self, best: Deployment) -> tuple[TransitionStep, ...]:
        steps = steps_between(self.plan, best)
        return priced(steps, self.chooser, self.plan.configuration, best, self._begin_s)

    def _check_follows(self, replicas: ReplicaRange) -> None:
        if replicas.follows and self._fixed:
            raise ConfigError(
                f"replicas={str(replicas)!r}: instances of {self.name!r} cannot come and go with the load, where a "
                "device has no room for a rank with all of its layers; give a number"
            )

    def _make_fleet(self, options: dict[str, Any]) -> Fleet:
        chosen = self.plan.configuration
        engine = {"kv_cache_dtype": "auto" if chosen.kv == FULL else chosen.kv}
        variants = () if self._by_shares else tuple(form for form in self.chooser.weights if form != FULL)
        stages = tuple(len(stage.layers) for stage in self.plan.instances[0])
        self._book.reserve_all(self.name, self.plan.devices)
        return Fleet(
            self.path,
            ranks=[[self._place(device)] for device in self.plan.devices],
            shards=self.chooser.shards,
            tp=chosen.tp if self._by_shares else 1,
            pp=stages if self._by_shares and len(stages) > 1 else 1,
            wrap={"variants": variants, **options.pop("wrap", {})},
            engine={**engine, **options.pop("engine", {})},
            **options,
        )

    def _catch_up(self) -> bool:
        """See what became of lost ranks, have the plan say what there is, and return whether it did not.

        Raises `StateError` where that is not known yet, and where no rank is left.
        """
        if rank := self._transition.awaited:
            raise StateError(f"rank {rank} of {self.name!r} was lost, and another one begins in its place; try again")
        before = dict(self._ranks)
        self._transition.follow()
        if not self._ranks:
            raise StateError(f"no rank of {self.name!r} is left, and none comes; remove it, and deploy it anew")
        self._forms = forms_at(self.fleet, self._ranks.values())
        if before == self._ranks and set(before) == set(self.plan.devices):
            if self.plan.configuration.weights not in self._forms:
                self._note_form(self.plan.configuration.weights)
            return False
        self.plan = as_begun(self.plan, self._ranks.keys(), self._seen)
        return True

    def _note_form(self, wanted: str) -> None:
        """Have the plan say in which form layers are, as after a swap by hand; of several not in the `wanted` one."""
        seen = self._forms & {*self.chooser.weights}
        forms = sorted(seen - {wanted}) or sorted(seen)
        if forms and forms[0] != self.plan.configuration.weights:
            self.plan = replace(self.plan, configuration=replace(self.plan.configuration, weights=forms[0]))
            self.plan = replace(self.plan, estimate=self.estimate())

    def _seen(self, devices: Iterable[str]) -> Configuration:
        """Return the configuration that the ranks of some devices are in; without any, that of one that begins."""
        ranks = [self._ranks[device] for device in devices if device in self._ranks]
        return observed(self.fleet, ranks) if ranks else Configuration()

    def _place(self, device: str) -> str:
        """Return a place on a device of its own, with all that is free there."""
        base, _, label = device.partition("#")
        slug = re.sub(r"\W", "_", self.name, flags=re.ASCII)
        own = f"{label}_{slug}_{next(self._numbers)}".lstrip("_")
        self._places[device] = f"{base}#{own}={self._book.free(self.name)[device]}"
        return self._places[device]

    def _carry_out(self, best: Deployment, steps: Sequence[TransitionStep], why: str) -> Replanned:
        began_s, before = time.monotonic(), self.plan
        try:
            self._book.reserve_all(self.name, [*self.plan.devices, *best.devices])
            for step in steps:
                self._do(step, best)
        except ElasticError as error:
            with suppress(ElasticError):  # a rank is lost meanwhile: the next look sees what there is
                self._stay(before, best)
            self.hysteresis.changed(time.monotonic(), f"stopped on the way to {best.configuration}: {error}")
            seconds = time.monotonic() - began_s
            return Replanned("partial", *_names(before, self.plan), tuple(steps), str(error), seconds)
        moved, names, seconds = not same(before, best), _names(before, best), time.monotonic() - began_s
        self.plan = best
        self.changes += moved
        self.hysteresis.changed(time.monotonic(), why)
        return Replanned("applied" if moved else "unchanged", *names, tuple(steps), why, seconds, _moved(steps))

    def _do(self, step: TransitionStep, wanted: Deployment) -> None:
        transition = self._transition
        if step.kind == "limit":
            self._limit(wanted)
            return
        if step.kind in ("part", "share", "drop"):  # keys and values are copied: for that, there is more room
            free = self._book.free(self.name)
            for device in step.devices:
                left = free[device] - transition.held_bytes(device)
                transition.limit(device, None if transition.budget(device) <= free[device] else max(0, left))
        transition.do(step)

    def _limit(self, wanted: Deployment) -> None:
        """Give ranks what they are to have for keys and values, and give the rest of the devices back.

        What live requests have above a limit is given back when they have ended.
        """
        estimator, free = self.chooser.estimator(self.load), self._book.free(self.name)
        transition = self._transition
        others, limits = dict[str, int](), dict[str, int]()
        for stage in wanted.stages:
            share = self.chooser.rank_bytes(
                estimator, wanted.configuration, stage.layers, stage.nbytes, wanted.requests
            )
            for device in stage.devices:
                others[device] = transition.held_bytes(device) + share.activations + share.copied
                limits[device] = max(0, min(share.kv, free[device] - others[device]))
                transition.limit(device, limits[device])
        kept = {device: max(limit, transition.settle(device, limit)) for device, limit in limits.items()}
        self._above_limits = kept != limits
        self._book.reserve(self.name, {device: min(free[device], others[device] + kept[device]) for device in kept})

    def _stay(self, before: Deployment, best: Deployment) -> None:
        """Have the plan say what there is, where a change was stopped on the way to the best."""
        self._transition.follow()
        seen = self.observed()
        if not self._ranks or (seen == before.configuration and set(self._ranks) == set(before.devices)):
            return
        if seen.ranks == 1:
            stages = tuple(Stage(range(before.stages[-1].layers.stop), (device,), 0) for device in self._ranks)
            self.plan = replace(before, configuration=seen, stages=stages)
            return
        for plan in (before, best):
            degrees = plan.configuration.tp, plan.configuration.pp
            if (seen.tp, seen.pp) == degrees and set(self._ranks) == set(plan.devices):
                self.plan = replace(plan, configuration=seen)


def _moved(steps: Sequence[TransitionStep]) -> int:
    return sum(step.moved_bytes for step in steps)


def _names(before: Deployment, after: Deployment) -> tuple[str, str]:
    return str(before.configuration), str(after.configuration)
