"""Result files side by side, and drawn."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.bench.replay.open_loop import replay
from elastic.bench.replay.timeline import EngineState
from elastic.bench.report import plots
from elastic.bench.report.compare import Result, read_results, rows, warnings
from elastic.bench.report.plots import arrivals_per_second, cdf, draw, layer_states, tpots, ttfts
from elastic.bench.report.summary import summarize
from elastic.bench.traces.generator import Fixed, Poisson, generate
from elastic.bench.traces.prompts import random_prompts
from elastic.config import SLO
from elastic.errors import BackendUnavailable, ConfigError
from support.serving.fake_engine import FakeEngine


def summary(ttft: float = 10.0, **ours: Any) -> dict[str, Any]:
    plain = {"trace": {"workload_sha256": "w"}, "offered": 4, "slo_attainment": 0.5, "slo": None}
    return {"duration": 1.0, "completed": 4, "failed": 0, "p95_ttft_ms": ttft, "elastic": plain | ours}


def write(tmp_path: Path, name: str, content: Any) -> Path:
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(content))
    return path


def test_values_stand_beside_their_ratio_to_the_first_file(tmp_path: Path) -> None:
    paths = [write(tmp_path, "full", summary(100.0)), write(tmp_path, "elastic", summary(25.0, slo_attainment=1.0))]
    table = rows(read_results(paths))
    assert table[0] == ["", "full", "elastic"]
    by_label = {row[0]: row[1:] for row in table}
    assert by_label["TTFT P95 ms"] == ["100", "25 (0.25x)"]
    assert by_label["SLO attainment %"] == ["50", "100 (2.00x)"]
    assert "TPOT P95 ms" not in by_label, "none of the files has it"


def test_shares_of_precision_and_gaps_are_shown() -> None:
    results = [
        Result("a", summary(token_share_by_variant={"float32": 0.75, "int4": 0.25})),
        Result("b", summary(token_share_by_variant={"float32": 1.0}, preemptions=0)),
    ]
    by_label = {row[0]: row[1:] for row in rows(results)}
    assert by_label["tokens in int4 %"] == ["25.0", "-"]
    assert by_label["preemptions"] == ["-", "0"]


def test_a_reader_is_told_what_spoils_a_comparison() -> None:
    results = [
        Result("a", summary(errors={"refused": 1, "HTTP 500": 3}, shorter=4) | {"failed": 4}),
        Result("b", summary(over_saturated=True, interrupted=True, trace={"workload_sha256": "other"})),
    ]
    told = "\n".join(warnings(results))
    for words in (
        "not offered the same",
        "b is over-saturated",
        "b was interrupted",
        "a: 4 requests were not completed; latencies leave them out; 3 of them: HTTP 500",
        "a: 4 answers were shorter than was asked for",
    ):
        assert words in told
    assert warnings([Result("a", summary())]) == []


def test_files_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    paths = [write(tmp_path, "same", summary()), write(tmp_path / "x", "same", summary())]
    assert [r.name for r in read_results(paths)] == [str(p) for p in paths]


@pytest.mark.parametrize(
    "text",
    [
        *("not json", "[]", "{}", '{"elastic": {}}', '{"elastic": 3, "duration": 1}'),
        '{"elastic": {"trace": []}, "duration": 1}',
        '{"elastic": {"trace": {"workload_sha256": [1]}}, "duration": 1}',
        '{"elastic": {"token_share_by_variant": [1]}, "duration": 1}',
        '{"elastic": {"errors": ["HTTP 500"]}, "duration": 1}',
        '{"elastic": {"errors": {"HTTP 500": "x"}}, "duration": 1}',
        '{"elastic": {"token_share_by_variant": {"int4": "x"}}, "duration": 1}',
    ],
)
def test_what_is_no_result_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json is no"):
        read_results([path])
    with pytest.raises(ConfigError, match=r"nowhere\.json cannot be read"):
        read_results([tmp_path / "nowhere.json"])


@pytest.fixture
def real() -> Callable[..., Result]:
    def make(name: str, *, detailed: bool = True, timeline: bool = True) -> Result:
        trace = generate(Poisson(200), Fixed(4, 3), 0.2)
        engine = FakeEngine(step_s=0.001)
        engine.start()
        run = replay(engine, trace, random_prompts(trace, 50), SLO(1.0, 0.1))
        engine.stop()
        shown = summarize(run, detailed=detailed)
        states = [EngineState(0.1 * i, 0, 1, i, 4, {"float32": 4 - i, "int4": i}) for i in range(3)]
        shown["elastic"]["state_timeline"] = [s.__dict__ for s in states] if timeline else []
        return Result(name, json.loads(json.dumps(shown)))

    return make


@pytest.mark.slow
def test_a_picture_is_drawn_of_one_file_or_many(real: Callable[..., Result], tmp_path: Path) -> None:
    for number in (1, 3):
        path = tmp_path / f"{number}.png"
        draw([real(f"run {i}", timeline=i != 2) for i in range(number)], path)
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_picture_needs_arrays_and_a_place_to_go(real: Callable[..., Result], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="short has no arrays to draw; run it with --save-detailed"):
        draw([real("short", detailed=False)], tmp_path / "x.png")
    with pytest.raises(ConfigError, match="cannot be written"):
        draw([real("run")], tmp_path / "no" / "x.png")


def test_without_matplotlib_the_extra_is_named(
    real: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'elastic-llm\[plot\]'"):
        draw([real("run")], tmp_path / "x.png")


@pytest.mark.parametrize(
    "change",
    [
        lambda summary: summary.update(start_times=5),
        lambda summary: summary.update(ttfts=[]),
        lambda summary: summary["elastic"].update(state_timeline=None),
        lambda summary: summary["elastic"].update(state_timeline=[{}]),
        lambda summary: summary["elastic"]["state_timeline"][1].update(layers=None),
        lambda summary: summary.update(itls=[["a"]] * len(summary["itls"])),
        lambda summary: summary["elastic"].update(slo={"ttft_s": 1.0}),
    ],
)
def test_arrays_that_cannot_be_drawn_are_refused_in_words(
    change: Callable[[dict[str, Any]], object], real: Callable[..., Result], tmp_path: Path
) -> None:
    other = real("other")
    change(other.summary)
    words = r"^other: what is drawn of it is not as --save-detailed writes it \(.*\); run it anew with it$"
    with pytest.raises(ConfigError, match=words):
        draw([real("good"), other], tmp_path / "x.png")


@pytest.mark.slow
def test_a_fault_of_the_drawing_is_not_a_files(
    real: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise TypeError("no")

    monkeypatch.setattr(plots, "_arrivals", fail)
    with pytest.raises(TypeError, match="no"):
        draw([real("good")], tmp_path / "x.png")


def test_what_is_drawn_is_what_was_measured() -> None:
    arrays = {
        "start_times": [0.0, 0.5, 3.5, 4.0],
        "ttfts": [0.25, 0.0, 0.5, 1.0],
        "itls": [[0.1, 0.3], [], [], [0.2]],
        "output_lens": [3, 0, 1, 2],
    }
    result = Result("r", summary() | arrays)
    assert arrivals_per_second(result) == ([2.0, 0.0, 0.0, 1.0, 1.0], 1.0)
    assert ttfts(result) == [(0.0, 0.25), (3.5, 0.5), (4.0, 1.0)], "one got no token"
    assert tpots(result) == pytest.approx([200.0, 200.0])
    states = [{"t_s": 1, "layers": {"float32": 3, "int4": 2, "int8": 1}}]
    assert layer_states(Result("r", {"elastic": {"state_timeline": states}})) == [(1.0, 3)]


@given(st.lists(st.floats(0, 100), max_size=30))
def test_a_cdf_counts_what_is_no_larger(sample: list[float]) -> None:
    for value, share in zip(*cdf(sample), strict=True):
        assert sum(x < value for x in sample) < share * len(sample) + 1e-9
        assert share * len(sample) <= sum(x <= value for x in sample) + 1e-9
    assert len(cdf(sample)[0]) == len(sample)
