"""Ranks as real processes: they serve, die, stop, refuse; and none outlives whoever started it."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from elastic.assets import MODEL_DIR
from elastic.cluster.control.connection import SocketConnection, socket_pair
from elastic.cluster.control.handshake import compare_protocols
from elastic.cluster.control.messages import Beat, Refused
from elastic.cluster.launch import local as module
from elastic.cluster.launch.base import RankSpec
from elastic.cluster.launch.local import LocalLauncher
from elastic.cluster.rank import process
from elastic.cluster.rank.spec import rank_places
from elastic.errors import ConfigError, ElasticError, StateError
from support import child_process
from support.child_process import TESTS, end_of_fork
from support.isolation.named_memory import NamedMemory
from support.processes import children, open_files, wait_for_end, wait_until
from support.serving.fleet_side import FleetSide
from support.serving.generations import continuation

pytestmark = pytest.mark.slow
PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def launcher() -> Iterator[LocalLauncher]:
    """One for all: its fork server takes seconds to import torch and transformers. Its end is that of both."""
    one = LocalLauncher(start_timeout_s=120)
    yield one
    last = FleetSide(one.start(RankSpec("last", MODEL_DIR, ("cpu=32MiB",))))
    assert one._server is not None
    server = one._server.pid
    one.close()
    last.end()
    wait_for_end(last.client.hello.pid)
    wait_for_end(server)
    with pytest.raises(StateError, match="was closed"):
        one.start(RankSpec("later", MODEL_DIR))


@pytest.fixture
def start(launcher: LocalLauncher) -> Iterator[Callable[..., FleetSide]]:
    ranks: list[FleetSide] = []

    def make(model: Any = MODEL_DIR, places: tuple[str, ...] = ("cpu=32MiB",), **options: Any) -> FleetSide:
        ranks.append(FleetSide(launcher.start(RankSpec(f"r{len(ranks)}", model, places, **options))))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.client.kill("the test has ended")
        rank.end()
        wait_for_end(rank.client.hello.pid)
    assert launcher._server is None or launcher._server.ended or not children(launcher._server.pid)


def test_ranks_serve_as_the_model_does_and_end_when_asked(
    launcher: LocalLauncher, start: Callable[..., FleetSide]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    expected = continuation(model, PROMPT, 12)
    ranks = [start(), start(cores=(min(os.sched_getaffinity(0)),))]
    for rank in ranks:
        assert rank.answer("one", prompt=PROMPT, tokens=12) == expected
        assert rank.client.hello.pid != os.getpid()
    assert ranks[0].client.hello.model == ranks[1].client.hello.model
    assert ranks[1].client.hello.places == rank_places(["cpu=32MiB"])
    status = Path(f"/proc/{ranks[1].client.hello.pid}/status").read_text()
    assert f"Cpus_allowed_list:\t{min(os.sched_getaffinity(0))}\n" in status
    assert launcher._server is not None
    assert "__main__" not in Path(f"/proc/{launcher._server.pid}/cmdline").read_text()
    for rank in ranks:
        rank.client.close(drain=True, timeout_s=60)
        assert rank.end() == "its process has ended with code 0; its connection ended"
        assert not rank.heard_all


def test_a_killed_rank_is_lost_with_its_reason_after_its_last_word(start: Callable[..., FleetSide]) -> None:
    rank = start()
    rank.submit("one", tokens=900)
    rank.wait(lambda: len(rank.tokens["one"]) > 3)
    os.kill(rank.client.hello.pid, signal.SIGKILL)
    assert rank.end() == "its process was killed by SIGKILL; its connection ended"
    assert rank.heard_all
    assert not rank.finished


def test_a_stopped_rank_is_silent_until_it_is_killed(start: Callable[..., FleetSide]) -> None:
    rank = start()
    rank.submit("one", tokens=900)
    rank.wait(lambda: rank.tokens["one"])
    os.kill(rank.client.hello.pid, signal.SIGSTOP)
    stat = Path(f"/proc/{rank.client.hello.pid}/stat")
    wait_until(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "T", "it does not stop")
    silence = threading.Event()
    while not silence.wait(0.5):  # what it had sent before is read soon; then two beats are missing
        heard = len(rank.messages)
        if not silence.wait(0.6) and heard == len(rank.messages):
            break
    for i in range(50):
        rank.submit(f"more-{i}", prompt=PROMPT * 300)  # more than the connection holds; it does not wait
    assert not rank.lost
    rank.client.kill("no beat for 2 s")
    assert rank.end() == "no beat for 2 s"
    assert rank.heard_all


def test_an_interrupt_is_ignored_and_a_wish_to_terminate_ends_it_in_order(start: Callable[..., FleetSide]) -> None:
    rank = start()
    os.kill(rank.client.hello.pid, signal.SIGINT)
    rank.submit("one", tokens=900)
    rank.wait(lambda: len(rank.tokens["one"]) > 3)
    os.kill(rank.client.hello.pid, signal.SIGTERM)
    assert rank.end() == "its process has ended with code 0; its connection ended"
    assert not rank.heard_all
    assert not rank.finished  # nobody wished its request to end


def test_beats_come_without_any_request(start: Callable[..., FleetSide]) -> None:
    rank = start()
    rank.wait(lambda: sum(isinstance(message, Beat) for message in rank.messages) >= 3)


def changed(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of the small model with other weights."""
    copy = Path(shutil.copytree(MODEL_DIR, directory / "other"))
    weights = load_file(copy / "model.safetensors")
    change(weights)
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    return copy


def test_another_models_weights_have_other_digests(start: Callable[..., FleetSide], tmp_path: Path) -> None:
    def one_weight(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.2.mlp.up_proj.weight"][0, 0] += 1

    facts = [start(model).client.hello.model for model in (MODEL_DIR, changed(tmp_path, one_weight))]
    different = [i for i, (a, b) in enumerate(zip(facts[0].digests, facts[1].digests, strict=True)) if a != b]
    assert different == [2]
    assert facts[0].fixed_digest == facts[1].fixed_digest


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "/no/such/model"}, "no model there"),
        ({"places": ("cpu=1KiB",)}, "cpu"),
        ({"places": ("abacus=1MiB",)}, "abacus"),
        ({"cores": (4095,)}, r"cores=\[4095\]"),
        ({"engine": {"no_such": 1}}, "no option 'no_such'"),
        ({"model": object()}, "give its directory"),
        ({"wrap": {"slo": threading.Lock()}}, "cannot be sent to another process"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_start_is_an_error_in_words(
    start: Callable[..., FleetSide], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ElasticError, match=words):
        start(**options)


def test_a_model_whose_files_are_cut_off_is_an_error_in_words(start: Callable[..., FleetSide], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(MODEL_DIR, tmp_path / "cut"))
    os.truncate(copy / "model.safetensors", 1000)
    with pytest.raises(ConfigError, match="no whole safetensors file"):
        start(copy)


def test_a_rank_that_does_not_come_in_time_is_ended(launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_start_timeout_s", 0.0)
    with pytest.raises(StateError, match="'late' did not start"):
        launcher.start(RankSpec("late", MODEL_DIR))
    assert launcher._server is not None
    server = launcher._server.pid
    wait_until(lambda: not children(server), "the rank lives on")


@pytest.mark.parametrize("at_last", ["a rank", "an error"])
def test_a_fork_server_that_does_not_answer_is_told_in_words(monkeypatch: pytest.MonkeyPatch, at_last: str) -> None:
    """What it answers when nobody waits any more keeps no descriptor open."""
    late = Future[Any]()

    class Busy:
        def fork(self, stream: socket.socket, model: str) -> Future[Any]:
            stream.close()
            return late

    monkeypatch.setattr(module, "IMPORT_S", 0.0)
    monkeypatch.setattr(LocalLauncher, "warm_up", lambda _: Busy())
    with pytest.raises(StateError, match="'late' did not start: the fork server is busy"):
        LocalLauncher().start(RankSpec("late", MODEL_DIR))
    if at_last == "an error":
        late.set_exception(StateError("no process could be started"))
        return
    descriptor = os.eventfd(0)
    late.set_result(module.LocalProcess(os.getpid(), descriptor))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


class Stuck:
    """A fork server with a rank that says nothing, as one that waits for a lock which no thread of it holds."""

    def __init__(self) -> None:
        self.stream: socket.socket | None = None
        self.told: list[str] = []

    def fork(self, stream: socket.socket, model: str) -> Future[Any]:
        self.stream, process = stream, Future[Any]()
        process.set_result(self)
        return process

    def wait(self, timeout_s: float) -> None:
        self.told.append("wait")

    def kill(self) -> None:
        self.told.append("kill")

    def close(self) -> None:
        self.told.append("close")


@pytest.mark.parametrize("no_threads", [False, True])
def test_a_rank_that_never_says_a_word_is_ended_in_time(monkeypatch: pytest.MonkeyPatch, no_threads: bool) -> None:
    def fail(timer: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    stuck, failed = Stuck(), list[StateError]()
    monkeypatch.setattr(LocalLauncher, "warm_up", lambda _: stuck)

    def start() -> None:
        try:
            LocalLauncher(start_timeout_s=0.1).start(RankSpec("stuck", MODEL_DIR))
        except StateError as error:
            failed.append(error)

    if no_threads:
        monkeypatch.setattr(threading.Timer, "start", fail)
    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    starting.join(20)
    assert stuck.told == ["wait", "kill", "close"]
    assert stuck.stream is not None
    stuck.stream.close()
    starting.join(20)
    assert ("no thread" if no_threads else "'stuck' did not start") in str(failed)


def test_with_the_fork_server_its_ranks_end_and_another_takes_its_place(
    launcher: LocalLauncher, start: Callable[..., FleetSide]
) -> None:
    ranks = [start(), start()]
    os.kill(ranks[1].client.hello.pid, signal.SIGSTOP)
    assert launcher._server is not None
    os.kill(launcher._server.pid, signal.SIGKILL)
    for rank in ranks:
        assert "fork server has ended" in rank.end()
        wait_for_end(rank.client.hello.pid)
    assert len(start().answer("one")) == 8


def test_without_a_fork_server_no_socket_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, connected = [], socket.socketpair

    def pair(*arguments: Any) -> tuple[socket.socket, socket.socket]:
        pairs.append(connected(*arguments))
        return pairs[-1]

    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(module.socket, "socketpair", pair)
    monkeypatch.setattr(module.subprocess, "Popen", refuse)
    with pytest.raises(StateError, match="'r0' cannot be started now: no more processes"):
        LocalLauncher().start(RankSpec("r0", MODEL_DIR))
    assert [end.fileno() for pair in pairs for end in pair] == [-1, -1]


def test_a_rank_for_which_no_descriptors_are_left_is_an_error_in_words(
    launcher: LocalLauncher, start: Callable[..., FleetSide]
) -> None:
    start()
    server, enough = launcher._server, resource.getrlimit(resource.RLIMIT_NOFILE)
    assert server is not None
    ours, theirs = socket_pair()
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 1
    with theirs:  # its number is above the limit: nobody gets it when it is closed
        high = socket.socket(fileno=fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, limit))
    fillers: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, enough[1]))
        with suppress(OSError):  # none is left
            while True:
                fillers.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(StateError, match="'r9' cannot be started now: Too many open files"):
            launcher.start(RankSpec("r9", MODEL_DIR))
        with pytest.raises(StateError, match="too many open files"):
            server.fork(high, str(MODEL_DIR)).result(60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, enough)
        ours.close()
        for filler in fillers:
            os.close(filler)
    assert len(start().answer("one")) == 8, "the same fork server starts others"
    assert launcher._server is server


class Forked:
    """A fork server whose ranks keep what they are told to be, and refuse."""

    ended = False

    def __init__(self) -> None:
        self.specs: list[RankSpec] = []

    def fork(self, stream: socket.socket, model: str) -> Future[Any]:
        threading.Thread(target=self._refuse, args=(SocketConnection(stream),)).start()
        process: Future[Any] = Future()
        process.set_result(None)
        return process

    def _refuse(self, connection: SocketConnection) -> None:
        compare_protocols(connection)
        self.specs.append(connection.receive())
        connection.send(Refused("", ConfigError("enough is known")))
        connection.close()

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 1, 8), (8, 2, 4), (8, 3, 2), (2, 4, 1)])
def test_ranks_without_cores_share_those_of_the_host(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    launcher = LocalLauncher(ranks)
    server = launcher._server = Forked()  # type: ignore[assignment]
    for options in ({}, {"cores": (0,)}, {"threads": 3}):
        with pytest.raises(ConfigError, match="enough is known"):
            launcher.start(RankSpec("r0", MODEL_DIR, **options))
    assert [spec.threads for spec in server.specs] == [threads, None, 3]


def test_a_rank_computes_with_no_more_threads_than_it_is_told() -> None:
    before = torch.get_num_threads()
    try:
        for there, told, then in ((4, 2, 2), (2, 4, 2), (3, None, 3)):
            torch.set_num_threads(there)
            process._settle(RankSpec("r0", MODEL_DIR, threads=told))
            assert torch.get_num_threads() == then
    finally:
        torch.set_num_threads(before)


def test_less_than_one_rank_cannot_share_anything() -> None:
    with pytest.raises(ConfigError, match="ranks=0"):
        LocalLauncher(0)


FLEET = f"""
import os, signal, sys
sys.path.append({TESTS!r})
from support.isolation.forked_server import fork_the_server
fork_the_server()
from elastic.assets import MODEL_DIR
from elastic.cluster.launch.base import RankSpec
from elastic.cluster.launch.local import LocalLauncher
launcher = LocalLauncher()
ranks = [launcher.start(RankSpec(f"r{{i}}", MODEL_DIR, ("cpu=32MiB",))) for i in range(3)]
os.kill(ranks[1].hello.pid, signal.SIGSTOP)
print(launcher._server.pid, *(rank.hello.pid for rank in ranks), flush=True)
sys.stdin.read()
"""


def test_nothing_outlives_a_fleet_process_that_is_killed() -> None:
    named = NamedMemory()
    with closing(child_process.Forked(FLEET)) as fleet:
        server, *ranks = map(int, fleet.stdout.readline().split())
        files = [name for rank in ranks for name in open_files(rank)]
        assert any(name.startswith("/memfd:cpu") for name in files)
        assert not any(name.startswith("/dev/shm") for name in files)
    for pid in (server, *ranks):
        wait_for_end(pid)
    assert named.left() == set()


HANGING = """
import os, threading, types
from contextlib import contextmanager
from elastic.cluster.control.connection import SocketConnection, socket_pair
from elastic.cluster.rank import process
from elastic.cluster.rank.spec import RankSpec

@contextmanager
def built(spec, connection):
    def run():
        rank.ended.set()  # the fleet has gone
        threading.Event().wait()  # and the engine does not end
    rank = types.SimpleNamespace(name=spec.name, ended=threading.Event(), run=run)
    yield rank

process.built, process.GRACE_S = built, 0.1
process.serve(SocketConnection(socket_pair()[1]), RankSpec("hanging", "model"))
"""


def test_a_rank_whose_engine_hangs_ends_with_its_fleet_all_the_same() -> None:
    status, _, errors = end_of_fork(HANGING)
    assert status == 1
    assert "rank hanging had not ended" in errors
