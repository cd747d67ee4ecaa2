"""A drop of all layers in one process, without an exchange, beside the system's or the driver's own unmapping."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import paired, ratio
from serving import summary
from transformers import AutoModelForCausalLM

import elastic
from elastic.config import Place
from elastic.memory.places import make_backend


def dropped_alone(
    path: Path, rounds: int, *, place: str = "cpu#0=1GiB", dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Drop all layers of a model, with digests known: from the call until their pages are the cache's.

    They are taken back behind each. The first round is not counted.
    """
    device = Place.parse(place).device
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
    elastic.wrap(model, places=[place], checkpoint=path)
    runtime, layers = model.elastic, tuple(range(model.config.num_hidden_layers))
    runtime.digests(layers)
    nbytes = sum(parameter.nbytes for parameter in model.model.layers.parameters())
    times: dict[str, list[float]] = {"drop": [], "unmap": []}
    pauses: list[float] = []
    with memory(device, nbytes) as (take, give_back):
        for _ in range(rounds + 1):
            take()
            for name, (took,) in paired(
                {"drop": partial(runtime.drop, layers), "unmap": give_back}, str(device), 1, 0
            ).items():
                times[name].append(1e3 * took)
            pauses.append(runtime.events()[-1].pause_ms)
            runtime.restore(layers)
    elastic.unwrap(model)
    drops, unmaps = times["drop"][1:], times["unmap"][1:]
    return {
        "bytes": nbytes,
        "ms": summary(drops),
        "pause_ms": summary(pauses[1:]),
        "unmap_ms": summary(unmaps),
        "us_per_mib": summary([1e3 * took / (nbytes / 2**20) for took in drops]),
        "over_unmap": ratio(drops, unmaps),
    }


@contextmanager
def memory(device: torch.device, nbytes: int) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    """Give what maps so much memory, and what gives it back: `munmap` behind writes, `cuMemUnmap` of pages."""
    if device.type == "cpu":
        mapped: list[mmap.mmap] = []

        def take() -> None:
            mapped.append(mmap.mmap(-1, nbytes))
            mapped[-1].write(b"1" * nbytes)

        yield take, lambda: mapped.pop().close()
        return
    backend = make_backend(Place.parse(str(device)))
    pages = range(-(-nbytes // backend.page_bytes))
    address = backend.reserve(len(pages) * backend.page_bytes)
    backend.create(pages)
    try:
        yield partial(backend.map, address, pages), partial(backend.unmap, address, len(pages))
    finally:
        backend.close()
