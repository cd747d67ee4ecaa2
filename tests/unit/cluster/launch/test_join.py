"""Ranks that come by themselves: in order, by their key alone, and gone with their fleet."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from elastic.assets import MODEL_DIR
from elastic.cli.main import main
from elastic.cluster.control.handshake import connect, make_key_file, read_key
from elastic.cluster.control.messages import Beat, Refused
from elastic.cluster.fleet.fleet import Fleet
from elastic.cluster.launch.base import RankSpec
from elastic.cluster.launch.join import JoinLauncher
from elastic.cluster.rank.build import built
from elastic.cluster.rank.client import RankClient
from elastic.engines.base import Request
from elastic.errors import ConfigError, StateError
from support.architectures import build
from support.child_process import Forked
from support.cluster.fake_rank import FakeRank
from support.processes import wait_for_end, wait_until
from support.serving.fleet_side import FleetSide
from support.serving.generations import Collector, continuation

ANY = RankSpec("any", None)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return make_key_file(tmp_path / "key")


@pytest.fixture
def launcher(key_file: Path) -> Iterator[JoinLauncher]:
    one = JoinLauncher(key_file, start_timeout_s=60)
    yield one
    one.close()


@pytest.fixture
def join(launcher: JoinLauncher, key_file: Path) -> Iterator[Callable[[str], None]]:
    """Have a rank with a tiny model come, on a thread of this process."""
    threads: list[threading.Thread] = []

    def run(name: str) -> None:
        connection = connect(launcher.address, read_key(key_file))
        with built(RankSpec(name, build("llama-gqa"), (f"cpu#{name}=8MiB",)), connection) as rank:
            rank.run()

    def start(name: str) -> None:
        threads.append(threading.Thread(target=run, args=(name,), daemon=True))
        threads[-1].start()

    yield start
    launcher.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank lives on behind its fleet"


def test_ranks_are_taken_as_they_come(launcher: JoinLauncher, join: Callable[[str], None]) -> None:
    join("early")
    early = FleetSide(launcher.start(ANY))
    assert early.client.hello.name == "early"
    assert len(early.answer("one")) == 8
    early.client.kill("let go")
    assert early.end() == "let go"


def test_one_that_has_gone_before_somebody_waited_for_it_is_passed_over(launcher: JoinLauncher, key_file: Path) -> None:
    with closing(connect(launcher.address, read_key(key_file))) as gone:
        gone.send(FakeRank("gone").hello)
        wait_until(lambda: launcher._ready)
        gone.send(Beat(FakeRank("gone").hello.load))
    with closing(connect(launcher.address, read_key(key_file))) as there:
        there.send(FakeRank("there").hello)
        client = launcher.start(ANY)
        assert client.hello.name == "there"
    client.close()


def test_nothing_is_kept_of_one_for_which_there_is_no_thread(
    launcher: JoinLauncher, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == "elastic-joining":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    with closing(connect(launcher.address, read_key(key_file))) as connection, pytest.raises(EOFError):
        connection.receive()
    assert launcher._loading == set()


def test_one_that_nobody_waits_for_is_told_of(launcher: JoinLauncher, join: Callable[[str], None]) -> None:
    came, told = threading.Event(), []

    def on_joined(client: RankClient) -> None:
        told.append(FleetSide(client))
        came.set()

    launcher.pass_on(on_joined)
    join("unasked")
    assert came.wait(60)
    assert len(told[0].answer("one")) == 8
    told[0].client.close()


def test_a_fleet_takes_more_than_it_waits_for_also_of_those_that_came_before_it(
    launcher: JoinLauncher, join: Callable[[str], None]
) -> None:
    for count, name in enumerate(("earlier", "early"), 1):  # one model after another: they share a random generator
        join(name)
        wait_until(lambda count=count: len(launcher._ready) == count, "it does not come")
    with Fleet("model", ranks=1, launch=launcher, beat_timeout_s=60) as fleet:
        assert {rank.name for rank in fleet.status().ranks} == {"early", "earlier"}
        join("late")
        wait_until(lambda: len(fleet.status().ranks) == 3, "one that comes later is not taken")


def test_one_that_cannot_start_is_passed_over(
    launcher: JoinLauncher, join: Callable[[str], None], key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = connect(launcher.address, read_key(key_file))
    broken.send(Refused("", ConfigError("its model is not there")))
    join("whole")
    whole = launcher.start(ANY)
    assert whole.hello.name == "whole"
    whole.close()
    assert "its model is not there" in caplog.text
    broken.close()


@pytest.mark.parametrize("first", [replace(FakeRank("r0").hello, model=None), Refused("", ValueError("no")), "GET /"])  # type: ignore[arg-type]
def test_one_that_begins_with_something_else_is_refused_in_one_line(
    first: object, launcher: JoinLauncher, join: Callable[[str], None], key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A Hello with other fields ended a thread with a traceback, when the fleet read it."""
    with closing(connect(launcher.address, read_key(key_file))) as stranger:
        stranger.send(first)
        with pytest.raises(EOFError):
            stranger.receive()
    wait_until(lambda: caplog.records)
    (record,) = caplog.records
    assert "a rank that wanted to join could not start" in record.getMessage()
    assert record.exc_info is None
    join("r0")
    client = launcher.start(ANY)
    assert client.hello.name == "r0"
    client.close()


def test_a_close_lets_one_go_that_still_loads(launcher: JoinLauncher, key_file: Path) -> None:
    with closing(connect(launcher.address, read_key(key_file))) as loading:
        wait_until(lambda: launcher._loading, "it was not let in")
        launcher.close()
        with pytest.raises(EOFError):
            loading.receive()
    wait_until(lambda: not launcher._loading, "its thread waits on")


def test_nobody_comes(key_file: Path) -> None:
    one = JoinLauncher(key_file, start_timeout_s=0.05)
    with pytest.raises(StateError, match=r"none has come .* elastic rank MODEL --join 127\.0\.0\.1:"):
        one.start(ANY)
    one.close()
    with pytest.raises(StateError, match="was closed"):
        one.start(ANY)
    one.close()


def test_a_launcher_needs_a_key(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTIC_KEY_FILE", raising=False)
    with pytest.raises(ConfigError, match="need a key"):
        JoinLauncher()
    monkeypatch.setenv("ELASTIC_KEY_FILE", str(key_file))
    JoinLauncher().close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"key": True}, "key=True cannot be"),
        ({"key": b"short"}, "key holds 5 bytes; a key has 16 to 4096"),
        ({"host": None}, "host=None cannot be"),
        ({"port": 70000}, "port=70000 cannot be"),
        ({"port": "4000"}, "port='4000' cannot be"),
        ({"start_timeout_s": float("nan")}, "start_timeout_s=nan cannot be"),
        ({"refused": "print"}, "refused='print' cannot be"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_words(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        JoinLauncher(**{"key": b"k" * 32, **options})


def test_one_that_nobody_keeps_leaves_its_port(key_file: Path) -> None:
    launcher = JoinLauncher(key_file)
    Fleet("model", ranks=1, launch=launcher)  # that is never started
    address = launcher.address
    del launcher
    gc.collect()
    wait_until(lambda: not listens(address), "it listens on")


def test_one_listens_to_the_end_of_its_block(key_file: Path) -> None:
    with JoinLauncher(key_file) as launcher:
        assert listens(launcher.address)
    assert not listens(launcher.address)


def listens(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address).close()
    except ConnectionRefusedError:
        return False
    return True


def said(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["rank", *options]) == 2
    return capsys.readouterr().err


def test_the_command_says_what_is_wrong(
    launcher: JoinLauncher, key_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = f"127.0.0.1:{launcher.address[1]}"
    other = make_key_file(tmp_path / "other")
    assert "the key is not the same" in said(capsys, "--join", where, "--key-file", str(other))
    assert "No such file" in said(capsys, "--join", where, "--key-file", str(tmp_path / "absent"))
    assert "is no address" in said(capsys, "--join", "nowhere", "--key-file", str(key_file))
    os.chmod(other, 0o644)
    assert "can be read by others" in said(capsys, "--join", where, "--key-file", str(other))
    launcher.close()
    assert "nobody answers" in said(capsys, "--join", where, "--key-file", str(key_file))


def joining(*options: str) -> closing[Forked]:
    """`elastic rank` in a process of its own."""
    arguments = ["rank", str(MODEL_DIR), *options]
    return closing(Forked(f"import sys; from elastic.cli.main import main; sys.exit(main({arguments}))"))


@pytest.mark.slow
def test_a_process_that_is_refused_says_why(launcher: JoinLauncher, key_file: Path) -> None:
    where = f"127.0.0.1:{launcher.address[1]}"
    with joining("--join", where, "--key-file", str(key_file), "--place", "cpu=32MiB") as process:
        launcher.start(ANY).refuse("the weights of its layer 5 are others")
        assert process.wait() == 2
        assert b"elastic rank: the weights of its layer 5 are others" in process.stderr.read()


@pytest.mark.slow
def test_a_process_joins_serves_and_ends_with_its_fleet(launcher: JoinLauncher, key_file: Path) -> None:
    where = f"127.0.0.1:{launcher.address[1]}"
    options = ["--join", where, "--key-file", str(key_file), "--place", "cpu=32MiB", "--name", "far"]
    options += ["--kv-cache-dtype", "int8"]
    with joining(*options) as process:
        rank = FleetSide(launcher.start(ANY))
        assert (rank.client.hello.name, rank.client.hello.pid) == ("far", process.pid)
        assert rank.client.hello.kv.dtype == "int8"
        rank.submit("one", tokens=900)
        rank.wait(lambda: len(rank.tokens["one"]) > 3)
        rank.client.kill("as if the fleet had died")
        rank.end()
        assert process.wait() == 0


@pytest.mark.slow
def test_ranks_that_torchrun_starts_make_a_fleet_and_end_with_it(launcher: JoinLauncher, key_file: Path) -> None:
    where = f"127.0.0.1:{launcher.address[1]}"
    torchrun = ["--standalone", "--nproc-per-node", "2", "--no-python"]
    options: list[Any] = ["--join", where, "--key-file", key_file, "--place", "cpu=16MiB"]
    command = [sys.executable, "-m", "elastic.cli.main", "rank", str(MODEL_DIR), *map(str, options)]
    with closing(Forked(f"from torch.distributed.run import main; main({[*torchrun, *command]})")) as process:
        heard, requests = Collector(), [Request((5, 6, 7), 8, ignore_eos=True) for _ in range(4)]
        with Fleet(MODEL_DIR, ranks=2, launch=launcher) as fleet:
            ranks = fleet.status().ranks
            for request in requests:
                fleet.submit(request, heard)
            assert {fleet.instance_of(request.id) for request in requests} == {"r0", "r1"}
            heard.wait([request.id for request in requests])
        assert process.wait(60) == 0
    for rank in ranks:
        assert (rank.launcher, rank.places) == ("join", ("cpu=16MiB",))
        wait_for_end(rank.pid)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    expected = continuation(model, (5, 6, 7), 8)
    assert [heard.tokens[request.id] for request in requests] == [expected] * 4
