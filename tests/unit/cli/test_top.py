"""`elastic top`: what it shows of a server, and what it says of one that gives none of it."""

from __future__ import annotations

import io
import itertools
import json
import signal
import threading
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from elastic.cli import top
from elastic.cli.main import main
from elastic.cli.views.dashboard import LEVELS, KVUsageSample, frame, layers, sample, sparkline
from elastic.cli.views.status_client import NoAnswer, ask, base_url
from elastic.cli.views.status_document import NotAStatus, StatusDocument, read_status
from elastic.errors import ConfigError
from elastic.types import Drop, Fetch, LayerPages, SharedFile, WeightsSource
from support.child_process import Forked
from support.serving.status_documents import VARIANTS, document, events, fleet_document, serving, status, traffic


@pytest.fixture(autouse=True)
def directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


def drawn(picture: Any, width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(picture)
    return console.export_text()


def shown(width: int = 100, **changes: Any) -> str:
    seen = read_status(document(**changes))
    return drawn(frame(seen, [sample(seen)], "http://here"), width)


def test_a_document_is_read_into_the_records_that_it_was_made_of() -> None:
    seen = read_status(document())
    assert (seen.status, seen.events, seen.traffic, seen.layers) == (status(), events(), traffic(), VARIANTS)
    assert seen.controller is not None
    assert seen.controller.faults[0].text == "OSError: gone"


def test_a_frame_has_everything() -> None:
    text = shown()
    for words in (
        "stdlib-2.6m at http://here: serving, up 1:02:05",
        "running    17 ",
        "waiting    3, for 250 ms",
        "tokens/s   432.1",
        "1,200 of 1,234",
        "8 rejected, 1 failed",
        "2 preempted, 9 stalled",
        "TTFT    150  500 1,500    40",
        "TPOT   25.0 50.0  60.0    40",
        "ITL       -    -     -     0",
        "KV cache: at most 512.00 MiB",
        "300.00 MiB",
        "75% of the capacity used",
        "██844±·█",
        "█ float16: 3   4 int4: 2   8 int8: 1   ± float16+int4: 1   · absent: 1",
        "running, 900 ticks, 4 actions, 0.12% of the time",
        "last: pressure: KV use is high (KV .91)",
        "fault, 2 times: OSError: gone",
        "cuda:0: 1024.00 MiB in pages of 2,097,152",
        "312 pages 624.00 MiB",
        "swap layers 3-4 to int4",
        "KV use .91 for 3 looks",
        "[/by] hand",
        "0.125",
    ):
        assert words in text, text


def test_a_limit_at_the_maximum_is_said_so() -> None:
    said = document()["events"]
    said[1]["action"]["limit_bytes"] = None
    assert "KV limit max" in shown(events=said)


@pytest.mark.parametrize("width", [20, 60, 80, 200])
def test_any_terminal_is_wide_enough(width: int) -> None:
    text = shown(width)
    assert max(map(len, text.splitlines())) <= width
    assert width < 60 or "swap" in text


def test_a_model_that_is_not_wrapped_has_requests_only() -> None:
    text = shown(status=None, layers=[], events=[], controller=None)
    assert "running    17" in text
    assert "actions are called by hand" in text
    assert "KV cache" not in text
    assert "controller: not started; by hand" in shown(controller={"last_reason": "by hand"})


def test_layers_are_cells() -> None:
    text = drawn(layers(["bfloat16"] * 60 + ["int3"] * 18 + ["2:4", "ffn75"]), 60)
    assert "█" * 56 + " │\n│ " + "█" * 4 + "3" * 18 + "pp" in text
    assert "80 layers" in text


def test_a_sparkline_is_the_last_minute() -> None:
    history = [
        KVUsageSample(900.0, 1.0),
        KVUsageSample(970.0, 0.0),
        KVUsageSample(985.5, 0.99),
        KVUsageSample(985.9, 0.5),
        KVUsageSample(1000.0, 0.2),
    ]
    assert sparkline(history, 1000.0, span_s=60, width=12) == "     ▁▁▁▁██▂"
    assert sparkline([], 0.0, width=5) == "     "
    assert sparkline([KVUsageSample(1.0, 7.5)], 1.0, width=3) == f"  {LEVELS[-1]}"


def test_the_last_minute_is_kept_and_a_clock_that_goes_back_begins_anew() -> None:
    history: Any = top.deque()
    for at_s in range(200):
        top.remember(history, KVUsageSample(float(at_s), 0.5))
    assert [history[0].at_s, history[-1].at_s, len(history)] == [139.0, 199.0, 61]
    top.remember(history, KVUsageSample(100.0, 0.5))
    assert len(history) == 1


def test_one_frame_is_printed_and_needs_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []
    with serving(lambda path: (asked.append(path), (200, json.dumps(document()).encode()))[1]) as url:
        assert main(["top", url, "--once"]) == 0
        assert main(["top", url.removeprefix("http://") + "/", "--once"]) == 0
    out = capsys.readouterr().out
    assert asked == ["/elastic/status"] * 2
    assert out.count(f"stdlib-2.6m at {url}: serving") == 2


@pytest.mark.parametrize(
    ("code", "body", "words"),
    [
        (404, b"", "answers 404 to /elastic/status; is it a server of Elastic?"),
        (503, b"{}", "answers 503 to /elastic/status"),
        (200, b"<html>", "is not JSON; is it a server of Elastic?"),
        (200, b"[" * 100_000, "is not JSON"),
        (200, b"\xff\xfe\x00", "is not JSON"),
        (200, b"[]", "is not the status of a server of Elastic: the document is []"),
        (200, b"{}", "the document has no 'version'"),
        (200, json.dumps(document(version=3)).encode(), "version 3; this Elastic reads 2: update it"),
        (200, json.dumps(document(at_s=float("nan"))).encode(), "the document.at_s is nan"),
        (200, json.dumps(document(layers=[1])).encode(), "the document.layers[0] is 1"),
        (200, json.dumps(document(model=True)).encode(), "the document.model is True"),
    ],
)
def test_a_wrong_answer_is_one_line(code: int, body: bytes, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda path: (code, body)) as url:
        assert main(["top", url, "--once"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith(f"elastic top: {url}")
    assert error.count("\n") == 1


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda path: (200, b"")) as url:
        pass
    assert main(["top", url, "--once"]) == 2
    assert capsys.readouterr().err == f"elastic top: {url} cannot be reached: Connection refused\n"


@pytest.mark.parametrize(
    "url", ["", "http://", "ftp://x", "http://x:port", "http://a b", "http://x:99999", "//", "http://[::1"]
)
def test_what_is_no_address_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no address of a server"):
        base_url(url)
    assert main(["top", url]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_pace_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    for pace in ("0", "-1", "nan", "inf"):
        assert main(["top", "--every", pace]) == 2
        assert "must be at least 0.1 seconds" in capsys.readouterr().err


def test_a_server_that_goes_away_is_asked_again_and_its_last_frame_stays() -> None:
    answers = iter(
        [
            (404, b""),
            (200, json.dumps(document()).encode()),
            (500, b""),
            (200, json.dumps(document(at_s=1002.0)).encode()),
        ]
    )
    with serving(lambda path: next(answers)) as url:
        before, first, without, again = (drawn(picture) for picture in itertools.islice(top.frames(url), 4))
    assert "answers 404" in before
    assert "asked 1 times" in before
    assert "stdlib-2.6m" in first
    assert "answers 500" in without
    assert "swap layers 3-4" in without, "what was seen last"
    assert "answers" not in again
    assert "▇ 75%" in again


@pytest.mark.parametrize("terminal", ["", "xterm", "dumb"])
@pytest.mark.slow
def test_it_goes_on_until_it_is_interrupted(terminal: str) -> None:
    code = """
    import os, sys
    os.environ.update(ENVIRONMENT)
    sys.stdout.reconfigure(write_through=True)
    from elastic.cli.main import main

    sys.exit(main(["top", URL, "--every", "0.1"]))
    """
    environment = {"FORCE_COLOR": "1", "TERM": terminal} if terminal else {}
    with serving(lambda path: (200, json.dumps(document()).encode())) as url:
        child = Forked(code.replace("ENVIRONMENT", str(environment)).replace("URL", repr(url)))
        seen, said = 0, ""
        while seen < 3 and (line := child.stdout.readline().decode()):
            seen += "serving, up 1:02:05" in line
            said += line
        child.send_signal(signal.SIGINT)
        rest, error = child.stdout.read().decode(), child.stderr.read().decode()
        status = child.wait()
        child.close()
    assert (status, error, seen) == (0, "", 3)
    assert ("\x1b[?1049h" in said) == ("\x1b[?1049l" in rest) == (terminal == "xterm"), "the screen is given back"


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


def places_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, inner in items for p in places_of(inner, (*path, key)))]


PLACES = places_of(document())[1:]


def drawn_or_refused(said: Any, width: int) -> str:
    try:
        seen = read_status(said)
    except NotAStatus as error:
        return str(error)
    return drawn(frame(seen, [sample(seen)], "http://here"), width)


@given(st.lists(st.tuples(st.sampled_from(PLACES), ANY), min_size=1, max_size=3), st.integers(20, 120))
def test_whatever_a_server_says_is_drawn_or_refused(wrong: list[tuple[tuple[Any, ...], Any]], width: int) -> None:
    said = document()
    for path, value in wrong:
        inner = said
        try:
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
        except (TypeError, KeyError, IndexError):
            continue  # an earlier one replaced what was above
    text = drawn_or_refused(said, width)
    assert all(line.isprintable() for line in text.splitlines())


def test_actions_of_later_versions_are_shown() -> None:
    action = {"kind": "reshard", "layers": [1, 2], "to": "cuda:1"}
    said = document(events=[asdict(events()[0]) | {"action": action}])
    assert "reshard layers 1-2" in drawn(frame(read_status(said), [], "x"))


def test_a_fetch_is_shown_without_where_the_weights_lay() -> None:
    server = pytest.importorskip("elastic.server.routes.status")
    source = WeightsSource(SharedFile("host", 1, 2, 3), 4096, (LayerPages(1, (5, 6), 8000, "layout", 7),))
    action = server.with_kind(Fetch((1, 2), (source,)))
    assert action == {"kind": "fetch", "layers": [1, 2]}
    said = document(events=[asdict(events()[0]) | {"action": action}])
    assert "fetch layers 1-2" in drawn(frame(read_status(said), [], "x"))
    said = document(events=[asdict(events()[0]) | {"action": server.with_kind(Drop((0, 3)))}])
    assert "drop layers 0, 3" in drawn(frame(read_status(said), [], "x"))


def test_what_the_server_of_this_version_says_is_read() -> None:
    server = pytest.importorskip("elastic.server.routes.status")
    from support.serving.fake_engine import FakeEngine
    from support.serving.live_server import app_for

    seen = read_status(json.loads(json.dumps(server.document(app_for(FakeEngine()).state.serving))))
    assert isinstance(seen, StatusDocument)


def test_a_slow_server_is_not_waited_for_long() -> None:
    go = threading.Event()
    with serving(lambda path: (go.wait(60), (200, b""))[1]) as url:
        with pytest.raises(NoAnswer, match=r"does not answer within 0\.05 s|timed out"):
            ask(url, 0.05)
        go.set()


def test_the_ranks_of_a_fleet_are_shown() -> None:
    seen = read_status(fleet_document())
    text = drawn(frame(seen, [sample(seen)], "http://here"), 160)
    for words in (
        "1 of 2 ranks serve",
        "r0   serving i0              6       5       1 1,200 of 4,000     75%    0.2 cuda:0=1GiB",
        "r1   lost    -               -       -       -              -       -    9.0 it was killed [SIGKILL]",
        "4 queued, 11 moved, 3 resumed, 1,234 tokens computed again",
        "r0: 8 layers",
        "3.00 MiB",
        "1,234 tokens",
        "[b]",
    ):
        assert words in text, words
    assert "controller" not in text, "each rank has its own"
    assert sample(seen).use == 0.75


def test_a_rank_that_flips_counts_as_one_that_serves_and_keeps_its_line_in_the_grid() -> None:
    said = fleet_document()
    first = {**said["ranks"][0], "state": "flipping", "dropped": [7]}
    second = {**first, "name": "r1", "state": "serving", "dropped": []}
    instance = {**said["instances"][0], "path": ["r0"] * 7 + ["r1"]}
    seen = read_status({**said, "ranks": [first, second], "instances": [instance]})
    text = drawn(frame(seen, [sample(seen)], "http://here"), 160)
    for words in ("2 of 2 ranks serve", "r0   flipping i0", "r0 1111111·"):
        assert words in text, words


def test_a_fleet_of_one_rank_is_shown_with_what_one_model_shows() -> None:
    one = document(version=2)
    rank = {"name": "r0", "state": "serving", **{k: one[k] for k in ("layers", "status", "events", "controller")}}
    seen = read_status({**one, "ranks": [rank], "fleet_events": []})
    text = drawn(frame(seen, [sample(seen)], "http://here"), 160)
    for words in ("1 of 1 ranks serve", "KV cache: at most 512.00 MiB", "controller: running", "8 layers"):
        assert words in text


def test_documents_of_fleets_that_are_wrong_are_refused() -> None:
    good = fleet_document()
    for key, value, words in (
        ("ranks", [{"state": "serving"}], r"ranks\[0\] has no 'name'"),
        ("instances", [{"name": "i"}], r"instances\[0\] has no 'ranks'"),
        ("fleet", {"queued": "many"}, "queued is 'many'"),
        ("ranks", {}, "ranks is {}"),
    ):
        with pytest.raises(NotAStatus, match=words):
            read_status({**good, key: value})
    broken = fleet_document()
    broken["ranks"][0]["status"]["places"][0]["page_bytes"] = 0
    with pytest.raises(NotAStatus, match="page_bytes"):
        read_status(broken)
