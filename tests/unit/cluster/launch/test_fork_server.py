"""The process that ranks are forked from, by itself: how it ends, and how what it has forked does."""

from __future__ import annotations

import os
import socket
import sys

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


def test_a_rank_ends_in_order_where_nobody_reads_what_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    server = ForkServer(theirs, os.getpid())
    monkeypatch.setattr(fork_server, "_be_a_rank", lambda _: print("printed, and not written yet"))
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
