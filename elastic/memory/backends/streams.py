"""The CUDA streams on which pages are used, and waiting for them alone, not for all that a device does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from elastic.errors import StateError

_used: dict[int, set[torch.cuda.Stream]] = {}
"""Of each device, by index. Those of torch are never destroyed, and there are 32 of each priority."""
capture_lock = threading.RLock()
"""Held while graphs are captured, and by whoever waits for a whole device: that would end captures of any thread."""


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Make a stream of a CUDA device on which pages will be used."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    _used.setdefault(stream.device.index, set()).add(stream)
    return stream


def note_current_stream(device: torch.device) -> None:
    """Note that this thread uses pages of a device on its current stream; on a CPU there is none."""
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        _used.setdefault(stream.device.index, set()).add(stream)


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Have this thread queue what it does on a stream, as `torch.cuda.stream`; None: where it does already.

    The stream's device is the present one first: torch would make a context on the one that was, as it returns to it.
    """
    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def finish_queued_work(device: torch.device) -> None:
    """Wait until what is queued now on the streams that use pages of a device is over; on a CPU there is none.

    The default stream is always one of them. What others do on the device goes on.
    """
    if device.type == "cuda":
        for stream in {torch.cuda.default_stream(device), *list(_used.get(device.index or 0, ()))}:
            stream.synchronize()


def synchronize(device: torch.device) -> None:
    """Wait until no kernel or copy on a device is under way; on a CPU there is none to wait for."""
    if device.type == "cuda":
        with capture_lock:
            torch.cuda.synchronize(device)


def give_back_cached() -> None:
    """Have torch's allocator give what it keeps for reuse back to the driver; some backends wait for the device."""
    with capture_lock:
        torch.cuda.empty_cache()


def finish_current_stream(device: torch.device) -> None:
    """Wait until what this thread has queued on a device is over: others may read it on any stream then."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def require_no_capture(refused: str) -> None:
    """Raise `StateError` if this thread captures a CUDA graph, which the driver calls of `refused` would invalidate."""
    if capturing():
        raise StateError(f"{refused} while this thread captures a CUDA graph; do it before the capture or after it")


def capturing() -> bool:
    """Return whether this thread captures a CUDA graph."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    # the question alone would make a context, which takes some hundred MiB of a device that may not be used at all
    used: bool = torch._C._cuda_hasPrimaryContext(torch.cuda.current_device())  # type: ignore[attr-defined]
    return used and torch.cuda.is_current_stream_capturing()
