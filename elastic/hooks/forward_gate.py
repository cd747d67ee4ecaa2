"""The safe point: forward passes enter as readers, a commit is the one writer between them (law 6).

A pass may die without its hooks: torch calls them for an `Exception`, and not for a Ctrl-C, nor where a thread ends. So
readers are a set, and what ended in whatever way leaves it once a commit, or the next pass of the thread, looks.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from elastic.errors import StateError


class ForwardActivity:
    """The forward passes of all models of this process. Thread-safe."""

    PAUSE_S = 0.05
    """Seconds after a forward pass in which the next one is expected: between the tokens of a generation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: set[ForwardPass] = set()
        self._ended_s = -self.PAUSE_S

    def begin(self, of: ForwardPass) -> None:
        """Note a forward pass that begins."""
        with self._lock:
            self._active.add(of)

    def end(self, of: ForwardPass) -> None:
        """Note that a forward pass has ended, now."""
        with self._lock:
            self._active.discard(of)
            self._ended_s = time.monotonic()

    def busy(self) -> bool:
        """Return whether a model computes, or has just done so."""
        active = not all(each.died for each in tuple(self._active))
        return active or time.monotonic() - self._ended_s < self.PAUSE_S


traffic = ForwardActivity()


class ForwardPass:
    """A forward pass of a thread, and the frames that are executed as long as its modules are in it."""

    def __init__(self, thread: threading.Thread) -> None:
        self.of_daemon = thread.daemon
        self._thread = thread
        self.frames: list[FrameType | None] = []
        """Of the modules, outermost first; None: not known."""
        self.ended = False
        """Whether the gate knows that it is over."""

    @property
    def died(self) -> bool:
        """Whether it is over for sure, although its modules may not have said so."""
        frames = tuple(self.frames)
        return self.ended or not self._thread.is_alive() or (bool(frames) and all(map(_is_over, frames)))


def _is_over(frame: FrameType | None) -> bool:
    """Return whether a frame is executed no more; what it knew is dropped then."""
    if frame is None:
        return False
    try:
        frame.clear()
    except RuntimeError:
        return False
    return True


class _EnteredModules(threading.local):
    """The modules (ids) whose forward passes a thread is in, outermost first."""

    def __init__(self, daemons: weakref.WeakSet[threading.Thread], lock: threading.Lock) -> None:
        """`daemons`: those daemon threads that had a forward pass, under the lock."""
        self.thread = threading.current_thread()
        if self.thread.daemon:
            with lock:
                daemons.add(self.thread)
        self.keys: list[int] = []
        self.forward = ForwardPass(self.thread)
        self.plain = False
        """In a pass whose layers all compute with weights of their own place, and do nothing else."""
        self.take_cache: Callable[[Iterable[object]], None] | None = None
        """Of a pass that was given no KV cache: to be called with what its first layer is given: the model's own may be
        among that."""


class ForwardGate:
    """A reader-writer gate, re-entrant for readers of one thread.

    New forwards wait for a waiting commit; a commit waits for those that have begun, and after it the forwards that
    waited go before the next commit. So neither starves.
    """

    LOOK_S = 0.1
    """Seconds after which those who wait for passes look for ones that died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        """For commits. Taken by its lock: its own `__enter__` may be interrupted with the lock held."""
        self._readers: set[ForwardPass] = set()
        self._queue: dict[ForwardPass, threading.Lock] = {}
        """Forward passes that wait, each for its lock to be released."""
        self._writing = False
        self._writers_waiting = 0
        self._daemons: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self.thread = _EnteredModules(self._daemons, self._lock)
        self.commits = 0
        """How many have ended."""
        self.before_commits: list[Callable[[], object]] = []
        """Called when no forward pass is left, before anything changes."""
        self.closed = False
        """Set when the model was unwrapped: a forward pass that had waited leaves again, and is any model's."""
        self.refusal: str | None = None
        """Set when nothing may pass any more (in a forked child): what the `StateError` says."""
        self._ending = False

    @property
    def inside(self) -> bool:
        """True inside a forward pass of this thread."""
        if self.thread.keys and self.thread.forward.died:
            self._end()
        return bool(self.thread.keys)

    def enter(self, key: int, frame: FrameType | None = None) -> bool:
        """Begin a forward pass of the module `key`; returns whether it is the outermost of this thread.

        `frame`: one that is executed as long as the module is in it. What is left of an earlier pass that died without
        its hooks is forgotten where the key is the same, or a commit has forgotten it; else this one goes on with it.
        """
        if self.refusal is not None:
            raise StateError(self.refusal)
        thread = self.thread
        if key in thread.keys:
            self.leave(key)
        if thread.keys:
            thread.keys.append(key)
            thread.forward.frames.append(frame)
            with self._lock:  # if a commit has found it dead, then before this frame came
                if thread.forward in self._readers:
                    return False
            self._end()
        if thread.forward in self._readers:  # it was interrupted as it began
            self._end_reading(thread.forward)
        thread.forward = ForwardPass(thread.thread)
        thread.forward.frames.append(frame)
        self._begin_reading()
        thread.keys.append(key)
        return True

    def leave(self, key: int) -> bool:
        """End the forward pass of `key`, and of what it contains; returns whether it was the outermost.

        A key that was not entered (a hook before ours raised) is ignored.
        """
        keys = self.thread.keys
        if key not in keys:
            return False
        place = keys.index(key)
        if not place:
            self._end()
            return True
        del keys[place:], self.thread.forward.frames[place:]
        return False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let commits pass while a forward pass of this thread waits for another process; it goes on behind them.

        So an action may come in the middle of the pass: the caller sees to it that none takes away what the pass
        needs. Outside a forward pass nothing happens.
        """
        if not self.inside:
            yield
            return
        self.thread.plain = False  # a commit may change that
        self._end_reading(self.thread.forward)
        try:
            yield
        finally:
            self._begin_reading()

    @contextmanager
    def exclusive(self) -> Iterator[float]:
        """Wait until no forward pass is left, keep new ones out, and call `before_commits`. Yields the seconds waited.

        Raises `StateError` inside a forward pass of this thread, which would wait for itself.
        """
        if self.inside:
            raise StateError("an action cannot be awaited inside a forward pass; call it with wait=False")
        self._end_reading(self.thread.forward)  # of a pass that was interrupted as it began
        start = time.perf_counter()
        self._begin_writing()
        waited_s = time.perf_counter() - start
        try:
            for listener in tuple(self.before_commits):
                listener()
            yield waited_s
        finally:
            with self._lock:
                self._writing = False
                self.commits += 1
                self._admit_queue()
                self._changed.notify_all()

    def end_daemons(self, timeout_s: float) -> None:
        """Have daemon threads end where they begin a forward pass, and wait for the passes that they are in.

        For the end of the interpreter, which a thread that is in torch then would abort. One between two passes, which
        may be in torch, too, is waited for a little.
        """
        end = time.monotonic() + timeout_s
        with self._lock:
            self._ending, daemons = True, list(self._daemons)
        while self._daemons_compute() and time.monotonic() < end:
            time.sleep(self.LOOK_S / 10)
        end = min(end, time.monotonic() + self.LOOK_S)
        while any(thread.is_alive() for thread in daemons) and time.monotonic() < end:
            time.sleep(self.LOOK_S / 10)

    def _daemons_compute(self) -> bool:
        """Return whether daemon threads are in forward passes, or wait to begin one."""
        with self._lock:
            self._forget_died()
            return any(forward.of_daemon for forward in (*self._readers, *self._queue))

    def _end(self) -> None:
        """End the pass of this thread, whatever it is in."""
        self.thread.keys.clear()
        self.thread.plain, self.thread.take_cache = False, None
        self.thread.forward.ended = True
        self.thread.forward.frames.clear()
        self._end_reading(self.thread.forward)

    def _begin_reading(self) -> None:
        forward = self.thread.forward
        with self._lock:
            if self._ending and forward.of_daemon:
                raise SystemExit  # ends the thread without a word
            if self._writing or self._writers_waiting:
                turn = threading.Lock()
                turn.acquire()
                self._queue[forward] = turn
            else:
                turn = None
                self._readers.add(forward)
        if turn is not None:
            try:
                turn.acquire()
                if self._ending and forward.of_daemon:
                    raise SystemExit
                if self.refusal is not None:  # since it waited
                    raise StateError(self.refusal)
            except BaseException:  # that, or Ctrl-C
                with self._lock:
                    self._queue.pop(forward, None)
                self._end_reading(forward)
                raise
        traffic.begin(forward)

    def _end_reading(self, forward: ForwardPass) -> None:
        if forward in self._readers:
            with self._lock:
                self._readers.discard(forward)
                if self._writers_waiting:
                    self._changed.notify_all()
            traffic.end(forward)

    def _begin_writing(self) -> None:
        with self._lock:
            self._writers_waiting += 1
            try:
                while self._readers or self._writing:
                    if not self._changed.wait(self.LOOK_S):
                        self._forget_died()
                self._writing = True
            finally:
                self._writers_waiting -= 1
                if not (self._writing or self._writers_waiting):
                    self._admit_queue()

    def _forget_died(self) -> None:
        """Take passes out that nobody will end; their threads see that at their next one."""
        for forward in [each for each in self._readers if each.died]:
            self._readers.discard(forward)
            traffic.end(forward)

    def _admit_queue(self) -> None:
        """Let all passes in that wait, as one."""
        self._readers.update(self._queue)
        for turn in self._queue.values():
            turn.release()
        self._queue.clear()
