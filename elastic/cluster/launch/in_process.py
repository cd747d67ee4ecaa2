"""Ranks in this process, each on a thread: for tests, for notebooks, for two models on one device."""

from __future__ import annotations

import threading
from contextlib import suppress

from elastic.cluster.control.connection import QueueConnection, queue_pair
from elastic.cluster.control.messages import Refused
from elastic.cluster.control.processes import Exit
from elastic.cluster.launch.base import START_S, await_hello
from elastic.cluster.rank.build import built
from elastic.cluster.rank.client import RankClient
from elastic.cluster.rank.questions import portable
from elastic.cluster.rank.spec import RankSpec
from elastic.errors import StateError, require_period


class RankThread:
    """A rank on a thread of this process: a `RankProcess`."""

    ended: int | None = None

    def __init__(self, spec: RankSpec, connection: QueueConnection) -> None:
        self.name, self._spec, self._connection = spec.name, spec, connection
        self._thread = threading.Thread(target=self._run, name=f"elastic-rank-{spec.name}", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Cut its connection; the engine ends after the step that it is in, and the model is as it was."""
        self._connection.close()

    def wait(self, timeout_s: float) -> Exit | None:
        """Wait until the model is unwrapped, if it was plain when it came."""
        self._thread.join(timeout_s)
        return None if self._thread.is_alive() else Exit("its thread has ended")

    def close(self) -> None:
        """Keep nothing."""

    def _run(self) -> None:
        try:
            with built(self._spec, self._connection) as rank:
                rank.run()
        except Exception as error:  # whatever it is, who started the rank must hear it
            with suppress(StateError):
                self._connection.send(Refused("", portable(error)))
        finally:
            self._connection.close()


class InProcessLauncher:
    """Starts ranks on threads of this process; a rank's model is a directory, or a model, plain or wrapped."""

    name = "in-process"

    def __init__(self, *, start_timeout_s: float = START_S) -> None:
        require_period(start_timeout_s, "start_timeout_s")
        self._start_timeout_s = start_timeout_s
        self._ranks: list[RankThread] = []
        self._closed = False
        self._lock = threading.Lock()  # of the two above

    def start(self, spec: RankSpec) -> RankClient:
        """Start a rank; see `Launcher`."""
        ours, theirs = queue_pair()
        with self._lock:
            if self._closed:
                raise StateError("the launcher was closed; make a new one")
            try:
                rank = RankThread(spec, theirs)
            except RuntimeError as error:  # there are no threads left
                raise StateError(f"rank {spec.name!r} cannot be started now: {error}") from error
            self._ranks = [*(each for each in self._ranks if each.wait(0) is None), rank]
        return await_hello(ours, rank, spec.name, timeout_s=self._start_timeout_s)

    def close(self) -> None:
        """End all that it has started, and wait until their models are unwrapped. Can be called twice."""
        with self._lock:
            self._closed = True
            ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait(60)
