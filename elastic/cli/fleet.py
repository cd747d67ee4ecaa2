"""`elastic fleet`: look at a fleet behind a server, move its requests and layers, add and remove ranks."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from elastic.cli.acts.deployments import DEPLOYING, add_deploying, complete_deploying
from elastic.cli.inputs.checks import TOKEN, read_secret
from elastic.cli.inputs.exchange_options import add_exchange, exchange_form
from elastic.cli.views.sizes import ranges
from elastic.cli.views.status_client import NoAnswer, Send, act, ask, base_url
from elastic.errors import ConfigError

LOOK_S = 5.0
"""How long the server may take to say how it is."""
MOST_LAYERS = 10_000


def add_options(command: ArgumentParser) -> None:
    """Add the sub-commands."""
    what = command.add_subparsers(dest="what", required=True, metavar="WHAT")
    status = what.add_parser("status", help="ranks, instances, and what happened lately")
    move = what.add_parser("move", help="have a request go on at another instance")
    add = what.add_parser("add", help="start one more rank")
    remove = what.add_parser("remove", help="end a rank; its requests go on elsewhere")
    plan = what.add_parser("plan", help="price what could give KV cache to requests that lack it, and do nothing")
    capacity = what.add_parser("capacity", help="the longest request by how many ranks share layers; longer is refused")
    drop = what.add_parser("drop", help="have ranks compute each other's layers, and drop those that they hold twice")
    restore = what.add_parser("restore", help="have dropped layers return")
    reshard = what.add_parser("reshard", help="have ranks share every layer of their instances, or share none any more")
    migrate = what.add_parser("migrate", help="have a rank compute layers of another one's instance")
    replicate = what.add_parser(
        "replicate", help="have a rank compute layers of an instance too, for half its requests"
    )
    evict = what.add_parser("evict", help="have layers of an instance be computed by one rank again")
    merge = what.add_parser("merge", help="connect ranks, so that they can compute each other's layers")
    split = what.add_parser("split", help="restore a group of ranks, and close its connections")
    deploying = add_deploying(what)
    forms = (drop, restore, reshard, migrate)
    acting = (move, add, remove, plan, capacity, *forms, replicate, evict, merge, split, *deploying)
    for each in (status, *acting):
        each.add_argument("url", metavar="URL", help="the server, such as http://127.0.0.1:8000")
    for each in acting:
        each.add_argument("--token-file", metavar="FILE", help=f"file with the token for actions (else ${TOKEN})")
    move.add_argument("request", metavar="REQUEST", help="id of an answer, such as chatcmpl-…")
    move.add_argument("instance", metavar="INSTANCE", help="where it is to go on")
    add.add_argument("--place", action="append", metavar="PLACE", help="its memory (as the first rank's); repeatable")
    remove.add_argument("rank", metavar="RANK", help="its name")
    remove.add_argument("--now", action="store_true", help="do not wait until its requests have gone on elsewhere")
    plan.add_argument("--need", required=True, metavar="SIZE", help="keys and values that find no room, such as 24MiB")
    capacity.add_argument("--degrees", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="such ranks (1 2 4)")
    _add_drop(drop)
    restore.add_argument("rank", nargs="?", metavar="RANK", help="a rank of the group (all groups)")
    restore.add_argument("--sharing", action="store_true", help="ranks that share layers go on to")
    reshard.add_argument("instances", nargs="+", metavar="INSTANCE", help="whoever computes layers with one counts too")
    reshard.add_argument("--tp", type=int, required=True, metavar="N", help="ranks that share each layer; 1: none do")
    for each in (*forms, replicate):
        each.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    for each in forms:
        add_exchange(each)
        each.add_argument(
            "--timeout", type=float, metavar="S", help="for live requests to fit in the caches that will be left (60)"
        )
    for each in (migrate, replicate, evict):
        each.add_argument("home", metavar="HOME", help="the rank whose instance it is")
    migrate.add_argument("rank", metavar="RANK", help="the one that is to compute them; HOME: they come back")
    replicate.add_argument("rank", metavar="RANK", help="the one that is to compute them too")
    for each in (migrate, replicate):
        each.add_argument("--layers", required=True, metavar="LAYERS", help="such as 4-7,9")
    evict.add_argument("--layers", metavar="LAYERS", help="such as 4-7,9 (all that have a replica)")
    merge.add_argument("ranks", nargs="+", metavar="RANK", help="their names")
    split.add_argument("rank", metavar="RANK", help="a rank of the group")
    complete_deploying(*deploying)


def _add_drop(command: ArgumentParser) -> None:
    command.add_argument("--whole", action="store_true", help="free whole models, with --need, to measure against")
    command.add_argument("--most", type=int, metavar="N", help="instances of a group at the most, with --need")
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--need", metavar="SIZE", help="weights that are to leave at least, such as 24MiB")
    what.add_argument(
        "--layers", action="append", metavar="RANK=LAYERS", help="layers that a rank drops, such as r0=6-11; repeatable"
    )


def fleet(options: Namespace) -> int:
    """Do what was asked; returns the exit code."""
    url = base_url(options.url)
    if options.what == "status":
        return _status(url)
    token = read_secret("--token-file", options.token_file, TOKEN)
    if token is None:
        raise ConfigError(f"elastic fleet {options.what} needs a token: give --token-file FILE, or set {TOKEN}")
    return _ACTS[options.what](partial(act, url, token), options)


def _status(url: str) -> int:
    from elastic.cli.views.fleet import deployments, fleet_events, ranks
    from elastic.cli.views.panels import plain_console
    from elastic.cli.views.stages import stages, work

    document = ask(url, LOOK_S)
    if not document.ranks:
        raise NoAnswer(f"{url} serves one model and no fleet; elastic top {url} shows it")
    console = plain_console()
    for panel in deployments(document):
        console.print(panel)
    console.print(ranks(document))
    for each in filter(None, [stages(document), work(document)]):
        console.print(each)
    console.print(fleet_events(document.fleet_events, last=20))
    return 0


def _said(options: Namespace, *names: str) -> dict[str, Any]:
    """Return options as the fields of a body that have their names."""
    return {name: getattr(options, name) for name in names}


def _move(send: Send, options: Namespace) -> int:
    moved = send("move", _said(options, "request", "instance"))
    print(
        f"{options.request} goes on at {options.instance}: {moved.get('moved_bytes', 0):,} bytes were copied, "
        f"its next token came after {moved.get('stalled_ms', 0.0):.1f} ms"
    )
    return 0


def _add(send: Send, options: Namespace) -> int:
    print(f"{send('add', {'places': options.place or []})} serves")
    return 0


def _remove(send: Send, options: Namespace) -> int:
    send("remove", {"rank": options.rank, "drain": not options.now})
    print(f"{options.rank} has ended")
    return 0


def _plan(send: Send, options: Namespace) -> int:
    offers = send("plan", _said(options, "need"))
    for offer in offers:
        loss = "" if offer.get("lossless", True) else ", with a loss of quality"
        nbytes = offer.get("relieved_bytes", 0)
        brings = f"frees {nbytes:,} bytes" if nbytes > 0 else f"takes {-nbytes:,} bytes"
        print(f"{offer['kind']}: {brings} for {offer.get('seconds', 0.0):.3f} s of serving{loss}")
    if not offers:
        print("nothing that this fleet can do gives room for keys and values")
    return 0


def _capacity(send: Send, options: Namespace) -> int:
    capacities = send("capacity", _said(options, "degrees"))
    for rank, blocks in capacities.items():
        told = ", ".join(f"{count:,} at tp={degree}" for degree, count in blocks.items())
        print(f"{rank}: blocks of the longest request: {told or 'none, since layers are not cut so'}")
    if not capacities:
        print("no rank serves now")
    return 0


def _drop(send: Send, options: Namespace) -> int:
    wanted = {"layers": _layers_by_rank(options.layers)} if options.layers else _said(options, "need")
    body = {**wanted, **_said(options, "whole", "most", "dry_run"), **_form(options)}
    dropped = send("drop", body)
    for group in dropped.get("groups") or []:
        for rank, keeps in zip(group["members"], group["keeps"], strict=True):
            print(f"{rank} keeps layers {ranges(keeps)}")
    return _exchanged(dropped, f"{dropped.get('freed_bytes', 0):,} bytes of weights have left")


def _restore(send: Send, options: Namespace) -> int:
    """Have the layers of a group return; or have it part, which is the same and closes its connections."""
    body = _said(options, "rank")
    if options.what == "restore":
        body |= {**_said(options, "sharing", "dry_run"), **_form(options)}
    restored = send(options.what, body)
    members = ", ".join(restored.get("members") or ["no rank"])
    return _exchanged(restored, f"{members}; {restored.get('fetched_bytes', 0):,} bytes of weights came back")


def _reshard(send: Send, options: Namespace) -> int:
    done = send("reshard", {**_said(options, "instances", "tp", "dry_run"), **_form(options)})
    members = ", ".join(done.get("members") or options.instances)
    left = f"{members} at tp={done.get('tp', options.tp)}; {done.get('freed_bytes', 0):,} bytes of weights have left"
    return _exchanged(done, f"{left}, {done.get('fetched_bytes', 0):,} came back")


def _migrate(send: Send, options: Namespace) -> int:
    done = send("migrate", {**_layers_at(options), **_form(options)})
    return _exchanged(done, f"{options.rank} computes layers {options.layers} of {options.home}")


def _replicate(send: Send, options: Namespace) -> int:
    done = send("replicate", _layers_at(options))
    there = f"layers of {options.home} that {options.rank} computes too: {ranges(done.get('layers') or ()) or 'none'}"
    return _exchanged(done, f"{there}; {done.get('fetched_bytes', 0):,} bytes of weights came there")


def _evict(send: Send, options: Namespace) -> int:
    body = {"home": options.home, "layers": None if options.layers is None else _layers(options.layers)}
    done = send("evict", body)
    gone = ranges(done.get("layers") or ()) or "none"
    return _exchanged(done, f"layers of {options.home} that have no replica any more: {gone}")


def _merge(send: Send, options: Namespace) -> int:
    merged = send("merge", _said(options, "ranks"))
    print(f"{', '.join(merged.get('members') or options.ranks)} can compute each other's layers")
    return 0


def _layers_at(options: Namespace) -> dict[str, Any]:
    """Return what was said of layers of an instance that are to be at another rank."""
    return {**_said(options, "home", "rank", "dry_run"), "layers": _layers(options.layers)}


def _form(options: Namespace) -> dict[str, Any]:
    """Return what was said of how layers change their rank, and how long that may take."""
    return exchange_form(options) | ({} if options.timeout is None else {"timeout_s": options.timeout})


def _exchanged(done: Mapping[str, Any], what: str) -> int:
    """Say what was done and what it took, or what would be; return 1 for what was stopped, or could not begin."""
    if done.get("status") == "planned":
        return _planned(done)
    why = f"; {done['why']}" if done.get("why") else ""
    print(
        f"{done.get('status')}: {what}; {done.get('flips', 0)} layers changed their rank, "
        f"{done.get('moved_bytes', 0):,} bytes of keys and values were copied, an instance stood still for "
        f"{done.get('stalled_ms', 0.0):.1f} ms at the most{why}"
    )
    return 0 if done.get("status") == "applied" else 1


def _planned(done: Mapping[str, Any]) -> int:
    """Say what would be done; return the exit code."""
    for rank, layers in (done.get("restored") or {}).items():
        print(f"{rank} has layers {ranges(layers)} in a variant; they are restored first")
    fetched = f"{done['fetched_bytes']:,} come back, " if done.get("fetched_bytes") else ""
    print(
        f"planned: {done.get('freed_bytes', 0):,} bytes of weights would leave, {fetched}{done.get('flips', 0)} layers "
        f"change their rank, {done.get('moved_bytes', 0):,} bytes of keys and values be copied, in "
        f"{done.get('seconds', 0.0):.3f} s; price: "
        f"{(done.get('price') or {}).get('seconds', 0.0):.3f} s of serving, and longer steps afterwards"
    )
    return 0


def _layers_by_rank(given: Sequence[str]) -> dict[str, list[int]]:
    """Read `r0=6-11,14`, once for each rank. Raises `ConfigError`."""
    layers: dict[str, list[int]] = {}
    for text in given:
        rank, _, runs = text.partition("=")
        if not rank or rank in layers:
            raise ConfigError(f"--layers {text!r}: write each rank once, with its layers, such as r0=6-11,14")
        layers[rank] = _layers(runs, text)
    return layers


def _layers(runs: str, text: str | None = None) -> list[int]:
    """Read `6-11,14`, of an option that is `text`. Raises `ConfigError`."""
    text = runs if text is None else text
    matches = [_RUN.fullmatch(run.strip()) for run in runs.split(",")]
    if not all(matches):
        raise ConfigError(f"--layers {text!r}: write layers such as 6-11,14")
    bounds = [(int(run[1]), int(run[2] or run[1])) for run in matches if run]
    if any(not first <= last < MOST_LAYERS for first, last in bounds):
        raise ConfigError(f"--layers {text!r}: write ranges as first-last, with layers below {MOST_LAYERS:,}")
    return [layer for first, last in bounds for layer in range(first, last + 1)]


_RUN = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_ACTS = {
    "move": _move,
    "add": _add,
    "remove": _remove,
    "plan": _plan,
    "capacity": _capacity,
    "drop": _drop,
    "restore": _restore,
    "reshard": _reshard,
    "migrate": _migrate,
    "replicate": _replicate,
    "evict": _evict,
    "merge": _merge,
    "split": _restore,
    **DEPLOYING,
}
