"""Hidden states of one instance over torch.distributed: a gloo group of its ranks, made without a default group.

In each direction messages have the numbers of a sequence, not keys: whoever receives has always posted the next one, so
that nothing waits in a group that its pair may be lost for (gloo gives a pair up when one wait takes too long). What
is on a GPU goes through host memory.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

from elastic.cluster.peers import frames
from elastic.cluster.peers.mailbox import Mailbox, as_hidden
from elastic.engines.pipeline.transport import Key, StepFailure
from elastic.errors import ConfigError, RankLost, StateError

TIMEOUT_S = 10.0
_HEAD, _NUMBERS = 5, 1 << 20  # a head: step, layer, site, bytes, kind
_HIDDEN, _FAILURE, _ALIVE, _GOODBYE = range(4)
Message = tuple[list[int], torch.Tensor | None]


class TorchTransport:
    """A `Transport`. All ranks of the instance make theirs at the same time, with the same `group` and `store`.

    A rank that says nothing for `timeout_s` is lost, as is one whose connection ends. Group names are used once.
    Traffic is neither encrypted nor authenticated.
    """

    def __init__(
        self, rank: str, ranks: Sequence[str], store: Store, group: str, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Wait for the others. Raises `ConfigError` for a rank that is none of `ranks`, `StateError` if one is late."""
        if rank not in ranks:
            raise ConfigError(f"rank={rank!r} is none of ranks={tuple(ranks)}")
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s={timeout_s!r} must be above 0")
        self._timeout = timedelta(seconds=timeout_s)
        try:
            prefixed = PrefixStore(group, store)
            self._group: Any = ProcessGroupGloo(prefixed, ranks.index(rank), len(ranks), self._timeout)
        except RuntimeError as error:
            raise StateError(f"ranks {tuple(ranks)} did not all join {group!r} in {timeout_s:g} s: {error}") from error
        self._pairs = {
            other: _Pair(self._group, other, ranks.index(other), self._timeout) for other in ranks if other != rank
        }
        for pair in self._pairs.values():
            pair.start()

    def send(self, to: str, hidden: torch.Tensor, key: Key) -> None:
        """Send a tensor; see `Transport`."""
        elements = hidden.detach().to("cpu", copy=True).contiguous().view(-1).view(torch.uint8)
        self._pair(to).send(([*key, elements.numel(), _HIDDEN], elements))

    def fail(self, to: str, step: int, failure: StepFailure) -> None:
        """Say that nothing more of a step will come; see `Transport`."""
        text = torch.frombuffer(bytearray(frames.failure_text(failure)), dtype=torch.uint8)
        self._pair(to).send(([*Key(step, 0), text.numel(), _FAILURE], text))

    def receive(self, frm: str, like: torch.Tensor, key: Key) -> torch.Tensor:
        """Wait for a tensor; see `Transport`."""
        box = self._pair(frm).box
        with box.changed:
            box.changed.wait_for(lambda: box.has(key))
            what = box.take(key)
        return as_hidden(what, like, frm, key)

    def forget(self, step: int) -> None:
        """Keep nothing of a step; see `Transport`."""
        for pair in self._pairs.values():
            pair.box.forget(step)

    def lost(self, rank: str) -> None:
        """Have every call for a rank raise `RankLost`, now and from now on."""
        self._pair(rank).box.end(f"rank {rank!r} was lost")

    def close(self) -> None:
        """End it; see `Transport`. It waits until the others have heard of it, no longer than the timeout."""
        for pair in self._pairs.values():
            pair.close()
        for pair in self._pairs.values():
            pair.join()
        self._group = None  # else the end of the process aborts it

    def _pair(self, rank: str) -> _Pair:
        if rank not in self._pairs:
            raise ConfigError(f"rank {rank!r} is none of this transport's: {', '.join(self._pairs)}")
        return self._pairs[rank]


class _Pair:
    """The two threads for another rank, and what has come from it."""

    def __init__(self, group: Any, rank: str, index: int, timeout: timedelta) -> None:
        self.box = Mailbox(rank)
        self._group, self._rank, self._index, self._timeout = group, rank, index, timeout
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"elastic-gloo-{rank}", daemon=True)
            for work in (self._send_all, self._receive_all)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def send(self, message: Message) -> None:
        """Queue a message. Raises `RankLost`."""
        if self.box.lost:
            raise RankLost(self.box.lost, rank=self._rank)
        self._outbox.put(message)

    def close(self) -> None:
        """Say goodbye. Can be called twice."""
        self.box.end("the transport was closed")
        self._outbox.put((_head(_GOODBYE), None))

    def join(self) -> None:
        """Wait for the threads."""
        for thread in self._threads:
            thread.join()
        self._group = None

    def _run(self, work: Any) -> None:
        """Do the work of a thread until a goodbye, or until the pair has broken."""
        try:
            work()
        except RuntimeError as error:  # torch's for anything that goes wrong
            self.box.finish(f"rank {self._rank!r} has gone: {error}")
            self._outbox.put((_head(_GOODBYE), None))  # for the thread that sends

    def _send_all(self) -> None:
        """Send what is queued, or that this rank is alive."""
        for number in itertools.count():
            head, payload = _head(_ALIVE), None
            with suppress(queue.Empty):
                head, payload = self._outbox.get(timeout=self._timeout.total_seconds() / 4)
            tag = 2 * (number % _NUMBERS)
            self._group.send([torch.tensor(head)], self._index, tag).wait(self._timeout)
            if payload is not None:
                self._group.send([payload], self._index, tag + 1).wait(self._timeout)
            if head[-1] == _GOODBYE:
                return

    def _receive_all(self) -> None:
        for number in itertools.count():
            tag = 2 * (number % _NUMBERS)
            head = torch.empty(_HEAD, dtype=torch.int64)
            self._group.recv([head], self._index, tag).wait(self._timeout)
            *numbers, nbytes, kind = head.tolist()
            if kind == _GOODBYE:
                self.box.finish(f"rank {self._rank!r} has closed its transport")
                self._outbox.put((_head(_GOODBYE), None))  # it waits for ours
                return
            if kind == _ALIVE:
                continue
            elements = torch.empty(nbytes, dtype=torch.uint8)
            self._group.recv([elements], self._index, tag + 1).wait(self._timeout)
            with self.box.changed:
                what = elements if kind == _HIDDEN else frames.failure_of(elements)
                self.box.put(Key(*numbers), what)


def _head(kind: int) -> list[int]:
    """Return the head of a message of a kind that is about no step."""
    return [*Key(0, 0), 0, kind]
