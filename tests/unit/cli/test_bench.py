"""`elastic bench`: a run against a server, one against a model, a comparison, and what the caller must change."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import elastic.cli.bench
from elastic.assets import MODEL_DIR
from elastic.cli.main import main
from support.bench.records import read_records
from support.child_process import Forked, in_fork
from support.processes import wait_until
from support.serving.stub_server import Handler, stub

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{s:02d}.0000000,{100 + s},{10 + s}\n" for s in range(10)
)


@pytest.mark.slow
def test_a_trace_is_replayed_to_a_server_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(AZURE)
    outs = [tmp_path / "one.json", tmp_path / "two.json"]
    with stub() as server:
        for out in outs:
            arguments = ["--url", server.url, "--trace", str(trace), "--window", "2:8", "--rate-scale", "40"]
            arguments += ["--rate-method", "stretch", "--token-scale", "0.1", "--slo-ttft", "20", "--seed", "3"]
            arguments += ["--out", str(out), "--records", str(tmp_path / "records.jsonl"), "--save-detailed"]
            assert main(["bench", "run", *arguments]) == 0
    shown = capsys.readouterr()
    assert "TTFT P95 ms" in shown.out
    assert "note:" not in shown.err
    summary = json.loads(outs[0].read_text())
    assert summary["completed"] == 6
    assert summary["input_lens"] == [10, 10, 10, 10, 11, 11]
    described = summary["elastic"]["trace"]
    assert (described["file"], described["window"]) == ("azure.csv", [2.0, 8.0])
    assert (described["rate_scale"], described["pace"], described["kept"]) == (40.0, 40.0, 1.0)
    assert described["token_scale"] == 0.1
    assert described["seed"] == 3
    assert [r.arrival_s for r in read_records(tmp_path / "records.jsonl")] == [i / 40 for i in range(6)]
    picture = tmp_path / "x.png"
    assert main(["bench", "compare", *map(str, outs), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "1.00x" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (["--poisson", "100"], "Poisson(rate=100.0)"),
        (["--gamma", "100:0.5"], "Gamma(rate=100.0, burstiness=0.5)"),
        (["--on-off", "100:50:0.1:0.1"], "OnOff(on_rate=100.0"),
        (["--ramp", "50:100"], "Ramp(first_rate=50.0, last_rate=100.0, over_s=0.2)"),
        (["--poisson", "100", "--lengths", "5:0.1:2:0.1"], "Lognormal(prompt_median=5.0"),
    ],
)
def test_generated_arrivals_are_named_in_the_result(source: list[str], words: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    lengths = [] if "--lengths" in source else ["--lengths", "5:2"]
    with stub() as server:
        assert (
            main(["bench", "run", "--url", server.url, *source, *lengths, "--duration", "0.2", "--out", str(out)]) == 0
        )
    summary = json.loads(out.read_text())
    assert words in summary["elastic"]["trace"]["file"]
    assert summary["completed"] == summary["elastic"]["offered"] > 0
    assert "ttfts" not in summary


@pytest.mark.slow
def test_a_model_is_served_and_measured_in_this_process(tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_text("import os\nfor name in os.listdir():\n    print(name)\n" * 40)
    out, records = tmp_path / "out.json", tmp_path / "records.jsonl"
    arguments = ["--model", str(MODEL_DIR), "--place", "cpu#bench=256MiB", "--prompts", str(text), "--prepack"]
    arguments += ["--poisson", "20", "--duration", "0.3", "--lengths", "2000:9", "--slo-ttft", "60"]
    assert main(["bench", "run", *arguments, "--out", str(out), "--records", str(records)]) == 0
    summary = json.loads(out.read_text())
    described = summary["elastic"]["trace"]
    assert described["most_tokens"] == 1024, "the model's context"
    assert described["clipped_requests"] == described["requests"] == summary["completed"]
    assert summary["elastic"]["token_share_by_variant"] == {"float32": 1.0}
    assert 0 <= summary["elastic"]["queueing_kv_share"] <= 1
    assert summary["elastic"]["kv_use"]["max"] is not None
    assert any(
        state["kv_used_bytes"] for state in summary["elastic"]["state_timeline"]
    )  # maybe later: kernels are made
    for record in read_records(records):
        assert record.scheduled_s is not None
        assert record.submitted_s is not None
        assert record.arrival_s <= record.submitted_s <= record.scheduled_s <= record.token_times_s[0]
        assert len(record.tokens) == record.asked_tokens


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--trace", "/nowhere.csv"], "trace /nowhere.csv cannot be read"),
        (["--poisson", "fast"], "--poisson fast: RATE is needed, in numbers"),
        (["--gamma", "5"], "--gamma 5: RATE:BURSTINESS is needed, in numbers"),
        (["--on-off", "1:2:3"], "--on-off 1:2:3: ON:OFF:ON_S:OFF_S is needed"),
        (["--ramp", "1"], "--ramp 1: FIRST:LAST is needed"),
        (["--poisson", "-1"], "rate of Poisson arrivals, -1.0, must be above 0"),
        (["--poisson", "5", "--window", "1:2"], "--window is of a --trace"),
        (["--poisson", "5", "--lengths", "long"], "--lengths long: PROMPT:OUTPUT is needed"),
        (["--poisson", "5", "--rate-scale", "2"], "thinning only takes requests away"),
        (["--poisson", "5", "--token-scale", "0"], "token scale 0.0 must be above 0"),
        (["--trace", "x", "--duration", "5"], "--duration is of generated requests; cut a --trace by --window A:B"),
        (["--trace", "x", "--lengths", "5:2"], "--lengths is of generated requests"),
        (["--poisson", "5", "--prompts", "x", "--vocabulary", "9"], "--vocabulary is of random tokens"),
        (["--poisson", "5", "--save-detailed"], "--save-detailed is of the file of the result; give --out FILE"),
        (["--poisson", "5", "--tokenizer", "x"], "--tokenizer cuts prompts from a text; give --prompts FILE"),
        (["--poisson", "5", "--max-queue", "3"], "--max-queue is of a model that is served here"),
        (["--poisson", "5", "--policy", "balanced"], "--policy is of a model that is served here"),
        (["--poisson", "5", "--variants", "int4"], "--variants is of a model that is served here"),
        (["--poisson", "5", "--prepack"], "--prepack is of a model that is served here"),
        (["--poisson", "5", "--prompts", "x"], "--prompts with --url needs --tokenizer"),
        (["--poisson", "5", "--out", "/no/where/x.json"], "--out /no/where/x.json: there is no such directory"),
        (["--poisson", "5", "--timeout", "0"], "timeout_s 0.0 must be above 0"),
        (["--poisson", "5", "--timeout", "inf"], "timeout_s inf must be above 0 and finite"),
        (["--poisson", "5", "--most-tokens", "0"], "most tokens 0 leaves no room"),
        (["--poisson", "5", "--vocabulary", "0"], "a vocabulary of 0 tokens"),
        (["--poisson", "5", "--out", ""], "--out '' is no file to write to"),
        (["--poisson", "5", "--records", "/"], "--records '/' is no file to write to"),
        (["--poisson", "5", "--served-model-name", ""], "model='' is empty"),
        (["--poisson", "5", "--prompts", __file__, "--tokenizer", ""], "--tokenizer : no tokenizer there"),
        (["--poisson", "5", "--prompts", "/bin/sh", "--tokenizer", "x"], "--prompts /bin/sh is not UTF-8 text"),
        (["--poisson", "5", "--lengths", "nan:3"], "--lengths nan:3: PROMPT:OUTPUT is needed, in numbers"),
        (["--poisson", "5", "--lengths", "2.5:3"], "--lengths 2.5:3: tokens are whole numbers"),
        (["--poisson", "1e300"], "the rate of Poisson arrivals, 1e+300, must be at most 1,000,000"),
        (["--ramp", "0:1e300"], "the highest rate of a ramp, 1e+300, must be at most 1,000,000"),
        (["--gamma", "5:1e-300"], "burstiness 1e-300 must be at least 0.001"),
        (["--trace", ""], "trace='' cannot be; it must be a path"),
        (["--poisson", "5"], "GET /v1/models does not tell"),
    ],
)
def test_what_the_caller_must_change(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "run", "--url", "http://127.0.0.1:9", *arguments]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.startswith("elastic bench: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("url", ["http://[::1", "http://host:port", "127.0.0.1:9", "file:///etc", "http://", ""])
def test_a_url_that_nothing_can_be_sent_to_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also with the name of a model, where the server is not asked for it."""
    for more in ([], ["--served-model-name", "x", "--warmup", "0"]):
        assert main(["bench", "run", "--url", url, "--poisson", "5", "--duration", "1", *more]) == 2
        assert capsys.readouterr().err == (
            f"elastic bench: --url {url!r} is no address of a server; write http://127.0.0.1:8000\n"
        )


def test_a_run_of_which_nothing_came_fails_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(handler: Handler, body: dict[str, Any]) -> None:
        handler.reply(404, {"error": {"message": "no such model"}})

    out = tmp_path / "out.json"
    arguments = ["--poisson", "50", "--duration", "0.1", "--lengths", "2:2", "--warmup", "0", "--out", str(out)]
    with stub(refuse) as server:
        assert main(["bench", "run", "--url", server.url, *arguments]) == 1
    failed = json.loads(out.read_text())["failed"]
    assert f"; {failed} of them: HTTP 404: no such model\n" in capsys.readouterr().err


def test_files_of_a_comparison_are_told_apart_however_many_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    figures = {"duration": 1.0, "completed": 3, "elastic": {"offered": 123_456_789}}
    files = [tmp_path / f"a result of a long name {number}.json" for number in range(12)]
    for file in files:
        file.write_text(json.dumps(figures))
    assert main(["bench", "compare", *map(str, files)]) == 0
    header, *table = capsys.readouterr().out.splitlines()[1:]
    assert all(file.stem in header for file in files)
    assert next(line for line in table if "offered" in line).count("123,456,789") == len(files)


def test_a_model_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "run", "--model", "/nowhere", "--poisson", "5"]) == 2
    assert "--model /nowhere: no model there" in capsys.readouterr().err
    assert main(["bench", "run", "--model", "/nowhere", "--poisson", "5", "--served-model-name", "x"]) == 2
    assert "--served-model-name is of a server; give --url in place of --model" in capsys.readouterr().err


def test_an_interrupted_run_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from contextlib import contextmanager

    @contextmanager
    def interrupting(total: int) -> Any:
        def show(ended: int, submitted: int) -> None:
            if ended:
                raise KeyboardInterrupt

        yield show

    monkeypatch.setattr(elastic.cli.bench, "choose_progress", lambda: interrupting)
    out = tmp_path / "out.json"
    arguments = ["--poisson", "20", "--duration", "60", "--lengths", "2:2", "--out", str(out)]
    with stub() as server:
        assert main(["bench", "run", "--url", server.url, *arguments]) == 130
    summary = json.loads(out.read_text())
    assert summary["elastic"]["interrupted"] is True
    assert summary["completed"] >= 1
    assert summary["elastic"]["offered"] < summary["elastic"]["trace"]["requests"]
    assert "note: out was interrupted" in capsys.readouterr().err


def command(*arguments: str) -> Forked:
    """A run that a test may have to end."""
    return Forked(f"import sys; from elastic.cli.main import main; sys.exit(main({['bench', 'run', *arguments]}))")


@pytest.mark.slow
def test_a_trace_that_begins_late_is_replayed_at_once(tmp_path: Path) -> None:
    trace, out = tmp_path / "mooncake.jsonl", tmp_path / "out.json"
    rows = [{"timestamp": 1_780_000_000 + 50 * i, "input_length": 3, "output_length": 2} for i in range(4)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with stub() as server:
        child = command("--url", server.url, "--trace", str(trace), "--warmup", "0", "--out", str(out))
        try:
            assert child.wait() == 0
        finally:
            child.close()
    summary = json.loads(out.read_text())
    assert summary["completed"] == 4
    assert summary["elastic"]["trace"]["offset_s"] == 1_780_000.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_run_that_a_signal_ends_writes_what_there_is(number: signal.Signals, tmp_path: Path) -> None:
    out, records = tmp_path / "out.json", tmp_path / "records.jsonl"
    arguments = ["--poisson", "20", "--duration", "600", "--lengths", "2:2", "--warmup", "0"]
    with stub() as server:
        child = command("--url", server.url, *arguments, "--out", str(out), "--records", str(records))
        try:
            wait_until(lambda: len(server.bodies) >= 3)
            child.send_signal(number)
            error = child.stderr.read().decode()
            assert child.wait() == 128 + number, error
        finally:
            child.close()
    summary = json.loads(out.read_text())
    assert summary["elastic"]["interrupted"] is True
    assert summary["elastic"]["offered"] == len(read_records(records)) >= 3
    assert "note: out was interrupted" in error


@pytest.mark.slow
def test_a_signal_before_the_run_ends_it_with_its_exit_code() -> None:
    code = """
    import signal
    import elastic.cli.bench
    from elastic.cli.main import main
    elastic.cli.bench.make_trace = lambda *_: signal.raise_signal(signal.SIGTERM)
    assert main(["bench", "run", "--url", "http://127.0.0.1:9", "--poisson", "5"]) == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    """
    in_fork(code)


def test_a_comparison_leaves_open_what_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name, shares in (("a", None), ("b", {"int4": 0.25})):
        paths.append(tmp_path / f"{name}.json")
        ours = {"offered": 4, "token_share_by_variant": shares}
        paths[-1].write_text(json.dumps({"duration": 1.0, "completed": 3, "elastic": ours}))
    assert main(["bench", "compare", *map(str, paths)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "tokens in int4" in line)
    assert "25.0" in line


def test_tables_need_no_rich(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"duration": 1.0, "completed": 3, "elastic": {"offered": 4}}))
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["bench", "compare", str(path), str(path)]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()][1] == ["offered", "4", "4", "(1.00x)"]
