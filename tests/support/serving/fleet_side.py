"""A fleet's side of a rank, for tests: requests go out, tokens and the end are collected."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from elastic.cluster.control.messages import News, Refused, Submit
from elastic.cluster.rank.client import RankClient
from elastic.engines.base import Request
from elastic.engines.core.step import SequenceState

PATIENCE_S = 60


class FleetSide:
    """Listens to one rank."""

    def __init__(self, client: RankClient) -> None:
        self.client = client
        self.changed = threading.Condition()
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.finished: dict[str, str] = {}
        self.refused: dict[str, Exception] = {}
        self.messages: list[Any] = []
        self.lost: list[str] = []
        self.heard_all = False
        client.listen(self._hear, self._end)

    def submit(self, name: str, prompt: tuple[int, ...] = (5, 6, 7), tokens: int = 8, **options: Any) -> None:
        """Send a request of one answer."""
        request = Request(prompt, tokens, id=name, ignore_eos=True)
        self.client.send(Submit((SequenceState(name, request, 0, 1),), **options))

    def wait(self, what: Callable[[], object], why: str = "") -> None:
        """Wait until something holds of what was heard."""
        with self.changed:
            assert self.changed.wait_for(what, PATIENCE_S), (why, self.finished, self.refused, self.lost)

    def answer(self, name: str, **request: Any) -> list[int]:
        """Send a request, and return its tokens when it has ended."""
        self.submit(name, **request)
        self.wait(lambda: name in self.finished, name)
        return self.tokens[name]

    def end(self) -> str:
        """Wait for the rank's end, and return its reason."""
        self.wait(lambda: self.lost, "no end")
        assert len(self.lost) == 1
        return self.lost[0]

    def _hear(self, message: Any) -> None:
        with self.changed:
            self.messages.append(message)
            if isinstance(message, Refused):
                self.refused[message.request] = message.error
            if isinstance(message, News):
                for output, start in zip(message.outputs, message.starts, strict=True):
                    assert start == len(self.tokens[output.request])
                    self.tokens[output.request] += output.tokens
                    if output.finish is not None:
                        self.finished[output.request] = output.finish
            self.changed.notify_all()

    def _end(self, why: str) -> None:
        with self.changed:
            self.lost.append(why)
            self.heard_all = self.client.heard_all
            self.changed.notify_all()
