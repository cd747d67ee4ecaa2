"""The burst that drops are measured in: traces where memory is not short are void, all systems are one engine, and
baselines are tuned on what does not count."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))

import bursts
import evicting
import overload
import tuning
from common import Kept
from tuning import FIXED, KNOBS, Setting

from elastic.bench.traces.trace import Trace, TraceRequest
from elastic.cluster.fleet.planning import balance
from elastic.errors import ConfigError
from elastic.sim.core.evicting import OptimisticBlocks

RATES = bursts.Rates(capacity=1000, fit=5.0, calm=1.0, most=2.0, compute=4.0, lasts_s=2.0, ttft_s=0.1)


@pytest.mark.parametrize(
    ("share", "most", "a_second", "void"),
    [(0.6, 1.5, 2, False), (0.59, 1.5, 2, True), (0.9, 0.9, 2, True), (0.9, 1.5, 5, True)],
)
def test_a_trace_in_which_memory_is_not_what_is_short_is_void(
    share: float, most: float, a_second: int, void: bool
) -> None:
    played: Any = SimpleNamespace(needs=(0.5, most), queue_share=share, ttft=[], tpot=[])
    request: Any = None
    arrivals = [bursts.Arrival(number / a_second, "calm", request) for number in range(1, 20 * a_second + 1)]
    assert overload.conditions(overload.Figures([played] * 3), RATES, [arrivals])["void"] is void


Cost = Callable[[Setting], float]
SPARE_IS_WRONG: Cost = lambda setting: 9.0 if setting.spare else 5.0  # noqa: E731
BOTH_COUNT: Cost = lambda setting: setting.max_batch_tokens / 512 - (setting.block_tokens == 16)  # noqa: E731


@pytest.mark.parametrize(
    ("cost", "best"),
    [
        (lambda setting: 1.0, FIXED),
        (SPARE_IS_WRONG, replace(FIXED, spare=0)),
        (BOTH_COUNT, replace(FIXED, max_batch_tokens=128, block_tokens=16)),
    ],
)
def test_the_best_of_what_was_tried_is_taken_and_of_equal_ones_the_first(cost: Cost, best: Setting) -> None:
    found, tried = tuning.tuned(KNOBS["swap"], cost)
    assert found == best
    assert min(tried.values()) == cost(best) == tried[tuning.shown(best)]
    assert len(tried) == 1 + sum(map(len, KNOBS["swap"].values()))


def test_no_baseline_is_tuned_on_a_trace_that_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, list[list[tuple[float, int]]]] = {"tuning": [], "rounds": []}
    settings: list[tuple[str, Setting]] = []

    def played(row: overload.Row, name: str, round_: int, setting: Setting = FIXED) -> Any:
        arrivals = [(arrival.at_s, arrival.request.max_tokens) for arrival in row.trace(round_)]
        seen[part].append(arrivals)
        settings.append((name, setting))
        return SimpleNamespace(ttft=[1.0 + (setting == FIXED)])

    monkeypatch.setattr(overload.Row, "play", played)
    file = tmp_path / "trace.csv"
    file.write_text(
        "Timestamp,Request tokens,Response tokens\n"
        + "".join(f"{n / 5},{20 + n % 7},{10 + n % 3}\n" for n in range(600))
    )
    for recorded in (None, bursts.RecordedTrace(file)):
        seen.update(tuning=[], rounds=[])
        part, row = "tuning", overload.Row("burst", Path("model"), RATES, Kept(None), False, recorded)
        chosen = row.tuned(overload.SYSTEMS, calibrations=2)
        assert set(chosen) == {*overload.SYSTEMS} - {"drop"}
        assert all(setting != FIXED for setting in chosen.values())
        assert not any(setting != FIXED for name, setting in settings if name == "drop")
        part = "rounds"
        for round_ in range(5):
            row.play("wait", round_)
        assert not [arrivals for arrivals in seen["tuning"] if arrivals in seen["rounds"]]
        assert row.tuned(overload.SYSTEMS, calibrations=0) == {}


def test_a_recorded_trace_is_scaled_to_the_memory_and_keeps_its_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has 8 s in which one request comes a second and then ten, again and again; all stretches are alike."""
    times = [8 * k + at_s for k in range(60) for at_s in (*range(4), *(4 + n / 10 for n in range(40)))]
    whole = Trace(tuple(TraceRequest(float(at_s), 900, 300) for at_s in times), "x")
    monkeypatch.setattr(bursts, "read_trace", lambda path: whole)
    for calm in (0.3, 9.0):
        rates = replace(RATES, calm=calm, capacity=10_000, fit=50.0)
        arrivals = bursts.RecordedTrace(Path("x")).trace(rates, 0)
        found = [arrival for arrival in arrivals if arrival.part == "trace"]
        held = sum(bursts.need(arrival.request) * arrival.request.max_tokens for arrival in found)
        expected = calm * bursts.held_when_drawn() * bursts.TIMES * rates.lasts_s
        assert held == pytest.approx(expected, abs=0.51 * 200 * 50), "half a request off, at the most"
        assert sum(map(rates.work, arrivals)) == pytest.approx(len(found), rel=0.01)
        assert sum(bursts.need(arrival.request) for arrival in found) / len(found) == pytest.approx(200, rel=0.01)
        assert sum(arrival.at_s >= 4 for arrival in found) / len(found) == pytest.approx(40 / 44, abs=0.1)
        assert len(arrivals) - len(found) == round(bursts.CALM * rates.fit)
    with pytest.raises(ConfigError, match="times too few requests in 8 s"):
        bursts.RecordedTrace(Path("x")).trace(replace(rates, calm=30.0), 0)
    monkeypatch.setattr(bursts, "read_trace", lambda path: Trace(whole.requests[:60], "x"))
    with pytest.raises(ConfigError, match="no two stretches of 8 s"):
        bursts.RecordedTrace(Path("x")).trace(rates, 0)


def test_a_setting_reaches_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    setting, seen = Setting(16, 512, spare=3, worth=2.0, cut=5), {}
    monkeypatch.setattr(OptimisticBlocks, "spare", 1)
    monkeypatch.setattr(evicting.engine_module, "BlockManager", evicting.engine_module.BlockManager)
    monkeypatch.setattr(evicting.engine_module, "RestartingScheduler", evicting.engine_module.RestartingScheduler)
    monkeypatch.setattr(evicting.EngineReports, "begin", evicting.EngineReports.begin)

    @contextmanager
    def fleet(path: Path, cores: Any, *, engine: dict[str, Any], **options: Any) -> Any:
        seen.update(engine=engine)
        instances = [SimpleNamespace(name=f"r{number}") for number in range(len(cores))]
        yield SimpleNamespace(
            status=lambda: SimpleNamespace(instances=instances), drop=lambda layers: seen.update(layers)
        )

    monkeypatch.setattr(overload, "fleet", fleet)
    monkeypatch.setattr(overload, "warm_up", lambda engine: None)
    with overload.system("pipeline", Path("model"), setting=setting):
        assert (seen["engine"]["block_tokens"], seen["engine"]["max_batch_tokens"]) == (16, 512)
        assert (seen["r0"], seen["r1"]) == (range(5, 12), range(5))
    with overload.system("migrate", Path("model"), setting=setting):
        assert balance.WORTH == 2.0
    assert FIXED.worth == balance.WORTH
    with overload.system("swap", Path("model"), setting=setting):
        install, args = seen["engine"]["step_budget"].__reduce__()
        install(*args)
        assert OptimisticBlocks.spare == 3


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


def test_what_a_drop_spares_is_held_against_the_best_of_the_others() -> None:
    def figures(late: int) -> Any:
        told = {"tokens_per_s": 1.0, "queue_share": 0.0, "burst_ttft": [], "windows": [], "answers": []}
        return overload.Figures([SimpleNamespace(ttft=[9.0] * late + [1.0] * (10 - late), tpot=[0.1], **told)])

    others = {"wait": figures(4), "pipeline": figures(1), "drop-default": figures(0)}
    assert overload.compared({**others, "drop": figures(0)})["fewer_than_best_other"]["over_5_times_best_p50"] == 0.1
    assert overload.compared({**others, "drop": figures(2)})["fewer_than_best_other"]["over_5_times_best_p50"] == -0.1
