"""A short measurement of what planners need to know: one decoder layer, and the way between places.

A layer is run with what the model itself would give it, at a few batch sizes, on every device that has a place; rows
of hidden states are sent between the places. Some tens of milliseconds for a small layer on a CPU.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import nn

from elastic.config import Place
from elastic.controller.calibrated import Calibration, Line, Points, fit
from elastic.hooks.arrivals import moved
from elastic.hooks.structure import Decoder

ROWS = (1, 4, 16)
REPEATS = 5
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def measure(decoder: Decoder, places: Sequence[Place], rows: Sequence[int] = ROWS, tokens: int = 1) -> Calibration:
    """Seconds of a layer and of what goes between places, for so many rows of `tokens` tokens each.

    The decoder is that of a model which is not wrapped, and can run a forward pass where it is. With one place nothing
    is measured: there is nothing to choose.
    """
    if len(places) < 2:
        return Calibration({place.name: Line(1e-3, 0.0) for place in places})
    layer = decoder.layers[len(decoder.layers) // 2]
    with torch.inference_mode():
        inputs = {count: _inputs(decoder, layer, count, tokens) for count in rows}
        devices = dict.fromkeys(place.device for place in places)
        layers = {device: _on(layer, device) for device in devices}
        points = {device: _layer_points(layers[device], inputs, tokens, device) for device in devices}
        hidden = {count: _hidden(given) for count, given in inputs.items()}
        links = {(a.name, b.name): _link_points(hidden, a.device, b.device) for a, b in combinations(places, 2)}
        return fit({place.name: points[place.device] for place in places}, links, _beside(layers, inputs, places))


@dataclass(frozen=True)
class Speed:
    """What is assumed of a kind of device."""

    flops: float
    """Operations a second."""
    memory: float
    """Bytes a second from its memory."""
    link: float
    """Bytes a second to another device."""
    handing_s: float
    """Seconds to have another place begin."""


ASSUMED = {"cpu": Speed(5e10, 1e10, 5e9, 5e-5), "cuda": Speed(2e14, 2e12, 2e10, 2e-5)}
"""By type of device: one core, and a large GPU; within a few times of most."""


def assume(places: Sequence[Place], layer_bytes: int, layer_parameters: int) -> Calibration:
    """A calibration without measuring: a layer reads its weights once, and computes twice their number for a token.

    Places of one CPU are taken to have a core each, those of one GPU to share it.
    """
    speeds = {place.name: ASSUMED[place.device.type] for place in places}
    layers = {name: Line(layer_bytes / s.memory, 2 * layer_parameters / s.flops) for name, s in speeds.items()}
    links = {}
    for a, b in combinations(places, 2):
        slower = min((speeds[a.name], speeds[b.name]), key=lambda speed: speed.link)
        rate = slower.memory if a.device == b.device else slower.link
        links[a.name, b.name] = Line(slower.handing_s, 1 / rate)
    gpus = [place.device for place in places if place.device.type == "cuda"]
    return Calibration(layers, links, 2.0 if len(set(gpus)) < len(gpus) else 1.0)


class _Caught(Exception):
    """The forward pass got as far as the layer."""


def _inputs(decoder: Decoder, layer: nn.Module, rows: int, tokens: int) -> Inputs:
    """What the model gives a layer for such a batch."""
    caught: list[Inputs] = []

    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append((args, kwargs))
        raise _Caught

    model = decoder.roots[0]
    device = next(model.parameters()).device
    hook = layer.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        model(torch.ones(rows, tokens, dtype=torch.long, device=device), use_cache=False)
    except _Caught:
        pass
    finally:
        hook.remove()
    return caught[0]


def _hidden(inputs: Inputs) -> torch.Tensor:
    """The hidden states, [rows, tokens, d]."""
    args, kwargs = inputs
    found = args[0] if args else kwargs["hidden_states"]
    assert isinstance(found, torch.Tensor)
    return found


def _on(layer: nn.Module, device: torch.device) -> nn.Module:
    """The layer, or a copy of it on another device."""
    here = next(layer.parameters()).device
    return layer if here == device else copy.deepcopy(layer).to(device)


def _layer_points(layer: nn.Module, inputs: dict[int, Inputs], tokens: int, device: torch.device) -> Points:
    """(tokens of all rows, seconds)."""
    return [(rows * tokens, _seconds(_run(layer, given, device), device)) for rows, given in inputs.items()]


def _run(layer: nn.Module, inputs: Inputs, device: torch.device) -> Callable[[], object]:
    args = moved(inputs[0], device)
    kwargs = {name: moved(value, device) for name, value in inputs[1].items()}
    return lambda: layer(*args, **kwargs)


def _link_points(hidden: dict[int, torch.Tensor], here: torch.device, there: torch.device) -> Points:
    """(bytes, seconds) from a thread at one place to one at the other and into a tensor there."""
    found = []
    with ThreadPoolExecutor(1) as thread:
        for rows in hidden.values():
            source = rows.to(here)

            def send(source: torch.Tensor = source) -> object:
                return thread.submit(lambda: source.to(there, copy=True)).result()

            found.append((source.nbytes, _seconds(send, there)))
    return found


def _beside(layers: dict[torch.device, nn.Module], inputs: dict[int, Inputs], places: Sequence[Place]) -> float:
    """How many times longer a layer takes when two places of one device compute at once."""
    shared = [d for d in layers if sum(place.device == d for place in places) > 1]
    if not shared:
        return 1.0
    device, given = shared[0], inputs[max(inputs)]
    with ThreadPoolExecutor(2) as threads:

        def run(times: int) -> None:
            works = [threads.submit(_on_own_stream, layers[device], given, device) for _ in range(times)]
            for work in works:
                work.result()

        return _seconds(lambda: run(2), device) / _seconds(lambda: run(1), device)


def _on_own_stream(layer: nn.Module, inputs: Inputs, device: torch.device) -> None:
    """In a thread, which has neither the inference mode nor the stream of the one that started it."""
    with torch.inference_mode():
        if device.type == "cpu":
            _run(layer, inputs, device)()
            return
        with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            _run(layer, inputs, device)()
            torch.cuda.current_stream(device).synchronize()


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The median of a few calls, kernels included."""
    took = []
    for _ in range(REPEATS + 1):
        _finish(device)
        start = time.perf_counter()
        work()
        _finish(device)
        took.append(time.perf_counter() - start)
    return statistics.median(took[1:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
