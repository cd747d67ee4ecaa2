"""A process that has imported what a rank needs, and becomes one rank after another by forking.

Run as `python -m elastic.cluster.launch.fork_server SOCKET PID`: the number of an inherited socket, and the process
that asks. It never starts a thread, opens a device, or imports the asking program. It ends when the socket or the
asking process does, and its ranks end with it, also stopped ones: the kernel kills them (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any, NoReturn

MOST_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
PRELOADED = (
    "transformers.generation",
    "elastic.cluster.rank.process",
    "elastic.runtime.installation",
    "elastic.actions.transactions",
    "elastic.quant.variants.pack_model",
)


class ForkServer:
    """Serves one asking process over one socket of packets, on the only thread of this process."""

    def __init__(self, asking: socket.socket, parent: int) -> None:
        self._asking = asking
        self._parent = os.pidfd_open(parent)
        self._ranks: dict[int, int] = {}  # pidfd -> pid

    def run(self) -> None:
        """Fork ranks until the asking process is gone."""
        poll = select.poll()
        poll.register(self._asking, select.POLLIN)
        poll.register(self._parent, select.POLLIN)
        while True:
            for number, _ in poll.poll():
                if number == self._parent:
                    return
                if number in self._ranks:
                    poll.unregister(number)
                    self._tell_end(number)
                elif (started := self._fork_next()) is None:
                    return
                elif started:
                    poll.register(started, select.POLLIN)

    def _fork_next(self) -> int | None:
        """Take a wish and fork a rank; return its pidfd, 0 if that could not be, None if nobody asks any more."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._asking, MOST_BYTES, 1)
        except ConnectionResetError:  # it ended before it had read all that was told
            return None
        if not data:
            return None
        wish = json.loads(data)
        if not descriptors:  # it was cut off
            self._tell({"id": wish["id"], "error": "the fork server has too many open files"})
            return 0
        _import_class(wish["model"])
        try:
            pid = os.fork()
        except OSError as error:
            self._tell({"id": wish["id"], "error": f"no process could be started: {error.strerror}"})
            os.close(descriptors[0])
            return 0
        if pid == 0:
            self._become_a_rank(descriptors[0])
        os.close(descriptors[0])
        pidfd = os.pidfd_open(pid)
        self._ranks[pidfd] = pid
        self._tell({"id": wish["id"], "pid": pid}, pidfd)
        return pidfd

    def _tell_end(self, pidfd: int) -> None:
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        assert ended is not None  # without WNOHANG it waits
        by_signal = ended.si_code != os.CLD_EXITED
        self._tell({"pid": self._ranks.pop(pidfd), "status": ended.si_status, "by_signal": by_signal})
        os.close(pidfd)

    def _tell(self, message: dict[str, Any], *descriptors: int) -> None:
        with suppress(OSError):  # nobody asks any more: the next poll says so
            socket.send_fds(self._asking, [json.dumps(message).encode()], descriptors)

    def _become_a_rank(self, descriptor: int) -> NoReturn:
        """Be a rank over a connected socket; in a forked child, which does not return."""
        code, server = 1, os.getppid()
        try:
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)  # it died before the kernel was told
            self._asking.close()
            for number in (self._parent, *self._ranks):
                os.close(number)
            gc.unfreeze()
            _be_a_rank(descriptor)
            code = 0
        except SystemExit:
            code = 0
        except BaseException:  # as at the end of any program
            traceback.print_exc()
        finally:
            with suppress(Exception):  # nobody reads it any more, or the model has closed it
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _be_a_rank(descriptor: int) -> None:
    import torch

    from elastic.cluster.control.connection import SocketConnection
    from elastic.cluster.control.handshake import compare_protocols
    from elastic.cluster.rank.process import serve
    from elastic.errors import ElasticError

    random.seed()
    torch.seed()  # else all ranks would draw the same numbers
    connection = SocketConnection(socket.socket(fileno=descriptor))
    try:
        compare_protocols(connection)
        serve(connection, connection.receive())
    except ElasticError:
        sys.exit()  # the fleet has its words
    except EOFError:
        sys.exit()  # there is no fleet any more


def _import_class(model: str) -> None:
    """Import the class of a model, so that its ranks need not."""
    with suppress(Exception):  # whatever is wrong with the directory, the rank says so
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        config = AutoConfig.from_pretrained(model)
        _ = AutoModelForCausalLM._model_mapping[type(config)]
        get_checkpoint_conversion_mapping(config.model_type)  # a table of all models, a third of the time of a start


def main(descriptor: int, parent: int) -> None:
    """Import what ranks need, then fork them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asking = socket.socket(fileno=descriptor)
    asking.set_inheritable(False)
    try:
        server = ForkServer(asking, parent)
    except ProcessLookupError:
        return  # it has gone already
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    if len(threads := os.listdir("/proc/self/task")) > 1:
        print(f"elastic's fork server has {len(threads)} threads; ranks may hang", file=sys.stderr)
    gc.enable()
    gc.collect()
    gc.freeze()  # so that collections in ranks do not write to the pages that they share
    server.run()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
