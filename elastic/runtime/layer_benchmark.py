"""A short measurement of what planners need to know: a few decoder layers, and the way between places.

Layers are run with what the model itself would give them, at a few batch sizes, on every device that has a place: by
one thread, and by as many side by side as it has places. Rows of hidden states are sent between the places. Some tenths
of a second for small layers on a CPU.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import combinations
from typing import Any, TypeVar

import torch
from torch import nn

from elastic.config import Place
from elastic.errors import ConfigError
from elastic.hooks.replicas.split_rows import BatchSlice, LayerInputs, NotSplittable
from elastic.hooks.replicas.worker import ReplicaShard, ReplicaWorker, use_threads
from elastic.memory.backends.streams import synchronize
from elastic.planning.measured_cost import Calibration, LinearLatency, Points, fit
from elastic.weights.decoder import Decoder, parameter_names
from elastic.weights.proxy.transfer_cache import moved

ROWS = (1, 4, 16)
REPEATS = 5
LONG_S = 0.5
"""What takes so long is repeated twice only."""
WALK_BYTES = 128 << 20
"""Of the layers that are run in turn: more than caches hold, so that weights come from memory as they do in a model."""
MOST_BESIDE = 8
"""Places of one device that are measured side by side; more are taken to take turns."""
HANDED = 16
"""Layers of a run whose inputs are handed to a replica."""
T = TypeVar("T")
Call = tuple[tuple[Any, ...], dict[str, Any]]


def measure(decoder: Decoder, places: Sequence[Place], rows: Sequence[int] = ROWS, tokens: int = 1) -> Calibration:
    """Measure the seconds of a layer and of what goes between places, for so many rows of `tokens` tokens each.

    The decoder is that of a model which is not wrapped, and can run a forward pass where it is. With one place nothing
    is measured: there is nothing to choose. Raises `ConfigError` for layers that no replica could compute rows of.
    """
    if len(places) < 2:
        return Calibration({place.name: LinearLatency(1e-3, 0.0) for place in places})
    layers = _walked(decoder)
    with torch.inference_mode(), _splittable():
        calls = {count: _calls(decoder, layers, count, tokens) for count in rows}
        hidden = {count: _hidden(given[0]) for count, given in calls.items()}
        points = {
            device: _layer_points(
                [  # the layers, or copies of them on another device
                    layer if next(layer.parameters()).device == device else copy.deepcopy(layer).to(device)
                    for layer in layers
                ],
                device,
                calls,
                min(MOST_BESIDE, sum(place.device == device for place in places)),
                tokens,
            )
            for device in dict.fromkeys(place.device for place in places)
        }
        links = {(a.name, b.name): _link_points(hidden, a.device, b.device) for a, b in combinations(places, 2)}
        names = {place.name.partition("#")[0]: place.device for place in places}
        return fit(
            {place.name: points[place.device][0] for place in places},
            links,
            {name: points[device][1:] for name, device in names.items()},
            _handing(layers[0], calls[max(rows)][0]) if max(rows) > 1 else 0.0,
        )


@contextmanager
def _splittable() -> Iterator[None]:
    """Say in words what of a layer's inputs cannot be divided."""
    try:
        yield
    except NotSplittable as reason:
        words = f"its layers are not computed at several places: it is not known which rows have {reason}"
        raise ConfigError(words) from None


class _Caught(Exception):
    """The forward pass got as far as the last layer that is wanted."""


def _walked(decoder: Decoder) -> list[nn.Module]:
    """Return layers around the middle, as many as caches do not hold."""
    middle = len(decoder.layers) // 2
    nbytes = sum(p.nbytes for p in decoder.layers[middle].parameters())
    count = min(len(decoder.layers), -(-WALK_BYTES // max(1, nbytes)))
    first = min(middle - count // 2, len(decoder.layers) - count)
    return list(decoder.layers[first : first + count])


def _calls(decoder: Decoder, layers: Sequence[nn.Module], rows: int, tokens: int) -> list[Call]:
    """Return what the model calls each of these layers with for such a batch."""
    caught: list[Call] = []

    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append((args, kwargs))
        if len(caught) == len(layers):
            raise _Caught

    model = decoder.roots[0]
    device = next(model.parameters()).device
    hooks = [layer.register_forward_pre_hook(catch, with_kwargs=True) for layer in layers]
    try:
        model(torch.ones(rows, tokens, dtype=torch.long, device=device), use_cache=False)
    except _Caught:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return caught


def _hidden(call: Call) -> torch.Tensor:
    """Return the hidden states of a call, [rows, tokens, d]."""
    args, kwargs = call
    hidden = args[0] if args else kwargs["hidden_states"]
    assert isinstance(hidden, torch.Tensor)
    return hidden


class _Walk:
    """A pass through some layers by this thread and workers beside it, as in a run of replicated layers."""

    def __init__(self, layers: Sequence[nn.Module], device: torch.device, workers: Sequence[ReplicaWorker]) -> None:
        self._layers = layers
        self._names = parameter_names(layers[0])
        self.device = device
        self._workers = workers

    def go(self, calls: Sequence[Call], at_once: int) -> None:
        """Compute at so many places, each with its share of the threads of an operation.

        Each begins elsewhere: places have weights of their own, and do not find in a cache what another has just read.
        """
        threads, count = torch.get_num_threads(), len(self._layers)
        share, hidden = max(1, threads // at_once), _hidden(calls[0])
        rows = [BatchSlice(0, len(hidden), len(hidden), self.device) for _ in range(at_once - 1)]
        workers = self._workers[: at_once - 1]
        parts = [ReplicaShard(worker, its, hidden, None, share) for worker, its in zip(workers, rows, strict=True)]
        use_threads(self.device, share)
        for step, (layer, call) in enumerate(zip(self._layers, calls, strict=True)):
            for place, part in enumerate(parts, 1):
                its = self._layers[(step + count * place // at_once) % count]
                part.step(its, LayerInputs(self._names, *call).take(part.rows, None))
            layer(*call[0], **call[1])
        for part in parts:
            part.finish(self.device)
        use_threads(self.device, threads)


def _layer_points(
    layers: Sequence[nn.Module], device: torch.device, calls: dict[int, list[Call]], most: int, tokens: int
) -> list[Points]:
    """Measure (tokens of all rows, seconds of a layer) alone, for two places side by side, for three, up to `most`.

    Several share a batch: what they would not have together is not measured, but for two numbers of rows at least. All
    are timed in turn, round after round, so that a disturbance does not tell on one of them alone.
    """
    given = {
        count: [
            (moved(args, device), {name: moved(value, device) for name, value in kwargs.items()})
            for args, kwargs in calls[count]
        ]
        for count in sorted(calls)
    }
    with ExitStack() as stack:
        workers = [stack.enter_context(closing(ReplicaWorker("calibration", device))) for _ in range(most - 1)]
        walk = _Walk(layers, device, workers)
        works: dict[tuple[int, int], Callable[[], object]] = {
            (at_once, count): partial(walk.go, given[count], at_once)
            for at_once in range(1, most + 1)
            for place, count in enumerate(given)
            if place < 2 or count * at_once <= max(given)
        }
        seconds = _in_turn(works, device)
    points: list[Points] = []
    for at_once in range(1, most + 1):
        points.append([(n * tokens, took / len(layers)) for (times, n), took in seconds.items() if times == at_once])
    return points


def _link_points(hidden: dict[int, torch.Tensor], origin: torch.device, target: torch.device) -> Points:
    """Measure (bytes, seconds) from a thread at one place to one at the other and into a tensor there."""
    points = []
    with ThreadPoolExecutor(1) as thread:
        for rows in hidden.values():
            source = rows.to(origin)
            send = partial(thread.submit, source.to, target, copy=True)
            points.append((source.nbytes, _seconds(lambda send=send: send().result(), target)))  # type: ignore[misc]
    return points


def _handing(layer: nn.Module, call: Call) -> float:
    """Measure the seconds to hand one layer's inputs to one replica, as a run of replicated layers does."""
    inputs, hidden = LayerInputs(parameter_names(layer), *call), _hidden(call)
    device, batch = hidden.device, hidden.shape[0]
    worker = ReplicaWorker("calibration", device)

    def run() -> None:
        own, theirs = BatchSlice(0, 1, batch, device), BatchSlice(1, batch, batch, device)
        part = ReplicaShard(worker, theirs, hidden, None, torch.get_num_threads())
        for _ in range(HANDED):
            call = inputs.take(own, None)
            part.step(_Nothing(), inputs.take(theirs, None))
            call.call(hidden)
        part.finish(device)

    try:
        return _seconds(run, device) / HANDED
    finally:
        worker.close()


class _Nothing(nn.Module):
    """A layer that computes nothing."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else kwargs["hidden_states"]


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a few calls after the first, kernels included."""
    return _in_turn({None: work}, device)[None]


def _in_turn(works: Mapping[T, Callable[[], object]], device: torch.device) -> dict[T, float]:
    """Return the median seconds of each after the first round; the longer they take, the fewer rounds."""
    took: dict[T, list[float]] = {name: [] for name in works}
    begin, rounds = time.perf_counter(), 0
    while rounds < 3 or (rounds <= REPEATS and time.perf_counter() - begin < LONG_S * len(works)):
        for name, work in works.items():
            synchronize(device)
            start = time.perf_counter()
            work()
            synchronize(device)
            took[name].append(time.perf_counter() - start)
        rounds += 1
    return {name: statistics.median(times[1:]) for name, times in took.items()}
