"""Runs of replicated layers: rows of the batch are scattered where one begins and gathered where it ends.

(CoCoServe, section 3.2.) The layer's own forward gets its own rows and goes on through the model's loop with them; the
replicas of each other place compute theirs beside it, in its lane, layer after layer. Nothing is exchanged in between.
Where a forward pass wants to see what layers return, or gives them what is not known to belong to rows, the layers' own
place computes all rows. Where one row holds the tokens of many requests, the requests are shared out (`spans.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch

from elastic.batch import compute_all, compute_part
from elastic.errors import StateError
from elastic.hooks.detours import Args, Kwargs
from elastic.hooks.lanes import Lane, Mark, Part, add_marks, mark, use_threads
from elastic.hooks.layer import LayerWeights
from elastic.hooks.requests import share_requests
from elastic.hooks.rows import BY_ROWS, Inputs, NotByRows, Reading, Rows, gather, hidden_of
from elastic.hooks.shares import Speeds, balanced, share_out
from elastic.hooks.skeleton import Skeleton
from elastic.hooks.spans import BY_REQUESTS, RequestCache, request_cache
from elastic.hooks.stand_in import call_instead
from elastic.hooks.timeline import Course, PartTime, Timeline
from elastic.hooks.weights import ModelWeights

logger = logging.getLogger(__name__)
LOOK_EVERY = 32
"""Passes."""
HOME = None
"""The place of a layer itself, whichever that is."""


class RowCaches(Protocol):
    """What runs need of the KV cache."""

    def begin_forward(self, cache: Any, layers: Collection[int]) -> None:
        """Layers of these indices may be split by rows from now on; all others are whole again, if there is room."""
        ...

    def rows(self, cache: Any, layer: int, places: Sequence[str | None]) -> tuple[int, ...] | None:
        """The rows that a layer holds at each place; None: it holds nothing, or others have some."""
        ...

    def split(self, cache: Any, layers: Sequence[int], rows: Sequence[tuple[str | None, int]]) -> list[Any] | None:
        """Have so many rows of these layers at each place, in this order: for each place the cache as it sees it.

        None: this cache cannot be split, or a place has no room; it is good for all rows together, wherever they lie.
        """
        ...


@dataclass(frozen=True)
class Replica:
    """A copy of a decoder layer at another place."""

    unit: LayerWeights
    skeleton: Skeleton
    lane: Lane
    stands_in: bool
    """Whether it can be called in its layer's place."""
    version: int
    """How often its layer had been written when its bytes were copied."""


class Run:
    """Consecutive layers that are at the same places beside their own."""

    def __init__(self, weights: ModelWeights, first: int, replicas: Sequence[Mapping[str, Replica]]) -> None:
        self.first = first
        self.replicas = tuple(replicas)
        """Of each layer, by place."""
        self.layers = tuple(range(first, first + len(replicas)))
        self.lanes = [replica.lane for replica in replicas[0].values()]
        home = weights.layers[first].pool
        self.home, self.device = home.name, home.backend.device
        self.places: tuple[str | None, ...] = (HOME, *(lane.place for lane in self.lanes))
        self.names = (home.name, *(lane.place for lane in self.lanes))
        self.stand_in = all(replica.stands_in for by_place in replicas for replica in by_place.values())
        """Whether replicas can be called in their layers' places."""
        self.passes = 0
        self._units = [unit for layer in self.layers for unit in weights.units(layer)]
        self._version = sum(min(replica.version for replica in by_place.values()) for by_place in replicas)

    def require_unwritten(self) -> None:
        """Raises `StateError` if a layer was written since it was replicated: its replicas are old."""
        if sum(unit.version() for unit in self._units) != self._version:
            raise StateError(
                f"weights of layers {self.layers[0]} to {self.layers[-1]} were written after they were replicated; "
                "evict their replicas and replicate them again"
            )


class Flight:
    """One pass of a batch through a run.

    `here`, the first place that has rows, computes them in this thread, the others theirs in their lanes.
    """

    def __init__(
        self,
        run: Run,
        inputs: Inputs,
        counts: Sequence[int],
        caches: Sequence[Any],
        reading: Reading = BY_ROWS,
    ) -> None:
        self.run = run
        self._at = 0
        self._marks: list[tuple[Mark, Mark]] = []
        self._threads = torch.get_num_threads()
        batch, stops = sum(counts), [sum(counts[: i + 1]) for i in range(len(counts))]
        devices = [run.device, *(lane.device for lane in run.lanes)]
        rows = [Rows(b - n, b, batch, d, reading) for b, n, d in zip(stops, counts, devices, strict=True)]
        here = next(place for place, count in enumerate(counts) if count)
        self._place, self._name, self._device = run.places[here], run.names[here], devices[here]
        self._rows, self._cache, self._hidden = rows[here], caches[here], rows[here].take(inputs.hidden)
        self._row_tokens = inputs.hidden.shape[1] if reading is BY_ROWS else 1
        self._share = self._divide([d for d, count in zip(devices, counts, strict=True) if count])
        self._parts = [
            Part(lane, its, inputs.hidden, cache, self._share)
            for lane, its, cache in zip(run.lanes, rows[1:], caches[1:], strict=True)
            if its.count and its is not self._rows
        ]

    def enter(self, layer: int, inputs: Inputs) -> tuple[Args, Kwargs]:
        """Begin the next layer: what its own forward is called with. Raises `NotByRows`, with nothing begun."""
        if self._at == len(self.run.layers) or self.run.layers[self._at] != layer:
            raise StateError(
                f"layer {layer} was called out of its turn in the replicated run {self.run.layers}: this model cannot "
                "be computed by rows; evict the replicas"
            )
        own = inputs.take(self._rows, self._cache)
        theirs = [inputs.take(part.rows, part.cache) for part in self._parts]
        for part, its in zip(self._parts, theirs, strict=True):
            part.step(self.run.replicas[self._at][part.lane.place].skeleton.module, its)
        use_threads(self._device, self._share)
        compute_part(self._rows.count, self._rows.batch)
        call_instead(self.run.replicas[self._at][self._place].skeleton.module if self._place is not HOME else None)
        self._began = mark(self._device)
        return own.call(inputs.hidden if self._at and self._place is HOME else self._hidden)

    def leave(self, output: Any) -> Any:
        """The own forward of the layer has ended: after the last one, the output for all rows."""
        add_marks(self._marks, self._began, mark(self._device))
        compute_all()
        self._hidden = hidden_of(output)
        self._at += 1
        return None if not self.ended else self._gather(output)

    @property
    def ended(self) -> bool:
        return self._at == len(self.run.layers)

    def abort(self) -> None:
        """The forward pass has ended half way: return when nothing is computed for it any more."""
        for part in self._parts:
            part.join()
        use_threads(self._device, self._threads)
        compute_all()
        call_instead(None)

    def courses(self) -> list[Course]:
        """What each place did, and when."""
        mine = Course(self._name, self._device, self._rows.count, self._tokens(self._rows), self._marks)
        others = [
            Course(part.lane.place, part.lane.device, part.rows.count, self._tokens(part.rows), part.marks)
            for part in self._parts
        ]
        return [mine, *others]

    def _tokens(self, rows: Rows) -> int:
        return rows.count * self._row_tokens

    def _gather(self, output: Any) -> Any:
        try:
            outputs = [output, *(part.finish(self.run.device) for part in self._parts)]
        finally:
            self.abort()
        counts = [self._rows.count, *(part.rows.count for part in self._parts)]
        return gather(outputs, counts, self.run.device, self._rows.reading.axis)

    def _divide(self, devices: Sequence[torch.device]) -> int:
        """Threads for each place on a CPU, so that they are no more together than one place had."""
        return max(1, self._threads // max(1, sum(device.type == "cpu" for device in devices)))


class RunLayer:
    """The detour of one layer of a run."""

    def __init__(self, runs: Runs, run: Run, layer: int, names: Sequence[str]) -> None:
        self._runs = runs
        self._run = run
        self._layer = layer
        self._names = names

    def enter(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        return self._runs.enter(self._run, self._layer, Inputs(self._names, args, kwargs))

    def leave(self, output: Any) -> Any:
        return self._runs.leave(output)


class Runs:
    """The runs of a model, and what each thread's forward pass does with them."""

    def __init__(self, weights: ModelWeights, caches: RowCaches, names: Sequence[Sequence[str]]) -> None:
        self._weights = weights
        self._caches = caches
        self._names = names
        self._replicated: tuple[int, ...] = ()
        self._mine = threading.local()  # .flight, .scattering
        self._speeds = Speeds()
        self.timeline = Timeline(self._speeds)
        self._told: set[str] = set()

    @property
    def any(self) -> bool:
        return bool(self._replicated)

    def lay(self, replicas: Mapping[int, Mapping[str, Replica]]) -> None:
        """Layers have these replicas from now on; at a safe point."""
        self._replicated = tuple(sorted(layer for layer, by_place in replicas.items() if by_place))
        runs: dict[int, Run] = {}
        devices = [layer.pool.backend.device for layer in self._weights.layers]
        for stretch in _stretches(self._replicated, replicas, devices):
            run = Run(self._weights, stretch[0], [dict(sorted(replicas[layer].items())) for layer in stretch])
            runs |= dict.fromkeys(run.layers, run)
        for layer, names in enumerate(self._names):
            others = [d for d in self._weights.detours.get(layer, ()) if not isinstance(d, RunLayer)]
            mine = [RunLayer(self, runs[layer], layer, names)] if layer in runs else []
            self._weights.detour(layer, [*others, *mine])

    # -- in the thread of a forward pass

    def begin_forward(self, cache: Any, *, whole: bool) -> None:
        """An outermost forward pass of the model begins; `whole`: what its layers return for all rows is wanted."""
        self.end_forward()
        self._mine.scattering = self.any and not whole
        if cache is not None:
            self._caches.begin_forward(cache, self._replicated)

    def end_forward(self) -> bool:
        """It is over, well or not. Returns whether it has ended in the middle of a run."""
        flight, self._mine.flight, self._mine.scattering = getattr(self._mine, "flight", None), None, False
        if flight is not None:
            flight.abort()
        return flight is not None

    def enter(self, run: Run, layer: int, inputs: Inputs) -> tuple[Args, Kwargs] | None:
        flight: Flight | None = getattr(self._mine, "flight", None)
        try:
            if flight is None and layer == run.first and getattr(self._mine, "scattering", False):
                flight = self._mine.flight = self._scatter(run, inputs)
            return None if flight is None else flight.enter(layer, inputs)
        except NotByRows as reason:
            if flight is not None and layer != run.first:
                raise StateError(
                    f"layer {layer} was given {reason}, unlike the layers before it; evict the replicas"
                ) from None
            self.end_forward()
            self._mine.scattering = True
            self._tell(f"layers {run.layers} are computed at one place: it is not known which rows have {reason}")
            return None

    def leave(self, output: Any) -> Any:
        flight: Flight | None = getattr(self._mine, "flight", None)
        if flight is None:
            return None
        if output is None:
            self.end_forward()
            return None
        gathered = None
        try:
            gathered = flight.leave(output)
        finally:
            if flight.ended:
                self._mine.flight = None
        if flight.ended:
            self.timeline.passed(flight.courses(), len(flight.run.layers))
        return gathered

    def passes(self) -> tuple[tuple[PartTime, ...], ...]:
        """When the places computed their parts of the last passes through runs, oldest first."""
        return self.timeline.passes()

    def _scatter(self, run: Run, inputs: Inputs) -> Flight | None:
        hidden = inputs.hidden
        if not isinstance(hidden, torch.Tensor):
            raise NotByRows("no hidden_states")
        if torch.is_grad_enabled() and hidden.requires_grad:
            raise StateError(
                f"layers {run.layers} have replicas, which are not differentiated: evict them, or run under "
                "torch.no_grad()"
            )
        run.require_unwritten()
        requests = request_cache(inputs)
        if requests is not None:
            return self._scatter_requests(run, inputs, requests)
        cache = inputs.cache
        present = None if cache is None else self._caches.rows(cache, run.first, run.places)
        if present is not None and sum(present) != hidden.shape[0]:
            return None  # the cache has words for it
        counts = self._counts(run, hidden.shape[0], present)
        caches = [None] * len(counts)
        if cache is not None:
            found = self._caches.split(cache, run.layers, list(zip(run.places, counts, strict=True)))
            if found is None:
                if any(counts[1:]):
                    self._tell(f"layers {run.layers} are computed at one place: their KV cache cannot be split by rows")
                return None
            caches = found
        return Flight(run, inputs, counts, caches) if any(counts[1:]) or self._to_be_timed(run, hidden) else None

    def _scatter_requests(self, run: Run, inputs: Inputs, cache: RequestCache) -> Flight | None:
        """Each place computes some requests of an engine's batch; their KV cache stays where it is."""
        tokens = cache.new_tokens()
        if len(tokens) == 1 and run.stand_in:
            shares = _only(self._speeds.best_alone(run.names), run.names)
        else:
            shares = share_requests(tokens, self._speeds.of(run.names))
        cuts = list(pairwise(accumulate(shares, initial=0)))
        counts = [sum(tokens[start:stop]) for start, stop in cuts]
        if not any(counts[1:]) and not self._to_be_timed(run, inputs.hidden):
            return None
        caches = [cache.of_requests(start, stop) if stop > start else None for start, stop in cuts]
        return Flight(run, inputs, counts, caches, BY_REQUESTS)

    def _counts(self, run: Run, batch: int, present: tuple[int, ...] | None) -> tuple[int, ...]:
        """The rows of each place. Those of a running generation are thought over now and then only."""
        run.passes += 1
        if present is not None and balanced(present) and run.passes % LOOK_EVERY:
            return present
        if batch == 1 and run.stand_in:
            best = self._speeds.best_alone(run.names, None if present is None else present.index(1))
            return _only(best, run.names)
        return share_out(batch, self._speeds.of(run.names), present)

    def _to_be_timed(self, run: Run, hidden: torch.Tensor) -> bool:
        """Whether this is a step of one token at the layers' own place, and it is not known how long that takes."""
        return hidden.shape[:2] == (1, 1) and run.stand_in and not self._speeds.knows_alone(run.home)

    def _tell(self, message: str) -> None:
        """Once."""
        if message not in self._told:
            self._told.add(message)
            logger.warning(message)


def _only(best: int, places: Sequence[str]) -> tuple[int, ...]:
    """All for one place."""
    return tuple(int(place == best) for place in range(len(places)))


def _stretches(
    layers: Sequence[int], replicas: Mapping[int, Mapping[str, Replica]], devices: Sequence[torch.device]
) -> list[list[int]]:
    """Consecutive layers on one device with replicas at the same places."""
    found: list[list[int]] = []
    for layer in layers:
        last = found[-1][-1] if found else None
        alike = last is not None and replicas[last].keys() == replicas[layer].keys()
        if alike and last == layer - 1 and devices[last] == devices[layer]:
            found[-1].append(layer)
        else:
            found.append([layer])
    return found
