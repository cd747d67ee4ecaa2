"""Who may speak with a fleet: whoever has the key and the protocol; all others are turned away, and told why."""

from __future__ import annotations

import os
import pickle
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

import pytest

from elastic.cluster.control import handshake
from elastic.cluster.control.connection import SocketConnection, socket_pair
from elastic.cluster.control.handshake import connect, make_key_file, prove, read_key
from elastic.cluster.control.listener import Listener, parse_address
from elastic.errors import ConfigError, StateError

KEY = b"a key of this test's own"


class Door:
    """A listener, and whom it has let in and turned away."""

    def __init__(self, **options: Any) -> None:
        self.changed = threading.Condition()
        self.accepted: list[SocketConnection] = []
        self.refused: list[str] = []
        self.listener = Listener(
            ("127.0.0.1", 0), KEY, self._note(self.accepted), refused=self._note(self.refused), **options
        )

    def _note(self, where: list[Any]) -> Callable[[Any], None]:
        def note(what: Any) -> None:
            with self.changed:
                where.append(what)
                self.changed.notify_all()

        return note

    def wait(self, accepted: int = 0, refused: int = 0) -> None:
        """Wait until so many were let in and turned away."""
        with self.changed:
            done = self.changed.wait_for(
                lambda: len(self.accepted) >= accepted and len(self.refused) >= refused, timeout=60
            )
        assert done, (self.accepted, self.refused)

    def let_in(self) -> None:
        """Connect with the key, and say something each way."""
        before = len(self.accepted)
        with closing(connect(self.listener.address, KEY)) as client:
            self.wait(accepted=before + 1)
            self.accepted[before].send("welcome")
            assert client.receive() == "welcome"

    def close(self) -> None:
        self.listener.close()
        for connection in self.accepted:
            connection.close()


@pytest.fixture
def door() -> Iterator[Callable[..., Door]]:
    doors: list[Door] = []

    def make(**options: Any) -> Door:
        doors.append(Door(**options))
        return doors[-1]

    yield make
    for each in doors:
        each.close()


def strange(door: Door) -> socket.socket:
    return socket.create_connection(door.listener.address, timeout=60)


def test_the_key_lets_in(door: Callable[..., Door]) -> None:
    one = door()
    for _ in range(3):
        one.let_in()
    assert not one.refused


def test_another_key_is_refused_in_words_on_both_sides(door: Callable[..., Door]) -> None:
    one = door()
    with pytest.raises(ConfigError, match="the key is not the same on both sides"):
        connect(one.listener.address, b"another key altogether")
    one.wait(refused=1)
    assert "the key is not the same" in one.refused[0]
    one.let_in()


def test_another_protocol_is_refused_in_words_on_both_sides(door: Callable[..., Door]) -> None:
    one = door()
    with closing(SocketConnection(strange(one))) as client:
        prove(client, KEY, first=False)
        client.send_bytes(handshake.GREETING + b"99")
        assert client.receive_bytes(64) == handshake.GREETING + str(handshake.PROTOCOL).encode()
        one.wait(refused=1)
    assert f"speaks protocol '99', this one {handshake.PROTOCOL}" in one.refused[0]

    with socket.create_server(("127.0.0.1", 0)) as server:
        newer = threading.Thread(target=_speak_protocol, args=(server, b"99"), daemon=True)
        newer.start()
        words = f"speaks protocol '99', this one {handshake.PROTOCOL}; install the same version"
        with pytest.raises(ConfigError, match=words):
            connect(server.getsockname(), KEY)
        newer.join(10)


def _speak_protocol(server: socket.socket, version: bytes) -> None:
    with closing(SocketConnection(server.accept()[0])) as connection:
        prove(connection, KEY, first=True)
        connection.send_bytes(handshake.GREETING + version)
        connection.receive_bytes(64)


class Bomb:
    """Unpickling it would be seen."""

    exploded = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _explode, ()


def _explode() -> None:
    Bomb.exploded = True


@pytest.mark.parametrize("known", [False, True], ids=["without the key", "without the protocol"])
def test_nothing_is_unpickled_before_the_key_and_the_protocol(door: Callable[..., Door], known: bool) -> None:
    one = door()
    with closing(SocketConnection(strange(one))) as client:
        if known:
            prove(client, KEY, first=False)
        client.send_bytes(pickle.dumps(Bomb()))
        one.wait(refused=1)
    assert not Bomb.exploded
    assert not one.accepted


@pytest.mark.slow
def test_ten_thousand_random_messages_are_turned_away_and_the_next_rank_is_let_in(door: Callable[..., Door]) -> None:
    one, draw, strangers = door(), random.Random(7), 1_000
    for i in range(strangers):
        garbage = [draw.randbytes(draw.randrange(1, 300)) for _ in range(10)]
        if i % 3 == 0:  # in frames, as a proof would be
            garbage = [struct.pack("!i", len(message)) + message for message in garbage]
        with strange(one) as stream, suppress(OSError):  # it may be turned away while it speaks
            for message in garbage:
                stream.sendall(message)
        if i % 250 == 0:
            one.let_in()
    one.wait(refused=strangers)
    one.let_in()
    assert len(one.accepted) == 5
    assert len(one.refused) == strangers


def test_silent_ones_keep_nobody_out(door: Callable[..., Door]) -> None:
    one = door(handshake_s=600, most=4)
    with ExitStack() as silent:
        for _ in range(12):  # more than may wait at a time
            silent.enter_context(strange(one))
        one.let_in()
        one.wait(refused=9)  # each after the fourth ends the one before it that has waited longest
        one.listener.close()
        assert len(one.refused) == 12
    assert all("it took too long" in said for said in one.refused)


def test_silent_ones_are_cut_off_in_time(door: Callable[..., Door]) -> None:
    one = door(handshake_s=0.1)
    with ExitStack() as stack:
        silent = [stack.enter_context(strange(one)) for _ in range(3)]
        one.wait(refused=3)
        assert all("it took too long" in said for said in one.refused)
        for stream in silent:
            while stream.recv(100):  # the challenge, then the end
                pass


def test_one_that_is_cut_off_as_it_proves_the_key_is_refused(
    door: Callable[..., Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(connection: SocketConnection) -> None:
        handshake.compare_protocols(connection)
        one.listener._cut(time.monotonic() + 60)

    monkeypatch.setattr("elastic.cluster.control.listener.compare_protocols", compare)
    one = door()
    with closing(connect(one.listener.address, KEY)) as client:
        one.wait(refused=1)
        with pytest.raises(EOFError):
            client.receive()
    assert "it took too long" in one.refused[0]
    assert not one.accepted


def test_one_that_the_fleet_fails_to_take_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: SocketConnection) -> None:
        raise RuntimeError("no thread for it")

    with (
        closing(Listener(("127.0.0.1", 0), KEY, fail)) as listener,
        closing(connect(listener.address, KEY)) as client,
        pytest.raises(EOFError),
    ):
        client.receive()
    assert "no thread for it" in caplog.text


def test_without_descriptors_or_threads_no_socket_is_left(
    door: Callable[..., Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptors(_: int) -> int:
        raise OSError(24, "Too many open files")

    def no_threads(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    one = door()
    one.let_in()
    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr("elastic.cluster.control.connection.os.dup", no_descriptors)
        with pytest.raises(StateError, match="Too many open files"):
            connect(one.listener.address, KEY)
        with pytest.raises(OSError, match="Too many open files"):
            socket_pair()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_threads)
        with pytest.raises(StateError, match="new thread"):
            connect(one.listener.address, KEY)
        with pytest.raises(RuntimeError, match="new thread"):
            Listener(("127.0.0.1", 0), KEY, lambda _: None)
    one.wait(refused=2)
    assert descriptors() == before
    one.let_in()


def test_that_descriptors_are_lacking_is_logged_once(
    door: Callable[..., Door], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that waits to be accepted is tried again and again: that would be a hundred lines a second."""
    one, accept, errors = door(), socket.socket.accept, [OSError(24, "Too many open files")] * 20

    def lacking(listening: socket.socket) -> Any:
        if errors:
            raise errors.pop()
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", lacking)
    for _ in range(2):
        one.let_in()
    errors.append(OSError(24, "Too many open files"))
    one.let_in()
    assert [record.getMessage() for record in caplog.records].count(
        "a connection could not be accepted: [Errno 24] Too many open files"
    ) == 2


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_one_byte_after_another_does_not_lengthen_the_time(door: Callable[..., Door]) -> None:
    one = door(handshake_s=0.3)
    with strange(one) as stream:
        stream.sendall(struct.pack("!i", 200))
        with suppress(OSError):  # cut off while it speaks
            while not one.refused:
                stream.sendall(b"x")
                threading.Event().wait(0.02)
        one.wait(refused=1)
    assert "it took too long" in one.refused[0]


def test_a_close_ends_handshakes_and_leaves_the_port(door: Callable[..., Door]) -> None:
    one = door()
    address = one.listener.address
    with strange(one) as stream:
        assert stream.recv(100)  # the challenge: it has been accepted
        one.listener.close()
        one.wait(refused=1)
    with pytest.raises(StateError, match="nobody answers"):
        connect(address, KEY)
    socket.create_server(address).close()


def test_a_server_that_is_no_fleet_is_told_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with pytest.raises(StateError, match=r"went away before it had proven its key \(.+\)"):
            connect(address, KEY, timeout_s=0.2)  # silent
        server.accept()[0].close()
        answering = threading.Thread(target=_speak_http, args=(server,), daemon=True)
        answering.start()
        with pytest.raises(StateError, match=r"does not speak this protocol|went away"):
            connect(address, KEY)
        answering.join(10)


def test_what_is_no_challenge_is_told_from_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def answer(*_: object) -> None:
        raise AuthenticationError(said[-1])

    monkeypatch.setattr(handshake.standard, "answer_challenge", answer)
    here, there = socket_pair()
    with closing(here), there:
        said.append("Protocol error, expected challenge: message=b'HTTP/1.1 400'")  # Python 3.12's
        with pytest.raises(StateError, match="does not speak this protocol"):
            prove(here, KEY, first=False)
        said.append("digest sent was rejected")
        with pytest.raises(ConfigError, match="key is not the same"):
            prove(here, KEY, first=False)


def _speak_http(server: socket.socket) -> None:
    stream, _ = server.accept()
    with stream:
        stream.sendall(struct.pack("!i", 12) + b"HTTP/1.1 400")


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
def test_what_can_be_no_name_of_a_host_is_told_in_words(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{host}:4000: .*; give HOST:PORT of the fleet"):
        connect((host, 4000), KEY)
    with pytest.raises(ConfigError, match="cannot listen on"):
        Listener((host, 0), KEY, lambda _: None)
    with pytest.raises(ConfigError, match="host="):
        Listener((f"{host}\0", 0), KEY, lambda _: None)


def test_addresses_are_parsed_or_refused() -> None:
    assert parse_address("host:4000", option="--join") == ("host", 4000)
    assert parse_address("[::1]:4000", option="--join") == ("::1", 4000)
    assert parse_address("4000", option="--join") == ("127.0.0.1", 4000)
    for wrong in ("host", "host:", "host:70000", "host:http", "host:" + "1" * 5000):
        with pytest.raises(ConfigError, match="--join"):
            parse_address(wrong, option="--join")
    with pytest.raises(ConfigError, match="cannot listen"):
        Listener(("192.0.2.1", 1), KEY, lambda _: None)
    with pytest.raises(ConfigError, match="give HOST:PORT"):
        connect(("no such host.invalid", 1), KEY)


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    file = make_key_file(tmp_path / "key")
    assert len(read_key(file)) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="cannot be made: File exists"):
        make_key_file(file)
    for mode in (0o640, 0o604, 0o620):
        os.chmod(file, mode)
        with pytest.raises(ConfigError, match="can be read by others"):
            read_key(file)
    os.chmod(file, 0o600)
    for words in ("", " \n", "short"):
        file.write_text(words)
        with pytest.raises(ConfigError, match="a key has 16 to 4096"):
            read_key(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_key(tmp_path / "absent")
