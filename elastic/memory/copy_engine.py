"""Copies between the host and a place, beside whatever computes there."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from elastic.clock import submit
from elastic.memory.backends.peers import reachable
from elastic.memory.backends.streams import new_stream, on_stream
from elastic.memory.pinned.page_lock import is_locked
from elastic.memory.pinned.staging_ring import StagingRing
from elastic.memory.rate_limit import RateLimiter
from elastic.openmp import release_threads

T = TypeVar("T")
Pair = tuple[torch.Tensor, torch.Tensor]
"""(target, source), of equal shapes and dtypes."""


def to_device(value: T, device: torch.device) -> T:
    """Return a tensor of any shape on a device, without waiting for the copy where both are GPUs; others unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    return reachable(value, device).to(device, non_blocking=value.device.type == device.type == "cuda")  # type: ignore[return-value]


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy in this thread, without torch's own pool of threads where plain bytes will do.

    target, source: any shape, the same for both. On CUDA the copy is issued, not waited for.
    """
    if _is_byte_copy(target, source):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        with torch.no_grad():
            target.copy_(reachable(source, target.device), non_blocking=True)


def pieces(target: torch.Tensor, source: torch.Tensor, nbytes: int) -> Iterator[Pair]:
    """Cut a pair, any shape, into pairs of at most `nbytes` (8 or more), in the order of the target's memory."""
    order = sorted(range(target.ndim), key=lambda dim: -target.stride()[dim])
    return _cut(target.permute(order), source.permute(order), nbytes)


@dataclass(frozen=True)
class EventHandle:
    """A copy that was issued on a stream of a device."""

    event: torch.cuda.Event
    device: torch.device
    locked: list[torch.Tensor] = field(default_factory=list)
    """Page-locked memory that the device reads or writes: held until it is done."""

    def wait(self) -> None:
        """Order what this thread does next on the target after the copy."""
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def finish(self) -> None:
        """Return when the bytes are there."""
        self.event.synchronize()

    settle = finish

    def discard(self) -> None:
        """Return at once: an issued copy holds nothing of a device, and what comes next on its stream comes after."""


@dataclass(frozen=True)
class ThreadHandle:
    """A copy that a thread does, or issues on a stream of a device as it reads the bytes."""

    copied: Future[Any]
    """The `EventHandle` that the thread issued; None: it has done all itself."""
    cancelled: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Order what this thread does next on the target after the copy, once it is issued. Raises what it raised."""
        try:
            issued: EventHandle | None = _result(self.copied)
        except BaseException:
            del self  # the error knows this frame: it must not know the error, nor the error the tensors
            raise
        if issued is not None:
            issued.wait()

    def finish(self) -> None:
        """Return when the bytes are there. Raises what the copy raised."""
        try:
            issued: EventHandle | None = _result(self.copied)
        except BaseException:
            del self
            raise
        if issued is not None:
            issued.finish()

    def discard(self) -> None:
        """Return when the thread issues nothing more and holds no tensor; the rest of the bytes may not be copied."""
        self.cancelled.set()
        self.copied.exception()

    def settle(self) -> None:
        """Return when the copy, done or failed, writes nothing more."""
        self.discard()
        issued: EventHandle | None = None if self.copied.exception() else self.copied.result()
        if issued is not None:
            issued.settle()


CopyHandle = EventHandle | ThreadHandle
"""A copy under way: `wait` or `finish` it; `discard` it where its bytes do not count any more, `settle` it where its
target is to be given up."""


@dataclass
class CopyBatch:
    """Copies under way that all must be there in the end."""

    handles: list[CopyHandle] = field(default_factory=list)

    def finish(self) -> None:
        """Return when all bytes are there. Raises what the first failed copy raised."""
        for handle in self.handles:
            handle.finish()

    def discard(self) -> None:
        """Return when no copy, done or failed, holds any tensor or writes any more."""
        for handle in self.handles:
            handle.settle()


class ThreadCopyEngine:
    """Copies on a CPU, one after another in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="elastic-copy")
        self._background = ThreadPoolExecutor(1, thread_name_prefix="elastic-carry")

    def start(self, pairs: Sequence[Pair], after: Iterable[torch.cuda.Event] = ()) -> CopyHandle:
        """Copy beside what the calling thread does next. `after` is for CUDA."""
        return ThreadHandle(submit(self._thread, _copy_and_release, list(pairs)))

    def copy(self, pairs: Sequence[Pair], pace: RateLimiter) -> CopyHandle:
        """Copy at a pace, for a caller that waits anyway: the bytes are there on return."""
        done: Future[None] = Future()
        try:
            _copy_all(pairs, pace)
            done.set_result(None)
        except Exception as error:  # raised by the handle, without the frames that know the tensors
            done.set_exception(error)
        return ThreadHandle(done)

    def copy_async(self, pairs: Sequence[Pair], pace: RateLimiter) -> CopyHandle:
        """Copy at a pace, beside what the calling thread does next: after earlier ones, apart from all others."""
        return ThreadHandle(submit(self._background, _copy_and_release, list(pairs), pace))

    def close(self) -> None:
        """Finish, and take no more. Can be called twice."""
        self._thread.shutdown()
        self._background.shutdown()


class StreamCopyEngine:
    """Copies on one CUDA stream of its own, one after another, beside what the calling thread does next.

    The driver reads memory that is not page-locked in the thread that issues the copy. For `start` that is another
    thread than the caller's: it reads ahead, into a ring of page-locked memory that the device copies from.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = new_stream(device)
        self._ring = StagingRing()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="elastic-read")
        self._lock = threading.Lock()
        self._under_way: deque[EventHandle] = deque()

    def start(self, pairs: Sequence[Pair], after: Iterable[torch.cuda.Event] = ()) -> CopyHandle:
        """Copy from host memory once these events have passed."""
        if all(is_locked(source) for _, source in pairs):
            return self._issue(_copy_all, pairs, after)
        cancelled = threading.Event()
        return ThreadHandle(submit(self._reader, self._stage, list(pairs), tuple(after), cancelled), cancelled)

    def copy(self, pairs: Sequence[Pair], pace: RateLimiter) -> EventHandle:
        """Copy at a pace."""
        return self._issue(partial(_copy_all, pace=pace), pairs)

    copy_async = copy

    def close(self) -> None:
        """Finish, and take no more. Can be called twice."""
        self._reader.shutdown()
        self._stream.synchronize()
        self._let_go()
        self._ring.close()

    def _issue(
        self,
        copy_all: Callable[[Sequence[Pair]], None],
        pairs: Sequence[Pair],
        after: Iterable[torch.cuda.Event] = (),
    ) -> EventHandle:
        """Copy on the stream. After an error nothing is under way, so that the targets can be given up."""
        with on_stream(self._stream):
            for event in after:
                self._stream.wait_event(event)
            try:
                copy_all(pairs)
            except BaseException:
                self._stream.synchronize()
                raise
            locked = [tensor for pair in pairs for tensor in pair if is_locked(tensor)]
            handle = EventHandle(self._stream.record_event(), self._stream.device, locked)
        self._let_go()
        with self._lock:
            self._under_way.append(handle)
        return handle

    def _let_go(self) -> None:
        """Hold no page-locked memory of copies that are done."""
        with self._lock:
            while self._under_way and self._under_way[0].event.query():  # type: ignore[no-untyped-call]
                self._under_way.popleft().locked.clear()

    def _stage(self, pairs: list[Pair], after: Sequence[torch.cuda.Event], cancelled: threading.Event) -> EventHandle:
        """Copy by way of the ring, in its thread; then hold no tensor of a device."""
        try:
            return self._issue(partial(self._copy_through_ring, cancelled=cancelled), pairs, after)
        finally:
            pairs.clear()

    def _copy_through_ring(self, pairs: Sequence[Pair], cancelled: threading.Event) -> None:
        for target, source in pairs:
            if is_locked(source):
                copy(target, source)
                continue
            for to, of in pieces(target, source, self._ring.SLOT_BYTES):
                if cancelled.is_set():
                    return
                staged = self._ring.take(of)
                copy(staged, of)
                copy(to, staged)


CopyEngine = ThreadCopyEngine | StreamCopyEngine
"""`start` a copy, `copy` at a pace and wait, or `copy_async` at a pace."""


def make_copy_engine(device: torch.device) -> CopyEngine:
    """Make the copy engine of a device: a side stream on CUDA, a thread on a CPU."""
    return StreamCopyEngine(device) if device.type == "cuda" else ThreadCopyEngine()


def _result(future: Future[T]) -> T:
    """Return what a thread returned, or raise its error without what that thread had."""
    error = future.exception()
    if error is None:
        return future.result()
    try:
        del future  # an error knows this frame: it must not know the error
        raise error.with_traceback(None)
    finally:
        del error


def _copy_and_release(pairs: list[Pair], pace: RateLimiter | None = None) -> None:
    """Copy; then hold no tensor, as a thread of a pool knows its arguments longer than it should, and no threads."""
    try:
        _copy_all(pairs, pace)
    finally:
        pairs.clear()
        release_threads()


def _copy_all(pairs: Sequence[Pair], pace: RateLimiter | None = None) -> None:
    """Copy at a pace (None: none is set), in chunks where both sides are contiguous."""
    pace = pace or RateLimiter()
    for target, source in _joined(pairs):
        if pace.chunk is None:
            copy(target, source)
        elif not target.is_contiguous() or not source.is_contiguous():
            copy(target, source)
            pace.acquire(target.nbytes)
        else:
            target, source, done = target.view(-1), source.view(-1), 0
            while done < len(target):
                chunk = slice(done, done + (pace.chunk or target.nbytes) // target.element_size())
                copy(target[chunk], source[chunk])
                pace.acquire(target[chunk].nbytes)
                done = chunk.stop


def _cut(target: torch.Tensor, source: torch.Tensor, nbytes: int) -> Iterator[Pair]:
    if target.nbytes <= nbytes:
        yield target, source
    elif target.ndim > 1 and target.is_contiguous() and source.is_contiguous():
        yield from _cut(target.view(-1), source.view(-1), nbytes)
    elif rows := nbytes // (target.nbytes // len(target)):
        yield from zip(torch.split(target, rows), torch.split(source, rows), strict=True)
    else:
        for row, source_row in zip(target, source, strict=True):
            yield from _cut(row, source_row, nbytes)


def _joined(pairs: Sequence[Pair]) -> list[Pair]:
    """Join pairs that are side by side in the host's memory, on both sides: a layer is then one copy."""
    groups: list[list[Pair]] = []
    for pair in pairs:
        if not pair[0].nbytes and pair[0].shape == pair[1].shape:
            continue
        before = groups[-1][-1] if groups else None
        if (
            before is not None
            and _is_byte_copy(*before)
            and _is_byte_copy(*pair)
            and all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in zip(before, pair, strict=True))
        ):
            groups[-1].append(pair)
        else:
            groups.append([pair])
    return [_as_bytes(group) if len(group) > 1 else group[0] for group in groups]


def _as_bytes(pairs: list[Pair]) -> Pair:
    """View all bytes of adjacent pairs as one pair, which keeps none of their tensors."""
    size = sum(target.nbytes for target, _ in pairs)
    target, source = (
        torch.frombuffer((ctypes.c_ubyte * size).from_address(t.data_ptr()), dtype=torch.uint8) for t in pairs[0]
    )
    return target, source


def _is_byte_copy(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether to copy is to copy bytes of the host's memory."""
    same_layout = (target.shape, target.stride(), target.dtype) == (source.shape, source.stride(), source.dtype)
    return same_layout and target.device.type == source.device.type == "cpu" and target.is_contiguous()
