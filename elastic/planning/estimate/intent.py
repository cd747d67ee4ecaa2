"""What a user wants of a deployment: something as small as it can be, or below a bound. (iServe, section 4.1)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from elastic.errors import ConfigError, is_number

Objective = Literal["latency", "cost", "memory", "gpu_hours"]
"""Cost is memory times latency, as in the paper, where it is the default too; memory and GPU hours are its others."""
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


@dataclass(frozen=True)
class Intent:
    """What is to be small, and what no deployment may exceed. Without any, cost is to be small."""

    minimize: Objective | None = None
    """None: the cost; with a bound of the cost alone, the latency, which is what a budget is spent on."""
    latency_s: float | None = None
    """The longest that one request may take, in seconds."""
    cost: float | None = None
    """The most that one request may cost, in GiB seconds."""
    quality_loss: float | None = None
    """By how much the mean loss of a token may rise over that of full weights, in nats; 0: nothing is compressed."""
    tolerance: float = 0.0
    """By which share above the least is as good, for the sake of less memory: what differs by less than estimates err
    is not told apart by them, and leaves more room for other models."""

    def __post_init__(self) -> None:
        if self.minimize is not None and self.minimize not in OBJECTIVES:
            raise ConfigError(f"minimize={self.minimize!r} is not known; use one of {', '.join(OBJECTIVES)}")
        for name in ("latency_s", "cost"):
            bound = getattr(self, name)
            if bound is not None and not (is_number(bound) and bound > 0):
                raise ConfigError(f"{name}={bound!r} cannot be met, or bounds nothing; give a number above 0, or None")
        if not is_number(self.tolerance) or self.tolerance < 0:
            raise ConfigError(f"tolerance={self.tolerance!r} cannot be; give a share of 0 or more, such as 0.05")
        if self.quality_loss is not None and not (is_number(self.quality_loss) and self.quality_loss >= 0):
            raise ConfigError(f"quality_loss={self.quality_loss!r} cannot be; give 0 or more nats a token, or None")

    @property
    def objective(self) -> Objective:
        """What is to be small among what keeps the bounds."""
        budget = self.cost is not None and self.latency_s is None
        return self.minimize or ("latency" if budget else "cost")

    @classmethod
    def of(cls, intent: Intent | Objective) -> Intent:
        """Return an intent, or that of a word. Raises `ConfigError` for an unknown one."""
        return intent if isinstance(intent, Intent) else cls(intent)

    def missed(self, latency_s: float, cost: float) -> str:
        """Say which bound a latency and a cost exceed; "" if they keep both."""
        if self.latency_s is not None and latency_s > self.latency_s:
            return f"a request takes {latency_s:.3g} s, above the {self.latency_s:g} s of the intent"
        if self.cost is not None and cost > self.cost:
            return f"a request costs {cost:.3g} GiB s, above the {self.cost:g} GiB s of the intent"
        return ""

    def too_lossy(self, compressed: Sequence[str], loss: float | None) -> str:
        """Say why what is compressed loses too much; "" if it does not. `loss`: None where it is not known."""
        names = ", ".join(compressed)
        if self.quality_loss is None or not compressed:
            return ""
        if loss is None:
            return f"what {names} loses of the quality is not known; measure it, or give its loss"
        if loss > self.quality_loss:
            return f"{names} loses {loss:.3g} nats a token, above the {self.quality_loss:g} of the intent"
        return ""
