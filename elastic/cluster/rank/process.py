"""The process of a rank: from what it is to be, to its end."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from contextlib import suppress

import torch

from elastic.cluster.control.connection import SocketConnection
from elastic.cluster.control.messages import Refused
from elastic.cluster.rank.build import built
from elastic.cluster.rank.questions import portable
from elastic.cluster.rank.rank import Rank
from elastic.cluster.rank.spec import RankSpec
from elastic.errors import ConfigError, StateError

SWITCH_S = 0.0005
"""After how long a thread lets another one go on that waits for the interpreter: Python's 5 ms are many times a pause
of the step loop, between whose calls that let it go the other threads of a rank run."""
GRACE_S = 5.0
"""How long a rank without a fleet may take to end in order."""


def serve(connection: SocketConnection, spec: RankSpec) -> None:
    """Be a rank until the fleet lets it go, or is gone; SIGTERM ends it too. On the main thread of its process.

    Raises what loading and wrapping raise; the fleet has been told. `ConfigError` with its words if it takes no such
    rank.
    """
    _prepare(spec.name)
    ended = threading.Event()
    try:
        _settle(spec)
        with built(spec, connection) as rank:
            threading.Thread(target=_watch, args=(rank, ended), name="elastic-watchdog", daemon=True).start()
            rank.run()
            if rank.refused:
                raise ConfigError(rank.refused)
    except Exception as error:  # whatever it is, who started the rank must hear it
        with suppress(StateError):
            connection.send(Refused("", portable(error)))
        raise
    finally:
        ended.set()
        connection.close()


def _prepare(name: str) -> None:
    """Log to standard error, each line with the rank's name; leave an interrupt of the terminal to the fleet, end in
    order when asked to terminate, and have threads take turns quickly.
    """
    sys.setswitchinterval(SWITCH_S)
    format = f"%(asctime)s rank {name or os.getpid()} %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(stream=sys.stderr, format=format, force=True)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())


def _settle(spec: RankSpec) -> None:
    """Set the variables of the process, bind it to its cores, and say how many threads compute."""
    os.environ.update(spec.environment)
    if spec.cores:
        try:
            os.sched_setaffinity(0, spec.cores)
        except (OSError, ValueError) as error:
            there = sorted(os.sched_getaffinity(0))
            raise ConfigError(f"cores={list(spec.cores)} cannot be had ({error}); this process has {there}") from error
        torch.set_num_threads(len(spec.cores))
    elif spec.threads is not None:
        torch.set_num_threads(min(spec.threads, torch.get_num_threads()))


def _watch(rank: Rank, ended: threading.Event) -> None:
    """End the process when its fleet has gone but something in it goes on, such as a hanging forward pass."""
    rank.ended.wait()
    if not ended.wait(GRACE_S):
        print(f"rank {rank.name} had not ended {GRACE_S:.0f} s after its fleet went; it ends now", file=sys.stderr)
        os._exit(1)
