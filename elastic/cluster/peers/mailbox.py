"""What has come from another rank and waits for a forward pass."""

from __future__ import annotations

import threading
from typing import Any

import torch

from elastic.engines.pipeline.transport import Key, StepFailure
from elastic.errors import RankLost, StateError

What = torch.Tensor | StepFailure
"""A tensor as bytes, [bytes]; or why there is none."""


MOST_FAILED = 1024
"""Of failed steps the last so many are known: far more than are in flight."""


class Mailbox:
    """Arrivals by their keys, until each is taken. Its condition guards what its owner keeps beside it."""

    def __init__(self, rank: str) -> None:
        self.rank = rank
        self.changed = threading.Condition()
        self.lost = ""
        """Why nothing more comes."""
        self._arrived: dict[Key, torch.Tensor] = {}
        self._failed: dict[int, StepFailure] = {}  # steps of which nothing more comes
        self._forgotten: dict[int, None] = {}

    # -- with `changed` held

    def put(self, key: Key, what: What) -> None:
        """Keep what came, a failure for all that did not come of its step, unless the step is forgotten."""
        if key.step in self._forgotten:
            return
        if isinstance(what, StepFailure):
            self._failed[key.step] = what
            _drop_oldest(self._failed)
        else:
            self._arrived[key] = what
        self.changed.notify_all()

    def take(self, key: Key) -> What | None:
        """Return what came for a key; None: nothing yet. Raises `RankLost` where nothing can come any more."""
        if key in self._arrived:
            return self._arrived.pop(key)
        if key.step in self._failed:
            return self._failed[key.step]
        if self.lost:
            raise RankLost(self.lost, rank=self.rank)
        return None

    # -- without

    def forget(self, step: int) -> None:
        """Keep nothing of a step, now or later."""
        with self.changed:
            self._forgotten[step] = None
            _drop_oldest(self._forgotten)
            self._failed.pop(step, None)
            for key in [key for key in self._arrived if key.step == step]:
                del self._arrived[key]

    def end(self, reason: str) -> None:
        """Nothing more comes, and what has come is dropped. The first reason counts."""
        with self.changed:
            self._arrived.clear()
            self._failed.clear()
            self.lost = self.lost or reason
            self.changed.notify_all()


def _drop_oldest(steps: dict[int, Any]) -> None:
    while len(steps) > MOST_FAILED:
        del steps[next(iter(steps))]


def as_hidden(what: What, like: torch.Tensor, frm: str, key: Key) -> torch.Tensor:
    """Return a tensor of the shape and dtype of `like`. Raises `StateError` for another, and the error of a failure."""
    if isinstance(what, StepFailure):
        raise what.error()
    if what.numel() != like.nbytes:
        raise StateError(
            f"rank {frm!r} sent {what.numel():,} bytes as {key}, expected were {like.nbytes:,}: {like.dtype} "
            f"{tuple(like.shape)}; the ranks do not compute the same step"
        )
    return what.view(like.dtype).view(like.shape).to(like.device)
