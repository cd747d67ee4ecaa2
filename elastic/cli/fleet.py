"""`elastic fleet`: look at a fleet behind a server, move its requests, add and remove ranks."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from elastic.cli.inputs.checks import read_secret
from elastic.errors import ConfigError

TOKEN = "ELASTIC_TOKEN"
LOOK_S, ACT_S = 5.0, 660.0
"""How long the server may take: a rank that is added loads its model."""


def add_options(command: ArgumentParser) -> None:
    """Add the sub-commands."""
    what = command.add_subparsers(dest="what", required=True, metavar="WHAT")
    status = what.add_parser("status", help="ranks, instances, and what happened lately")
    move = what.add_parser("move", help="have a request go on at another instance")
    add = what.add_parser("add", help="start one more rank")
    remove = what.add_parser("remove", help="end a rank; its requests go on elsewhere")
    for each in (status, move, add, remove):
        each.add_argument("url", metavar="URL", help="the server, such as http://127.0.0.1:8000")
    for each in (move, add, remove):
        each.add_argument("--token-file", metavar="FILE", help=f"file with the token for actions (else ${TOKEN})")
    move.add_argument("request", metavar="REQUEST", help="id of an answer, such as chatcmpl-…")
    move.add_argument("instance", metavar="INSTANCE", help="where it is to go on")
    add.add_argument("--place", action="append", metavar="PLACE", help="its memory (as the first rank's); repeatable")
    remove.add_argument("rank", metavar="RANK", help="its name")
    remove.add_argument("--now", action="store_true", help="do not wait until its requests have gone on elsewhere")


def fleet(options: Namespace) -> int:
    """Do what was asked; returns the exit code."""
    from elastic.cli.views.status_client import base_url

    url = base_url(options.url)
    if options.what == "status":
        return _status(url)
    token = read_secret("--token-file", options.token_file, TOKEN)
    if token is None:
        raise ConfigError(f"elastic fleet {options.what} needs a token: give --token-file FILE, or set {TOKEN}")
    return {"move": _move, "add": _add, "remove": _remove}[options.what](url, token, options)


def _status(url: str) -> int:
    from rich.console import Console

    from elastic.cli.views.fleet import fleet_events, ranks
    from elastic.cli.views.status_client import NoAnswer, ask

    document = ask(url, LOOK_S)
    if not document.ranks:
        raise NoAnswer(f"{url} serves one model and no fleet; elastic top {url} shows it")
    console = Console()
    console.print(ranks(document))
    console.print(fleet_events(document.fleet_events, last=20))
    return 0


def _move(url: str, token: str, options: Namespace) -> int:
    from elastic.cli.views.status_client import post

    body = {"request": options.request, "instance": options.instance}
    moved = post(url, "/elastic/fleet/move", body, token, ACT_S).get("moved") or {}
    print(
        f"{options.request} goes on at {options.instance}: {moved.get('moved_bytes', 0):,} bytes were copied, "
        f"its next token came after {moved.get('stalled_ms', 0.0):.1f} ms"
    )
    return 0


def _add(url: str, token: str, options: Namespace) -> int:
    from elastic.cli.views.status_client import post

    added = post(url, "/elastic/fleet/add", {"places": options.place or []}, token, ACT_S).get("added")
    print(f"{added} serves")
    return 0


def _remove(url: str, token: str, options: Namespace) -> int:
    from elastic.cli.views.status_client import post

    post(url, "/elastic/fleet/remove", {"rank": options.rank, "drain": not options.now}, token, ACT_S)
    print(f"{options.rank} has ended")
    return 0
