"""Copies between the host and a place, beside whatever computes there."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""(target, source), of equal shapes and dtypes."""
_DIGEST_WORDS = 128


class Pace:
    """Spreads work over time, so that what computes beside it keeps its share of the memory's speed. Thread-safe."""

    CHUNK = 4 << 20
    """Bytes done at once: a fraction of a millisecond, and few enough turns at Python's lock."""
    LONGEST = 16 << 20
    """Bytes done at once while nothing computes beside it, before that is asked again."""

    def __init__(self, bytes_per_s: float | None = None, beside: Callable[[], bool] = lambda: True) -> None:
        self.bytes_per_s = bytes_per_s
        """None: no bound."""
        self._beside = beside
        self._lock = threading.Lock()
        self._due = 0.0

    @property
    def chunk(self) -> int | None:
        """Bytes to be done at once now; None: all."""
        if self.bytes_per_s is None:
            return None
        return self.CHUNK if self._beside() else self.LONGEST

    def keep(self, nbytes: int) -> None:
        """So many bytes were done: return when more may be. At once where nothing computes beside it."""
        if self.bytes_per_s is not None and self._beside():
            with self._lock:
                now = time.monotonic()
                self._due = due = max(self._due, now) + nbytes / self.bytes_per_s
            time.sleep(due - now)


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


class Carried:
    """Copies under way that all must be there in the end."""

    def __init__(self) -> None:
        self._copies: list[Ticket] = []

    def add(self, copy: Ticket) -> None:
        self._copies.append(copy)

    def finish(self) -> None:
        """Return when all bytes are there. Raises what the first failed copy raised."""
        for copy in self._copies:
            copy.finish()

    def let_go(self) -> None:
        """Return when no copy, done or failed, holds any tensor or writes any more."""
        for copy in self._copies:
            copy.let_go()


class Copier(Protocol):
    """Starts copies; they run one after another."""

    def start(self, pairs: Sequence[Pair], after: Iterable[torch.cuda.Event] = ()) -> Ticket:
        """Beside what the calling thread does next."""
        ...

    def copy(self, pairs: Sequence[Pair], pace: Pace) -> Ticket:
        """For a caller that waits anyway, at a pace: on a CPU the bytes are there on return."""
        ...

    def carry(self, pairs: Sequence[Pair], pace: Pace) -> Ticket:
        """Beside what the calling thread does next, at a pace: after those carried before, apart from all others."""
        ...

    def close(self) -> None:
        """Finish, and take no more. Can be called twice."""
        ...


def make_copier(device: torch.device) -> Copier:
    """A side stream on CUDA, a thread on a CPU."""
    return StreamCopier(device) if device.type == "cuda" else ThreadCopier()


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
        self._carrier = ThreadPoolExecutor(1, thread_name_prefix="elastic-carry")

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

    def carry(self, pairs: Sequence[Pair], pace: Pace) -> Ticket:
        return _Told(self._carrier.submit(_copy_and_let_go, list(pairs), pace))

    def close(self) -> None:
        self._thread.shutdown()
        self._carrier.shutdown()


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

    def carry(self, pairs: Sequence[Pair], pace: Pace) -> Ticket:
        return self.copy(pairs, pace)

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


def _copy_and_let_go(pairs: list[Pair], pace: Pace | None = None) -> None:
    """Copy; then hold no tensor: a thread of a pool knows its arguments longer than it should."""
    try:
        _copy_all(pairs, pace)
    finally:
        pairs.clear()


def _copy_all(pairs: Sequence[Pair], pace: Pace | None = None) -> None:
    pace = pace or Pace()
    for target, source in _joined(pairs):
        if pace.chunk is None:
            copy(target, source)
        else:
            _copy_at(pace, target, source)


def _copy_at(pace: Pace, target: torch.Tensor, source: torch.Tensor) -> None:
    """In parts that are not long, where both are contiguous."""
    if not target.is_contiguous() or not source.is_contiguous():
        copy(target, source)
        pace.keep(target.nbytes)
        return
    target, source, done = target.view(-1), source.view(-1), 0
    while done < len(target):
        part = slice(done, done + (pace.chunk or target.nbytes) // target.element_size())
        copy(target[part], source[part])
        pace.keep(target[part].nbytes)
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
