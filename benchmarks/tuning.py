"""Settings of the systems that `overload.py` compares, and a search for the best of each on traces that do not count.

Each baseline has knobs of its own. `tuned` tries the values of one after another, the others being the best so far, and
takes what served the traces for tuning with the shortest P99 of TTFT; of equal ones the one that was tried first. The
first is what all systems have where nothing is tuned, and what `drop` always has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Setting:
    """What one system serves with."""

    block_tokens: int = 32
    max_batch_tokens: int = 256
    """Of a step."""
    spare: int = 1
    """Of a system that evicts: blocks left free for each live sequence when another one begins, or comes back."""
    worth: float = 1.25
    """Of `migrate`: by which factor a move raises the lesser freeness of two instances."""
    cut: int = 6
    """Of `pipeline`: layers of the first stage."""

    @property
    def engine(self) -> dict[str, int]:
        """What its engines are told."""
        return {"block_tokens": self.block_tokens, "max_batch_tokens": self.max_batch_tokens}


FIXED = Setting()
STEPS: dict[str, Sequence[Any]] = {"max_batch_tokens": (128, 512), "block_tokens": (16,)}
EVICTING: dict[str, Sequence[Any]] = {"spare": (0, 3), **STEPS}
KNOBS: dict[str, Mapping[str, Sequence[Any]]] = {
    "wait": STEPS,
    "recompute": EVICTING,
    "swap": EVICTING,
    "migrate": {"worth": (1.05, 2.0), **STEPS},
    "pipeline": {"cut": (5, 7), **STEPS},
}
"""System -> knob -> what is tried besides what it is fixed to. What evicts swaps, or forgets, whole sequences: `spare`
says how many."""


def tuned(knobs: Mapping[str, Sequence[Any]], p99_s: Callable[[Setting], float]) -> tuple[Setting, dict[str, float]]:
    """Return the best setting that was found, and what was tried: its P99 of TTFT."""
    best, tried = FIXED, {"as fixed": p99_s(FIXED)}
    shortest = tried["as fixed"]
    for knob, values in knobs.items():
        before = best
        for value in values:
            setting = replace(before, **{knob: value})
            took = tried[shown(setting)] = p99_s(setting)
            if took < shortest:
                best, shortest = setting, took
    return best, tried


def shown(setting: Setting) -> str:
    """Return in words where a setting is not what is fixed."""
    changed = {name: value for name, value in asdict(setting).items() if value != getattr(FIXED, name)}
    return ", ".join(f"{name}={value}" for name, value in changed.items()) or "as fixed"
