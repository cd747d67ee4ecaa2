"""`elastic fleet`, and the options of `elastic serve` that make one."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.cli import serve
from elastic.cli.inputs.fleet_options import check_fleet, make_fleet
from elastic.cli.main import main, parser
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.fleet.lengths.controller import LengthController
from elastic.cluster.fleet.overload.controller import OverloadController
from elastic.config import Lengths, Overload
from elastic.errors import ConfigError
from support.serving.fake_fleet import FakeFleet
from support.serving.live_server import Live, live
from support.serving.status_documents import document, fleet_document, serving

TOKEN = "open sesame"


@pytest.fixture(autouse=True)
def directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("ELASTIC_TOKEN", raising=False)


@pytest.fixture
def served() -> Iterator[Live]:
    with live(FakeFleet("a", "b"), token=TOKEN, actions=True) as running:
        yield running


DROP = ("--ranks", "2", "--policy", "drop")
LENGTHS = ("--ranks", "4", "--policy", "lengths")


def options(*arguments: str) -> Any:
    return parser().parse_args(["serve", "MODEL", *arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--balance"], "--balance is for a fleet; say how many processes: --ranks N"),
        (["--policy", "drop"], "--policy drop is for a fleet of two ranks at least; say how many: --ranks N"),
        (["--policy", "lengths"], "--policy lengths is for a fleet of two ranks at least; say how many: --ranks N"),
        (["--tp", "1..2"], "--tp is for a fleet; say how many processes: --ranks N"),
        (["--ranks", "2", "--tp", "1..2"], "--tp is for instances that share their layers when requests need it"),
        ([*LENGTHS, "--tp", "2"], "--tp '2' is no range of ranks; write 1..2 or 1..4"),
        ([*LENGTHS, "--tp", "2..4"], "--tp '2..4' is no range of ranks"),
        ([*LENGTHS, "--tp", "1..3"], "most_ranks=3 cannot be; it must be a power of two"),
        ([*LENGTHS, "--tp", "1..4", "--shards", "2"], "--tp 1..4: layers are cut in 2; give --shards 4"),
        (["--exchange", "stall"], "--exchange is for a fleet"),
        (
            ["--ranks", "2", "--uncoordinated"],
            "--uncoordinated is for instances that drop layers",
        ),
        (
            [*LENGTHS, "--overload", "kv_high=.9"],
            "--overload is for instances that drop layers",
        ),
        (
            [*DROP, "--lengths", "step=2"],
            "--lengths is for instances that share their layers",
        ),
        ([*DROP, "--overload", "kv_height=.9"], "--overload 'kv_height=.9': write NAME=VALUE, each name once; there"),
        ([*DROP, "--overload", "exchange=stall"], "there are: tick_s, kv_high"),
        ([*DROP, "--overload", "most_stages"], "write NAME=VALUE"),
        ([*DROP, *["--overload", "kv_high=.9"] * 2], "each name once"),
        ([*DROP, "--overload", "most_stages=two"], "'two' is no whole number"),
        ([*DROP, "--overload", "kv_high=x"], "'x' is no number"),
        ([*DROP, "--overload", "partial=1"], "'1' is neither on nor off"),
        ([*DROP, "--overload", "kv_high=2"], "kv_high=2.0 cannot be"),
        ([*DROP, "--layers-per-step", "0"], "layers_per_step=0 cannot be"),
        ([*LENGTHS, "--layers-per-step", "0"], "layers_per_step=0 cannot be"),
        ([*LENGTHS, "--lengths", "layers_per_step=2"], "--lengths 'layers_per_step=2': write NAME=VALUE"),
        ([*LENGTHS, "--exchange", "stall"], "--exchange is for instances that drop layers"),
        (
            ["--ranks", "2", "--layers-per-step", "2"],
            "--layers-per-step is for instances that drop layers when KV runs out: --policy drop, or "
            "instances that share their layers when requests need it: --policy lengths",
        ),
        ([*LENGTHS, "--lengths", "most_ranks=4", "--tp", "1..2"], "--lengths 'most_ranks=4': write NAME=VALUE"),
        (["--key-file", "k"], "--key-file is for a fleet"),
        (["--ranks", "0"], "--ranks 0 must be at least 1"),
        (["--ranks", "2", "--launch", "join"], "--launch join needs --key-file"),
        *(
            (
                ["--ranks", "2", "--launch", "join", "--key-file", "k", *given],
                f"{given[0]} is not sent to ranks that join",
            )
            for given in (
                ["--kv-cache-dtype", "int8"],
                ["--enforce-eager"],
                ["--place", "cpu"],
                ["--variants", "int4"],
                ["--dtype", "bfloat16"],
            )
        ),
        (["--ranks", "2", "--listen", "127.0.0.1:0"], "--listen is for ranks that come by themselves"),
        (["--ranks", "2", *["--place", "cpu"] * 3], "--place, given 3 times, cannot be shared out to --ranks 2"),
        (["--ranks", "1", "--place", "gpu"], "'gpu' is not a place"),
        (["--ranks", "2", "--cores", "0"], "--cores, given 1 times, is for --ranks 2"),
        (["--ranks", "1", "--cores", "0,x"], "--cores '0,x' is no list of CPU cores; write 0,1"),
        (["--ranks", "1", "--cores", "\xb2"], "is no list of CPU cores"),
        (["--tp", "\xb2"], "is no number of ranks"),
        (["--pp", "\xb2"], "is no number of stages"),
    ],
)
def test_options_that_make_no_fleet(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_fleet(options(*arguments))
    assert words in str(error.value)


def test_options_become_those_of_a_fleet() -> None:
    def ranks(*arguments: str) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
        chosen = options(*arguments)
        check_fleet(chosen)
        fleet = make_fleet(chosen, "in-process", serve.wrap_options(chosen), None)
        wrapped = [dict(spec.wrap) for spec in fleet._specs]
        assert all("places" not in wrap and wrap["variants"] == tuple(chosen.variants) for wrap in wrapped)
        return [(tuple(spec.places), tuple(spec.cores)) for spec in fleet._specs]

    assert ranks("--ranks", "2") == [((), ()), ((), ())]
    assert ranks("--ranks", "2", "--place", "cpu=1MiB", "--variants", "int4") == [(("cpu=1MiB",), ())] * 2
    places = ["--place", "cpu#a", "--place", "cpu#b"]
    assert ranks("--ranks", "2", *places) == [(("cpu#a",), ()), (("cpu#b",), ())]
    assert ranks("--ranks", "2", "--policy", "drop", "--variants", "int4") == [((), ())] * 2
    assert ranks("--ranks", "1", *places, "--cores", "0,1") == [(("cpu#a", "cpu#b"), (0, 1))]


def test_ranks_keep_keys_and_values_in_the_dtype_that_is_said() -> None:
    for arguments, dtype in (((), "auto"), (("--kv-cache-dtype", "int8"), "int8")):
        chosen = options("--ranks", "2", *arguments)
        fleet = make_fleet(chosen, "in-process", serve.wrap_options(chosen), None)
        assert [spec.engine["kv_cache_dtype"] for spec in fleet._specs] == [dtype] * 2


def test_ranks_load_the_model_in_the_dtype_that_is_said() -> None:
    for arguments, dtype in (((), "auto"), (("--dtype", "bfloat16"), "bfloat16")):
        chosen = options("--ranks", "2", *arguments)
        fleet = make_fleet(chosen, "in-process", serve.wrap_options(chosen), None)
        assert [spec.dtype for spec in fleet._specs] == [dtype] * 2
        with pytest.raises(ConfigError, match="dtype='int4' cannot be; it must be one of auto, bfloat16"):
            Fleet(chosen.model, dtype="int4")


def test_ranks_replay_decode_steps_as_is_said() -> None:
    for arguments, said in (
        ((), (False, False)),
        (("--enforce-eager",), (True, False)),
        (("--cuda-graphs",), (False, True)),
    ):
        chosen = options("--ranks", "2", *arguments)
        fleet = make_fleet(chosen, "in-process", serve.wrap_options(chosen), None)
        told = [(spec.engine["enforce_eager"], spec.engine["cuda_graphs"]) for spec in fleet._specs]
        assert told == [said] * 2


def test_the_policy_of_lengths_has_each_rank_cut_its_layers() -> None:
    def chosen(*arguments: str) -> tuple[Any, list[Any]]:
        given = options(*LENGTHS, *arguments)
        check_fleet(given)
        fleet = make_fleet(given, "in-process", serve.wrap_options(given), None)
        (policy,) = [each for each in fleet._policies._threads if isinstance(each, LengthController)]
        return policy._settings, [spec.wrap["shards"] for spec in fleet._specs]

    assert chosen() == (Lengths(), [4] * 4)
    assert chosen("--tp", "1..2") == (Lengths(most_ranks=2), [4] * 4)
    assert chosen("--tp", "1..2", "--policy", "drop,lengths", "--overload", "margin=0.2") == chosen("--tp", "1..2")
    assert chosen("--tp", "1..2", "--shards", "2") == (Lengths(most_ranks=2), [2] * 4)
    assert chosen("--tp", "1..8") == (Lengths(most_ranks=8), [8] * 4)
    assert chosen("--tp", "1..2", "--shards", "8") == (Lengths(most_ranks=2), [8] * 4)
    numbers = ("--lengths", "patience_s=3", "--lengths", "step=4")
    assert chosen(*numbers) == (Lengths(patience_s=3.0, step=4), [4] * 4)
    assert chosen("--layers-per-step", "2") == (Lengths(layers_per_step=2), [4] * 4)
    assert chosen("--layers-per-step", "2", "--tp", "1..2", "--policy", "drop,lengths") == (
        Lengths(most_ranks=2, layers_per_step=2),
        [4] * 4,
    )
    assert chosen("--tp", "1..4", *numbers) == (Lengths(patience_s=3.0, step=4, most_ranks=4), [4] * 4)
    assert serve.wrap_options(options("--shards", "2"))["shards"] == 2
    assert "shards" not in serve.wrap_options(options())


def test_ranks_prepack_their_weights_where_that_is_asked_for() -> None:
    given = options("--ranks", "2", "--prepack")
    check_fleet(given)
    fleet = make_fleet(given, "in-process", serve.wrap_options(given), None)
    assert [spec.wrap["prepack"] for spec in fleet._specs] == [True] * 2
    assert "prepack" not in serve.wrap_options(options())
    given = options("--ranks", "2", "--prepack", "--policy", "drop")
    with pytest.raises(ConfigError, match="weights are plain"):
        make_fleet(given, "in-process", serve.wrap_options(given), None)


def test_the_policy_of_drops_has_its_numbers() -> None:
    def chosen(*arguments: str) -> tuple[Any, str]:
        given = options(*DROP, *arguments)
        check_fleet(given)
        fleet = make_fleet(given, "in-process", serve.wrap_options(given), None)
        (policy,) = [each for each in fleet._policies._threads if isinstance(each, OverloadController)]
        return policy._settings, fleet._groups.ranks._bulk

    assert chosen() == (Overload(), "sockets")
    assert chosen("--exchange", "stall", "--uncoordinated", "--layers-per-step", "3", "--bulk", "nixl") == (
        Overload(exchange="stall", coordinated=False, layers_per_step=3),
        "nixl",
    )
    numbers = ("--overload", "kv_high=.9", "--overload", "most_stages=2", "--overload", "partial=off")
    assert chosen(*numbers, "--overload", "lookahead = on")[0] == Overload(
        kv_high=0.9, most_stages=2, partial=False, lookahead=True
    )


def test_how_layers_change_their_rank_is_said(served: Live, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    given = ["--token-file", str(token), "--exchange", "stall", "--uncoordinated", "--layers-per-step", "2"]
    assert main(["fleet", "drop", served.url, "--need", "1", *given]) == 0
    assert main(["fleet", "restore", served.url, *given]) == 0
    assert main(["fleet", "reshard", served.url, "a", "b", "--tp", "2", *given]) == 0
    assert main(["fleet", "migrate", served.url, "a", "b", "--layers", "4", *given]) == 0
    form = {"exchange": "stall", "coordinated": False, "layers_per_step": 2}
    assert served.engine.forms == [form] * 4
    given += ["--timeout", "2.5"]
    assert main(["fleet", "drop", served.url, "--need", "1", "--whole", "--most", "3", *given]) == 0
    assert main(["fleet", "restore", served.url, *given]) == 0
    assert served.engine.forms[4:] == [form | {"timeout_s": 2.5, "whole": True, "most": 3}, form | {"timeout_s": 2.5}]
    assert main(["fleet", "restore", served.url, "a", "--sharing", *given]) == 0
    assert served.engine.forms[6:] == [form | {"timeout_s": 2.5, "sharing": True}]


def test_a_fleet_is_looked_at_and_changed(served: Live, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    given = ["--token-file", str(token)]
    assert main(["fleet", "status", served.url]) == 0
    assert "2 of 2 ranks serve" in capsys.readouterr().out
    served.engine.becomes("a", "flipping")
    assert main(["fleet", "status", served.url]) == 0
    out = capsys.readouterr().out
    assert ("2 of 2 ranks serve" in out, "flipping" in out) == (True, True)
    assert main(["fleet", "move", served.url, "chatcmpl-12ab", "i-b", *given]) == 0
    assert "chatcmpl-12ab goes on at i-b: 4,096 bytes were copied" in capsys.readouterr().out
    assert served.engine.moves == [("12ab", "i-b")]
    assert main(["fleet", "add", served.url, "--place", "cpu=1MiB", *given]) == 0
    assert capsys.readouterr().out == "new serves\n"
    assert served.engine.ranks["new"].places == ("cpu=1MiB",)
    assert main(["fleet", "remove", served.url, "a", "--now", *given]) == 0
    assert served.engine.ranks["a"].why == "at once"


def test_layers_leave_and_return(served: Live, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    given = [served.url, "--token-file", str(token)]
    assert main(["fleet", "drop", *given, "--need", "4KiB"]) == 0
    told = capsys.readouterr().out
    assert "a keeps layers 0-1\nb keeps layers 2-3, 5\n" in told
    assert "applied: 4,096 bytes of weights have left; 5 layers changed their rank, 2,048 bytes" in told
    assert "stood still for 0.8 ms" in told
    assert main(["fleet", "drop", *given, "--layers", "a=2-3,5", "--layers", "b=0", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "planned: 4,096 bytes of weights would leave, 5 layers change their rank, 2,048 bytes" in told
    assert "price: 0.250 s of serving, and longer steps" in told
    assert main(["fleet", "restore", *given]) == 0
    assert "applied: a, b; 4,096 bytes of weights came back" in capsys.readouterr().out
    assert main(["fleet", "restore", served.url, "b", *given[1:]]) == 1
    assert "deferred: a, b; 0 bytes" in capsys.readouterr().out
    assert main(["fleet", "merge", served.url, "a", "b", *given[1:]]) == 0
    assert capsys.readouterr().out == "a, b can compute each other's layers\n"
    assert main(["fleet", "split", served.url, "a", *given[1:]]) == 0
    assert "applied: a, b; 0 bytes" in capsys.readouterr().out
    assert served.engine.groups_asked[:2] == [
        ("drop", ("4KiB", None, False, "by HTTP")),
        ("drop", (None, {"a": [2, 3, 5], "b": [0]}, True, "by HTTP")),
    ]


def test_what_could_be_done_has_a_price(served: Live, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    given = [served.url, "--token-file", str(token)]
    assert main(["fleet", "plan", *given, "--need", "24MiB"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "drop: frees 4,096 bytes for 0.250 s of serving",
        "swap: frees 2,048 bytes for 2.000 s of serving, with a loss of quality",
        "restore: takes 8,192 bytes for 0.500 s of serving",
    ]
    assert main(["fleet", "plan", *given, "--need", "1EiB"]) == 0
    assert "nothing that this fleet can do" in capsys.readouterr().out
    assert main(["fleet", "restore", *given, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "planned: 0 bytes of weights would leave, 4,096 come back, 5 layers change their rank, 2,048" in told
    assert "price: 0.500 s of serving" in told
    assert main(["fleet", "replicate", *given, "a", "b", "--layers", "4-5", "--dry-run"]) == 0
    assert "2 layers change their rank, 2,048 bytes" in capsys.readouterr().out
    assert served.engine.groups_asked[:2] == [("plan", "24MiB"), ("plan", "1EiB")]


def test_the_longest_request_of_each_degree_is_told(
    served: Live, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["fleet", "capacity", served.url]) == 2
    assert "elastic fleet capacity needs a token" in capsys.readouterr().err
    monkeypatch.setenv("ELASTIC_TOKEN", TOKEN)
    assert main(["fleet", "capacity", served.url]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a: blocks of the longest request: 1,000 at tp=1, 2,000 at tp=2",
        "b: blocks of the longest request: 9 at tp=1",
    ]
    assert main(["fleet", "capacity", served.url, "--degrees", "2", "8"]) == 0
    assert "b: blocks of the longest request: none, since layers are not cut so" in capsys.readouterr().out
    assert served.engine.groups_asked == [("capacity", (1, 2, 4)), ("capacity", (2, 8))]
    assert main(["fleet", "capacity", served.url, "--degrees", "0"]) == 2
    assert "answers 400" in capsys.readouterr().err


def test_ranks_share_every_layer(served: Live, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    given = [served.url, "a", "b", "--token-file", str(token)]
    assert main(["fleet", "reshard", *given, "--tp", "2", "--layers-per-step", "4"]) == 0
    told = capsys.readouterr().out
    assert "applied: a, b at tp=2; 4,096 bytes of weights have left, 0 came back; 5 layers changed their rank" in told
    assert main(["fleet", "reshard", *given, "--tp", "1", "--dry-run"]) == 0
    assert "planned: 4,096 bytes of weights would leave" in capsys.readouterr().out
    assert main(["fleet", "reshard", *given, "--tp", "3"]) != 0
    assert "in 4 shards" in capsys.readouterr().err
    assert served.engine.groups_asked == [
        ("reshard", (["a", "b"], 2, 4, False, "by HTTP")),
        ("reshard", (["a", "b"], 1, None, True, "by HTTP")),
    ]


def test_layers_go_to_another_rank(served: Live, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    given = [served.url, "--token-file", str(token)]
    assert main(["fleet", "migrate", *given, "a", "b", "--layers", "4-5,9"]) == 0
    assert "applied: b computes layers 4-5,9 of a; 2 layers changed their rank" in capsys.readouterr().out
    assert main(["fleet", "migrate", *given, "a", "b", "--layers", "4", "--dry-run"]) == 0
    assert "2 layers change their rank, 2,048 bytes" in capsys.readouterr().out
    assert main(["fleet", "migrate", *given, "a", "new", "--layers", "4"]) == 1
    assert "deferred" in capsys.readouterr().out
    assert served.engine.groups_asked[0] == ("migrate", ("a", [4, 5, 9], "b"))
    assert main(["fleet", "migrate", *given, "a", "b", "--layers", "4-"]) == 2
    assert "--layers '4-': write layers" in capsys.readouterr().err


def test_layers_get_replicas_and_lose_them(served: Live, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    given = [served.url, "--token-file", str(token)]
    assert main(["fleet", "replicate", *given, "a", "b", "--layers", "4-5,9"]) == 0
    told = capsys.readouterr().out
    assert "applied: layers of a that b computes too: 4-5, 9; 4,096 bytes of weights came there; 2 layers" in told
    assert main(["fleet", "replicate", *given, "a", "new", "--layers", "4"]) == 1
    assert "deferred: layers of a that new computes too: none" in capsys.readouterr().out
    assert main(["fleet", "evict", *given, "a"]) == 0
    assert "applied: layers of a that have no replica any more: 4-5, 9; 2 layers" in capsys.readouterr().out
    assert main(["fleet", "evict", *given, "a", "--layers", "4"]) == 0
    assert served.engine.groups_asked == [
        ("replicate", ("a", [4, 5, 9], "b")),
        ("replicate", ("a", [4], "new")),
        ("evict", ("a", None)),
        ("evict", ("a", [4])),
    ]
    assert main(["fleet", "replicate", *given, "a", "b", "--layers", "4-"]) == 2
    assert "--layers '4-': write layers such as 6-11,14" in capsys.readouterr().err


@pytest.mark.parametrize("layers", ["6-11", "r0=", "r0=6-", "r0=11-6", "r0=x", "=3", "r0=1,,2", "r0=0-99999"])
def test_layers_that_cannot_be_read(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELASTIC_TOKEN", TOKEN)
        assert main(["fleet", "drop", "127.0.0.1:1", "--layers", layers]) == 2
    assert f"--layers {layers!r}: write" in capsys.readouterr().err


def test_a_token_of_any_script(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_TOKEN", "schl\xfcssel \u20ac")
    with live(FakeFleet("a", "b"), token="schl\xfcssel \u20ac", actions=True) as running:
        assert main(["fleet", "remove", running.url, "a"]) == 0
    monkeypatch.setenv("ELASTIC_TOKEN", "two\nlines")
    assert main(["fleet", "remove", running.url, "b"]) == 2
    said = capsys.readouterr().err
    assert "ELASTIC_TOKEN has a line break" in said
    assert "lines" not in said


def test_what_the_caller_must_change(
    served: Live, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["fleet", "remove", served.url, "a"]) == 2
    assert "give --token-file FILE, or set ELASTIC_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("ELASTIC_TOKEN", "wrong")
    assert main(["fleet", "remove", served.url, "a"]) == 2
    assert (
        "answers 401: send the token for actions, not the API key, as Authorization: Bearer TOKEN"
        in capsys.readouterr().err
    )
    monkeypatch.setenv("ELASTIC_TOKEN", TOKEN)
    assert main(["fleet", "remove", served.url, "c"]) == 2
    assert "answers 404: there is no rank 'c'" in capsys.readouterr().err
    assert main(["fleet", "remove", "127.0.0.1:1", "c"]) == 2
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "answers to split what is not JSON"),
        (b"HTTP/1.1 500 No\r\nContent-Length: 99\r\n\r\n{", "cannot be reached: Connection reset by peer"),
    ],
)
def test_an_answer_that_is_none_is_said_in_a_line(
    answer: bytes, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_TOKEN", TOKEN)

    def once(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            received = b""
            while b"}" not in received:
                received += connection.recv(4096)
            connection.sendall(answer)
            if b"500" in answer:  # it ends in the middle
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=once, args=(listening,))
        thread.start()
        assert main(["fleet", "split", f"127.0.0.1:{listening.getsockname()[1]}", "a"]) == 2
        thread.join()
    assert words in capsys.readouterr().err


def test_a_server_without_a_fleet_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(path: str) -> tuple[int, bytes]:
        return 200, json.dumps(document()).encode()

    with serving(answer) as url:
        assert main(["fleet", "status", url]) == 2
    assert "serves one model and no fleet" in capsys.readouterr().err
    with serving(lambda path: (200, json.dumps(fleet_document()).encode())) as url:
        assert main(["fleet", "status", url]) == 0
    assert "1 of 2 ranks serve" in capsys.readouterr().out


def test_ranks_of_a_fleet_that_drops_layers_swap_none_by_themselves() -> None:
    def policy(*arguments: str) -> str:
        return str(serve.wrap_options(options(*arguments, "--variants", "int4"))["policy"])

    assert policy(*DROP) == "manual"
    assert (policy("--ranks", "2"), policy(*LENGTHS)) == ("balanced", "balanced")
