"""How many batches an instance has in flight, so that all stages of its path have something to compute."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.engines.pipeline.path import LayerPath

LOOK_STEPS = 16
"""Of an instance, between two looks at which others have work: each change waits for the steps in flight."""


class BatchCount:
    """As many batches as stages, divided by the instances that have work where its home computes. (KunServe, section 4)

    An instance of which the home computes layers counts at a look if a step of it came since the one before; when the
    path, or who these are, has changed, all of them do until the next look. Others, of whose steps the home sees none,
    do not count.
    """

    def __init__(self) -> None:
        self._path: LayerPath | None = None
        self._look_at, self._seen, self._count = 0, dict[str, int](), 1

    def of(self, path: LayerPath, steps: int, others: Mapping[str, int]) -> int:
        """Return it for the next step; `steps` were begun, and of other instances so many came here."""
        if path is not self._path or others.keys() != self._seen.keys():
            working = len(others)
        elif steps >= self._look_at:
            working = sum(count > self._seen.get(home, 0) for home, count in others.items())
        else:
            return self._count
        self._path, self._look_at, self._seen = path, steps + LOOK_STEPS, dict(others)
        self._count = -(-path.stages // (1 + working))
        return self._count
