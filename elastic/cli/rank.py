"""`elastic rank`: a process that serves a model for a fleet that is elsewhere."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec

from elastic.assets import MODEL_DIR
from elastic.cli.inputs.fleet_options import engine_options
from elastic.cli.serve import add_engine, add_memory, wrap_options
from elastic.errors import StateError


def add_options(command: ArgumentParser) -> None:
    """Add the options of the command."""
    command.add_argument(
        "model", nargs="?", default=str(MODEL_DIR), metavar="MODEL", help="model directory (the small one inside)"
    )
    command.add_argument("--join", required=True, metavar="HOST:PORT", help="where the fleet listens for ranks")
    command.add_argument("--key-file", required=True, metavar="FILE", help="the fleet's key; only you may read it")
    command.add_argument("--name", default="", help="name of this rank (the fleet chooses one)")
    add_engine(command)
    add_memory(command)
    command.add_argument("--max-requests", type=int, default=256, metavar="N", help="answers computed at a time (256)")
    command.add_argument("--lookahead", action="store_true", help="measure what steps cost first, for equal ones")
    command.add_argument("--cores", type=int, nargs="+", default=[], metavar="N", help="CPU cores to run on (all)")


def rank(options: Namespace) -> int:
    """Prove the key, load, wrap, and serve the fleet until it lets go or is gone; returns the exit code."""
    from elastic.cluster.control.handshake import connect, read_key
    from elastic.cluster.control.listener import parse_address
    from elastic.cluster.rank.process import serve
    from elastic.cluster.rank.spec import RankSpec

    key, address = read_key(options.key_file), parse_address(options.join, option="--join")
    wrap = wrap_options(options)
    spec = RankSpec(
        options.name,
        os.path.abspath(options.model),
        tuple(wrap.pop("places") or ()),
        wrap=wrap,
        engine={
            "max_requests": options.max_requests,
            "grammars": "llguidance" if find_spec("llguidance") else None,
            **engine_options(options),
        },
        cores=tuple(options.cores),
        dtype=options.dtype or "auto",
        lookahead=options.lookahead,
    )
    connection = connect(address, key)  # before minutes are spent on the model
    try:
        serve(connection, spec)
    except EOFError as error:
        raise StateError("the fleet has gone") from error
    return 0
