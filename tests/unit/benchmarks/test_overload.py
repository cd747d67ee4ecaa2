"""The burst that drops are measured in: traces where memory is not short are void, and all systems are one engine."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import overload

RATES = overload.Rates(capacity=1000, fit=5.0, calm=1.0, most=2.0, compute=4.0, lasts_s=2.0, ttft_s=0.1)


@pytest.mark.parametrize(
    ("share", "most", "a_second", "void"),
    [(0.6, 1.5, 2, False), (0.59, 1.5, 2, True), (0.9, 0.9, 2, True), (0.9, 1.5, 5, True)],
)
def test_a_trace_in_which_memory_is_not_what_is_short_is_void(
    share: float, most: float, a_second: int, void: bool
) -> None:
    played: Any = SimpleNamespace(needs=(0.5, most), queue_share=share, ttft=[], tpot=[])
    request: Any = None
    arrivals = [overload.Arrival(number / a_second, "calm", request) for number in range(1, 20 * a_second + 1)]
    assert overload.conditions(overload.Figures([played] * 3), RATES, [arrivals])["void"] is void


def test_all_systems_have_the_same_ranks_memory_and_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, tuple[Any, ...]] = {}
    name = ""

    @contextmanager
    def fleet(path: Path, cores: Any, *, place: str, engine: dict[str, Any], policy: Any) -> Any:
        made[name] = path, cores, place, {k: v for k, v in engine.items() if k != "step_budget"}
        instances = [SimpleNamespace(name=f"r{number}") for number in range(len(cores))]
        yield SimpleNamespace(status=lambda: SimpleNamespace(instances=instances), drop=lambda layers: None)

    monkeypatch.setattr(overload, "fleet", fleet)
    monkeypatch.setattr(overload, "warm_up", lambda engine: None)
    for name in (*overload.SYSTEMS, *overload.ABLATION):
        with overload.system(name, Path("model")):
            pass
    assert len(made) == len(overload.SYSTEMS) + len(overload.ABLATION)
    assert all(about == made["wait"] for about in made.values())
