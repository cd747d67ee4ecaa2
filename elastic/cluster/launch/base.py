"""What starts ranks: the protocol of launchers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from elastic.cluster.control.connection import Connection, in_time
from elastic.cluster.control.messages import Hello, Refused
from elastic.cluster.control.processes import RankProcess
from elastic.cluster.control.records import require_record
from elastic.cluster.rank.client import RankClient
from elastic.cluster.rank.spec import RankSpec
from elastic.errors import ConfigError, ElasticError, StateError

__all__ = ["Launcher", "RankSpec", "await_hello", "of_a_directory"]
START_S = 600.0
"""How long a rank may take to load its model."""


class Launcher(Protocol):
    """Starts ranks. Thread-safe: several `start` may run at once."""

    name: str
    """What `RankStatus.launcher` says."""

    def start(self, spec: RankSpec) -> RankClient:
        """Start a rank, and return when it can serve.

        Raises `ConfigError` for what can never start, `CapacityError` where there is no room, `StateError` for a rank
        that ended meanwhile or did not come in time: in the words of the rank. Then nothing is left of it.
        """

    def close(self) -> None:
        """End all that it has started, also while `start` runs, which raises then. Can be called twice."""


def of_a_directory(spec: RankSpec) -> RankSpec:
    """Return a spec as a process in any folder can have it. Raises `ConfigError` where no other process can."""
    if not isinstance(spec.model, str | Path):
        raise ConfigError(
            f"model: a {type(spec.model).__name__} cannot go to another process; give its directory, or "
            "launch='in-process'"
        )
    return replace(spec, model=os.path.abspath(spec.model), wrap=dict(spec.wrap), engine=dict(spec.engine))


def await_hello(
    connection: Connection,
    process: RankProcess | None,
    name: str,
    *,
    timeout_s: float,
    greet: Callable[[], object] = lambda: None,
) -> RankClient:
    """Return the client of a rank when it has said Hello. Raises what the rank raised, or `StateError`: it has ended.

    `greet` says and hears what comes before that, in the same time; it raises `EOFError` where the rank has gone.
    """
    try:
        with in_time(timeout_s, connection.close):
            greet()
            first: Hello | Refused = require_record(connection.receive(), Hello, Refused, sender=f"rank {name!r}")
        if isinstance(first, Hello):
            return RankClient(connection, first, process)
        raise first.error if isinstance(first.error, ElasticError) else StateError(repr(first.error))
    except BaseException as error:
        connection.close()
        ended = None
        if process is not None:
            ended = process.wait(1.0)
            process.kill()
            process.close()
        if isinstance(error, EOFError):
            why = ended.reason if ended else "its connection ended"
            raise StateError(f"rank {name!r} did not start: {why}") from error
        raise
