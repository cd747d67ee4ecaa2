"""Hidden states over a gloo group: between two processes, of which one ends, is stopped, or says goodbye."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic.cluster.peers.torch_transport import TorchTransport
from elastic.engines.pipeline.transport import Key, StepFailure
from elastic.errors import ConfigError, RankLost, StateError

LIKE = torch.zeros(1, 64, 128)


@pytest.fixture
def ends() -> Iterator[list[TorchTransport]]:
    """Those of two ranks of this process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        made = [threads.submit(TorchTransport, rank, "ab", store, "g") for rank in "ab"]
        transports = [future.result(30) for future in made]
        yield transports
        for done in [threads.submit(transport.close) for transport in transports]:
            done.result(30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_sent_is_received_by_its_key_whatever_becomes_of_the_tensor(
    dtype: torch.dtype, ends: list[TorchTransport]
) -> None:
    a, b = ends
    hidden, sent = torch.rand(1, 3, 4).to(dtype), []
    keys = [Key(step, 2, site) for step in range(10) for site in range(2)]
    for key in keys:
        a.send("b", hidden, key)
        sent.append(hidden.clone())
        hidden += 1
    b.send("a", hidden, Key(0, 2))
    for number in (*range(10, 20), *range(10)):
        assert torch.equal(b.receive("a", hidden, keys[number]), sent[number])
    assert torch.equal(a.receive("b", hidden, Key(0, 2)), hidden)


def test_a_step_that_failed_is_told_of_and_forgotten(ends: list[TorchTransport]) -> None:
    a, b = ends
    a.fail("b", 0, StepFailure("rank 'c' was lost", "c"))
    with pytest.raises(RankLost, match="'c' was lost"):
        b.receive("a", LIKE, Key(0, 1))
    a.send("b", LIKE, Key(1, 1))
    a.send("b", LIKE[:, 1:], Key(2, 1))
    with pytest.raises(StateError, match="do not compute the same step"):
        b.receive("a", LIKE, Key(2, 1))
    b.forget(1)
    assert b._pair("a").box._arrived == {}


def test_who_waits_is_told_that_a_rank_was_lost(ends: list[TorchTransport]) -> None:
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(ends[1].receive, "a", LIKE, Key(0, 0))
        ends[1].lost("a")
        with pytest.raises(RankLost) as error:
            waiting.result(10)
    assert error.value.rank == "a"


def test_strangers_to_the_group_are_refused(ends: list[TorchTransport]) -> None:
    with pytest.raises(ConfigError, match="'c' is none of"):
        ends[0].send("c", LIKE, Key(0, 0))
    with pytest.raises(ConfigError, match="rank='c'"):
        TorchTransport("c", "ab", dist.HashStore(), "g")


CHILD = """
import sys, torch
import torch.distributed as dist
from datetime import timedelta
from elastic.cluster.peers.torch_transport import TorchTransport
from elastic.engines.pipeline.transport import Key
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=30))
store.set("up", "")
transport = TorchTransport("b", "ab", store, "g", timeout_s=3)
like = torch.zeros(1, 64, 128)
for step in range(5):
    transport.send("a", transport.receive("a", like, Key(step, 0)) * 2, Key(step, 1))
if sys.argv[2] == "goodbye":
    transport.close()
else:
    transport.receive("a", like, Key(5, 0))
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["goodbye", "killed", "stopped"])
def test_a_process_that_ends_or_stops_is_an_error(end: str) -> None:
    """One that is stopped is found out by the timeout; it ends cleanly, or with the error, never by an abort."""
    with ExitStack() as stack:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
        child = stack.enter_context(
            subprocess.Popen([sys.executable, "-P", "-c", CHILD, str(store.port), end], stderr=subprocess.PIPE)
        )
        stack.callback(child.kill)
        store.wait(["up"], timedelta(seconds=60))
        a = TorchTransport("a", "ab", store, "g", timeout_s=3)
        stack.callback(a.close)
        for step in range(5):
            a.send("b", LIKE + step, Key(step, 0))
            assert torch.equal(a.receive("b", LIKE, Key(step, 1)), (LIKE + step) * 2)
        waiting: Future[Any] = stack.enter_context(ThreadPoolExecutor(1)).submit(a.receive, "b", LIKE, Key(5, 1))
        if end != "goodbye":
            os.kill(child.pid, {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[end])
        with pytest.raises(RankLost) as error:
            waiting.result(30)
        assert error.value.rank == "b"
        if end == "goodbye":
            assert child.wait(30) == 0


def test_what_came_before_a_goodbye_is_received(ends: list[TorchTransport]) -> None:
    a, b = ends
    a.send("b", LIKE + 1, Key(0, 0))
    a.close()
    assert torch.equal(b.receive("a", LIKE, Key(0, 0)), LIKE + 1)
    with pytest.raises(RankLost, match="has closed"):
        b.receive("a", LIKE, Key(1, 0))
    with pytest.raises(RankLost):
        b.send("a", LIKE, Key(1, 0))
