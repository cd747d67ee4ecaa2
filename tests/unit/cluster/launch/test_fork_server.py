"""The process that ranks are forked from, by itself: how it ends, and how what it has forked does."""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import suppress

import pytest

from elastic.cluster.launch import fork_server
from elastic.cluster.launch.fork_server import ForkServer


def test_a_fork_server_ends_in_silence_with_one_that_had_not_read_all() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = ForkServer(theirs, os.getpid())
    try:
        theirs.send(b"not read")
        ours.close()
        server.run()
    finally:
        os.close(server._parent)
        theirs.close()


def test_a_wish_whose_socket_found_no_descriptor_left_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error would end the fork server, and all its ranks with it."""
    monkeypatch.setattr(os, "fork", lambda: os.getpid())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        server = ForkServer(theirs, os.getpid())
        try:
            ours.send(json.dumps({"id": 7, "model": "none"}).encode())
            assert server._fork_next() == 0
            said = json.loads(ours.recv(1000))
            assert said == {"id": 7, "error": "the fork server has too many open files"}
        finally:
            os.close(server._parent)


@pytest.mark.parametrize("stdout", ["unread", "closed", "none"])
def test_a_rank_ends_in_order_whatever_became_of_what_it_prints(monkeypatch: pytest.MonkeyPatch, stdout: str) -> None:
    ours, theirs = socket.socketpair()
    server = ForkServer(theirs, os.getpid())

    def become(what: str) -> None:
        print("printed, and not written yet")
        if what == "closed":
            with suppress(OSError):
                sys.stdout.close()
        elif what == "none":
            sys.stdout = None  # type: ignore[assignment]

    monkeypatch.setattr(fork_server, "_be_a_rank", lambda _: become(stdout))
    pid = os.fork()
    if pid == 0:
        try:
            reader, writer = os.pipe()
            os.close(reader)
            sys.stdout = open(writer, "w")  # noqa: SIM115
            server._become_a_rank(0)
        finally:
            os._exit(7)  # it came back, into the server's code
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(server._parent)
    ours.close()
    theirs.close()
