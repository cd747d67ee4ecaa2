"""Copies between the host and a place, beside whatever computes there."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from elastic.memory.rate_limit import RateLimiter

Pair = tuple[torch.Tensor, torch.Tensor]
"""(target, source), of equal shapes and dtypes."""


class CopyHandle(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Order what this thread does next on the target after the copy. Raises what the copy raised."""
        ...

    def finish(self) -> None:
        """Return when the bytes are there. Raises what the copy raised."""
        ...

    def discard(self) -> None:
        """Return when the copy, done or failed, holds none of its tensors any more."""
        ...


class CopyBatch:
    """Copies under way that all must be there in the end."""

    def __init__(self) -> None:
        self._copies: list[CopyHandle] = []

    def add(self, copy: CopyHandle) -> None:
        self._copies.append(copy)

    def finish(self) -> None:
        """Return when all bytes are there. Raises what the first failed copy raised."""
        for copy in self._copies:
            copy.finish()

    def discard(self) -> None:
        """Return when no copy, done or failed, holds any tensor or writes any more."""
        for copy in self._copies:
            copy.discard()


class CopyEngine(Protocol):
    """Starts copies; they run one after another."""

    def start(self, pairs: Sequence[Pair], after: Iterable[torch.cuda.Event] = ()) -> CopyHandle:
        """Beside what the calling thread does next."""
        ...

    def copy(self, pairs: Sequence[Pair], pace: RateLimiter) -> CopyHandle:
        """For a caller that waits anyway, at a pace: on a CPU the bytes are there on return."""
        ...

    def copy_async(self, pairs: Sequence[Pair], pace: RateLimiter) -> CopyHandle:
        """Beside what the calling thread does next, at a pace: after those carried before, apart from all others."""
        ...

    def close(self) -> None:
        """Finish, and take no more. Can be called twice."""
        ...


def make_copy_engine(device: torch.device) -> CopyEngine:
    """A side stream on CUDA, a thread on a CPU."""
    return StreamCopyEngine(device) if device.type == "cuda" else ThreadCopyEngine()


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy in this thread, without torch's own pool of threads where plain bytes will do."""
    if _plain(target, source):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        with torch.no_grad():
            target.copy_(source, non_blocking=True)


def _plain(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether to copy is to copy bytes of the host's memory."""
    alike = (target.shape, target.stride(), target.dtype) == (source.shape, source.stride(), source.dtype)
    return alike and target.device.type == source.device.type == "cpu" and target.is_contiguous()


class ThreadCopyEngine:
    """Copies in one thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="elastic-copy")
        self._carrier = ThreadPoolExecutor(1, thread_name_prefix="elastic-carry")

    def start(self, pairs: Sequence[Pair], after: Iterable[torch.cuda.Event] = ()) -> CopyHandle:
        return FutureHandle(self._thread.submit(_copy_and_let_go, list(pairs)))

    def copy(self, pairs: Sequence[Pair], pace: RateLimiter) -> CopyHandle:
        done: Future[None] = Future()
        try:
            _copy_all(pairs, pace)
            done.set_result(None)
        except Exception as error:  # raised by the ticket, without the frames that know the tensors
            done.set_exception(error)
        return FutureHandle(done)

    def copy_async(self, pairs: Sequence[Pair], pace: RateLimiter) -> CopyHandle:
        return FutureHandle(self._carrier.submit(_copy_and_let_go, list(pairs), pace))

    def close(self) -> None:
        self._thread.shutdown()
        self._carrier.shutdown()


class StreamCopyEngine:
    """Copies on one CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, pairs: Sequence[Pair], after: Iterable[torch.cuda.Event] = ()) -> CopyHandle:
        with torch.cuda.stream(self._stream):
            for event in after:
                self._stream.wait_event(event)
            _copy_all(pairs)
            return EventHandle(self._stream.record_event(), self._stream.device)

    def copy(self, pairs: Sequence[Pair], pace: RateLimiter) -> CopyHandle:
        with torch.cuda.stream(self._stream):
            _copy_all(pairs, pace)
            return EventHandle(self._stream.record_event(), self._stream.device)

    def copy_async(self, pairs: Sequence[Pair], pace: RateLimiter) -> CopyHandle:
        return self.copy(pairs, pace)

    def close(self) -> None:
        self._stream.synchronize()


class FutureHandle:
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

    def discard(self) -> None:
        self._future.exception()


class EventHandle:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def finish(self) -> None:
        self._event.synchronize()

    def discard(self) -> None:
        """Once issued, a copy holds nothing; what comes next on the stream comes after it."""


def _copy_and_let_go(pairs: list[Pair], pace: RateLimiter | None = None) -> None:
    """Copy; then hold no tensor: a thread of a pool knows its arguments longer than it should."""
    try:
        _copy_all(pairs, pace)
    finally:
        pairs.clear()


def _copy_all(pairs: Sequence[Pair], pace: RateLimiter | None = None) -> None:
    pace = pace or RateLimiter()
    for target, source in _joined(pairs):
        if pace.chunk is None:
            copy(target, source)
        else:
            _copy_at(pace, target, source)


def _copy_at(pace: RateLimiter, target: torch.Tensor, source: torch.Tensor) -> None:
    """In parts that are not long, where both are contiguous."""
    if not target.is_contiguous() or not source.is_contiguous():
        copy(target, source)
        pace.acquire(target.nbytes)
        return
    target, source, done = target.view(-1), source.view(-1), 0
    while done < len(target):
        part = slice(done, done + (pace.chunk or target.nbytes) // target.element_size())
        copy(target[part], source[part])
        pace.acquire(target[part].nbytes)
        done = part.stop


def _joined(pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs that lie side by side in the host's memory, on both sides, as one: a layer is then one copy."""
    joined: list[list[Pair]] = []
    for pair in pairs:
        if not pair[0].nbytes and pair[0].shape == pair[1].shape:
            continue
        if joined and _follows(joined[-1][-1], pair):
            joined[-1].append(pair)
        else:
            joined.append([pair])
    return [_stretch(part) if len(part) > 1 else part[0] for part in joined]


def _follows(before: Pair, pair: Pair) -> bool:
    bytes_alone = _plain(*before) and _plain(*pair)
    return bytes_alone and all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in zip(before, pair, strict=True))


def _stretch(pairs: list[Pair]) -> Pair:
    """All of their bytes. It keeps none of their tensors."""
    size = sum(target.nbytes for target, _ in pairs)
    target, source = (
        torch.frombuffer((ctypes.c_ubyte * size).from_address(t.data_ptr()), dtype=torch.uint8) for t in pairs[0]
    )
    return target, source


def to_device(given: Any, device: torch.device) -> Any:
    """A tensor on a device; anything else as it is."""
    if not isinstance(given, torch.Tensor):
        return given
    return given.to(device, non_blocking=given.device.type == device.type == "cuda")
