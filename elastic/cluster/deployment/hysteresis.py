"""When a deployment changes its configuration by itself: not for a moment's load, nor back and forth. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.errors import is_number, require, require_period
from elastic.planning.deployment.placing import Deployment, Refusal
from elastic.planning.deployment.replicas import total_value
from elastic.planning.estimate.intent import Intent, Objective
from elastic.planning.estimate.ranking import Estimate


@dataclass(frozen=True)
class Replanning:
    """When deployments are planned anew. Seconds are of the wall clock."""

    tick_s: float = 1.0
    """Between two looks."""
    better: float = 0.15
    """By so much of what the intent wants small another configuration must be better,"""
    patience_s: float = 10.0
    """for so long. As long a configuration that keeps the intent or serves the load no more is waited for;"""
    dwell_s: float = 60.0
    """and for so long a configuration stays that does both."""

    def __post_init__(self) -> None:
        require_period(self.tick_s, "tick_s")
        require(is_number(self.better) and 0 <= self.better < 1, "better", self.better, "at least 0, and below 1")
        for name in ("patience_s", "dwell_s"):
            seconds = getattr(self, name)
            is_time = isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds >= 0
            require(is_time, name, seconds, "at least 0")


class Hysteresis:
    """Says of one deployment, look after look, whether it is to change. Times are seconds of one clock."""

    def __init__(self, settings: Replanning, now_s: float) -> None:
        self._settings = settings
        self._changed_s = self._since_s = now_s  # since: when what is wished now was wished first
        self._wish = ""
        self.reason = "it was deployed"
        """What was said last."""

    def look(
        self,
        now_s: float,
        plan: Deployment,
        present: Estimate,
        best: Deployment | Refusal,
        intent: Intent,
        *,
        moved: bool,
    ) -> bool:
        """Return whether to change from `plan`, with its estimate for the present load, to `best` now.

        `moved`: whether that differs from what there is.
        """
        wish = _wish(plan, present, best, intent.objective, self._settings.better) if moved else ""
        if wish != self._wish:
            self._wish, self._since_s = wish, now_s
        waited_s = now_s - self._since_s
        self.reason = _words(wish, present, best, waited_s)
        rested = wish == _UNFIT or now_s - self._changed_s >= self._settings.dwell_s
        return bool(wish) and rested and waited_s >= self._settings.patience_s

    def changed(self, now_s: float, why: str) -> None:
        """Note that it was changed, or that this was tried."""
        self._changed_s = self._since_s = now_s
        self._wish, self.reason = "", why


def _wish(plan: Deployment, present: Estimate, best: Deployment | Refusal, objective: Objective, better: float) -> str:
    """Return why it should change, in a word; "": it should not."""
    if isinstance(best, Refusal):
        return ""
    if not present.fits:
        return _UNFIT
    count, wanted = len(plan.instances), len(best.instances)
    if wanted != count and len(best.devices) < len(plan.devices):
        return _FEWER
    mine, other = total_value(present, count, objective), total_value(best.estimate, wanted, objective)
    return _BETTER if other < (1 - better) * mine else ""


def _words(wish: str, present: Estimate, best: Deployment | Refusal, waited_s: float) -> str:
    """Say what was seen."""
    if not wish or isinstance(best, Refusal):
        return f"it stays: {present.why_not}, and nothing else fits" if not present.fits else "nothing is much better"
    reasons = {
        _UNFIT: f"{present.configuration} cannot stay: {present.why_not}",
        _FEWER: "fewer devices serve the load",
        _BETTER: "another one is better",
    }
    count = len(best.instances)
    other = f"{count} x {best.configuration}" if count > 1 else str(best.configuration)
    return f"{reasons[wish]}; {other} could be instead, for {waited_s:.0f} s now"


_UNFIT, _FEWER, _BETTER = "unfit", "fewer", "better"
