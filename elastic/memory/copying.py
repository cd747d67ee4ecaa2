"""Copies between the host and a place, beside whatever computes there."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""(target, source), of equal shapes and dtypes."""
_DIGEST_WORDS = 128


class Pace:
    """Spreads work over time, so that what computes beside it keeps its share of the memory's speed."""

    CHUNK = 1 << 20
    """Bytes done at once."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.bytes_per_s = bytes_per_s
        """None: no bound."""
        self._due = 0.0

    def keep(self, nbytes: int) -> None:
        """So many bytes were done: return when more may be."""
        if self.bytes_per_s is not None:
            now = time.monotonic()
            self._due = max(self._due, now) + nbytes / self.bytes_per_s
            time.sleep(self._due - now)


class Ticket(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Order what this thread does next on the target after the copy. Raises what the copy raised."""
        ...

    def finish(self) -> None:
        """Return when the bytes are there. Raises what the copy raised."""
        ...

    def let_go(self) -> None:
        """Return when the copy, done or failed, holds none of its tensors any more."""
        ...


class Copier(Protocol):
    """Starts copies; they run one after another."""

    def start(self, pairs: Sequence[Pair], after: Iterable[torch.cuda.Event] = ()) -> Ticket:
        """Beside what the calling thread does next."""
        ...

    def copy(self, pairs: Sequence[Pair], pace: Pace) -> Ticket:
        """For a caller that waits anyway, at a pace: on a CPU the bytes are there on return."""
        ...

    def close(self) -> None:
        """Finish, and take no more. Can be called twice."""
        ...


def make_copier(device: torch.device) -> Copier:
    """A side stream on CUDA, a thread on a CPU."""
    return StreamCopier(device) if device.type == "cuda" else ThreadCopier()


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy in this thread, without torch's own pool of threads where plain bytes will do."""
    alike = (target.shape, target.stride(), target.dtype) == (source.shape, source.stride(), source.dtype)
    if alike and target.device.type == source.device.type == "cpu" and target.is_contiguous():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        with torch.no_grad():
            target.copy_(source, non_blocking=True)


def digest(tensor: torch.Tensor) -> int:
    """A checksum of the bytes in the order of the shape: the same for equal tensors on any device, in any layout.

    Runs of 128 words of 64 bits are summed, and the sums weighted by their place. It tells changed weights from
    unchanged ones; it is no defence against an adversary.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // (8 * _DIGEST_WORDS) * 8 * _DIGEST_WORDS
    sums = flat[:whole].view(torch.int64).view(-1, _DIGEST_WORDS).sum(dim=1)
    rest = flat[whole:].to(torch.int64)
    return int(_weighted(sums) * 31 + _weighted(rest) + 17 * flat.numel())


def _weighted(values: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(values.numel(), device=values.device) * 2 + 1
    return (values * weights).sum()


class ThreadCopier:
    """Copies in one thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="elastic-copy")

    def start(self, pairs: Sequence[Pair], after: Iterable[torch.cuda.Event] = ()) -> Ticket:
        return _Told(self._thread.submit(_copy_and_let_go, list(pairs)))

    def copy(self, pairs: Sequence[Pair], pace: Pace) -> Ticket:
        done: Future[None] = Future()
        try:
            _copy_all(pairs, pace)
            done.set_result(None)
        except Exception as error:  # raised by the ticket, without the frames that know the tensors
            done.set_exception(error)
        return _Told(done)

    def close(self) -> None:
        self._thread.shutdown()


class StreamCopier:
    """Copies on one CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, pairs: Sequence[Pair], after: Iterable[torch.cuda.Event] = ()) -> Ticket:
        with torch.cuda.stream(self._stream):
            for event in after:
                self._stream.wait_event(event)
            _copy_all(pairs)
            return _Recorded(self._stream.record_event(), self._stream.device)

    def copy(self, pairs: Sequence[Pair], pace: Pace) -> Ticket:
        with torch.cuda.stream(self._stream):
            _copy_all(pairs, pace)
            return _Recorded(self._stream.record_event(), self._stream.device)

    def close(self) -> None:
        self._stream.synchronize()


class _Told:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def finish(self) -> None:
        error = self._future.exception()
        del self  # an error knows this frame: it must not know the error, nor the error the tensors
        try:
            if error is not None:
                raise error.with_traceback(None)
        finally:
            del error

    wait = finish

    def let_go(self) -> None:
        self._future.exception()


class _Recorded:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def finish(self) -> None:
        self._event.synchronize()

    def let_go(self) -> None:
        """Once issued, a copy holds nothing; what comes next on the stream comes after it."""


def _copy_and_let_go(pairs: list[Pair]) -> None:
    """Copy; then hold no tensor: a thread of a pool knows its arguments longer than it should."""
    try:
        _copy_all(pairs)
    finally:
        pairs.clear()


def _copy_all(pairs: Sequence[Pair], pace: Pace | None = None) -> None:
    for target, source in pairs:
        if pace is None or pace.bytes_per_s is None:
            copy(target, source)
        else:
            for part in _chunks(target, source):
                copy(*part)
                pace.keep(part[0].nbytes)


def _chunks(target: torch.Tensor, source: torch.Tensor) -> Iterable[Pair]:
    """The same copy in parts that are not long, where both are contiguous."""
    if not target.is_contiguous() or not source.is_contiguous():
        return [(target, source)]
    size = Pace.CHUNK // target.element_size()
    return zip(torch.split(target.view(-1), size), torch.split(source.view(-1), size), strict=True)
