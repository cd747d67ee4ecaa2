"""Status documents as servers give them, and a server that gives what it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from elastic.controller.snapshot import Quantiles, RequestStats
from elastic.types import (
    Event,
    HostStatus,
    KVStatus,
    PlaceStatus,
    Release,
    Residency,
    ResizeKV,
    Restore,
    Status,
    Swap,
)

MIB = 2**20
KINDS = {Swap: "swap", Restore: "restore", Release: "release", ResizeKV: "resize_kv"}
VARIANTS = ("float16", "float16", "int8", "int4", "int4", "float16+int4", "absent", "float16")


def status() -> Status:
    owners = {"layer:0": 600 * MIB, "fixed:lm_head": 24 * MIB, "kv": 300 * MIB, "staging": 2 * MIB}
    place = PlaceStatus("cuda:0", 2 * MIB, 1024 * MIB, owners, 98 * MIB, 40 * MIB, 18 * MIB, 120)
    kv = KVStatus("cuda:0", 400 * MIB, 512 * MIB, 512 * MIB, 300 * MIB, 0, 0, 7)
    residencies = {f"model.layers.{i}": (Residency("cuda:0", v),) for i, v in enumerate(VARIANTS)}
    return Status(8, (place,), (kv,), residencies, HostStatus(0, 0, 0, 0), 2)


def events() -> tuple[Event, ...]:
    swap = Event(0, Swap((3, 4), "int4"), 1e9, "KV use .91 for 3 looks", 10, 5 * MIB, 6.0, 1.25, 0.125, True, "applied")
    grow = Event(1, ResizeKV("cuda:0", 512 * MIB, 7), 1e9, "[/by] hand", 0, 0, 0.5, 0.0, 0.0625, True, "applied")
    return swap, grow


def traffic() -> RequestStats:
    return RequestStats(
        waiting=3,
        running=17,
        queue_delay_s=0.25,
        arrived=1234,
        completed=1200,
        cancelled=5,
        failed=1,
        rejected=8,
        preemptions=2,
        stalls=9,
        tokens_per_s=432.1,
        arrivals_per_s=2.5,
        ttft_s=Quantiles(40, 0.2, 0.15, 0.5, 1.5),
        tpot_s=Quantiles(40, 0.03, 0.025, 0.05, 0.06),
    )


def document(**changes: Any) -> dict[str, Any]:
    """What a server says."""
    health = {"running": True, "ticks": 900, "last_reason": "pressure: KV use is high", "last_figures": "KV .91"}
    health |= {"actions": 4, "cost": 0.0012, "faults": [{"when_s": 1e9, "text": "OSError: gone", "times": 2}]}
    said: dict[str, Any] = {
        "version": 1,
        "model": "stdlib-2.6m",
        "state": "serving",
        "at_s": 1000.0,
        "uptime_s": 3725.5,
        "traffic": asdict(traffic()),
        "layers": list(VARIANTS),
        "status": asdict(status()),
        "events": [asdict(e) | {"action": {"kind": KINDS[type(e.action)], **asdict(e.action)}} for e in events()],
        "controller": health,
        "something": {"new": 1},
    }
    return json.loads(json.dumps(said | changes))


def fleet_document(**changes: Any) -> dict[str, Any]:
    """What a server of a fleet of two ranks says, one of them lost."""
    said = document()
    of_model = {key: said.pop(key) for key in ("layers", "status", "events", "controller")}
    beat = {"pid": 7, "host": "here", "launcher": "local", "places": ["cuda:0=1GiB"], "beat_s": 0.25, "why": ""}
    lost = {**beat, "beat_s": 9.0, "why": "it was killed [SIGKILL]", "traffic": None, "layers": [], "status": None}
    load = {"running": 5, "waiting": 1, "free_blocks": 1200, "total_blocks": 4000, "steps": 9}
    event = {"id": 0, "kind": "lost", "when_s": 1e9, "rank": "r1", "requests": 3, "recomputed_tokens": 1234}
    return said | {
        "version": 2,
        "layers": [],
        "status": None,
        "events": [],
        "controller": None,
        "ranks": [
            {"name": "r0", "state": "serving", **beat, **of_model, "traffic": said["traffic"]},
            {"name": "r1", "state": "lost", **lost, "events": [], "controller": None},
        ],
        "instances": [{"name": "i0", "leader": "r0", "ranks": ["r0"], "load": load, "requests": 6, "freeness": 240.0}],
        "fleet_events": [event, {**event, "kind": "moved", "request": "chat-1", "moved_bytes": 3 << 20, "why": "[b]"}],
        "fleet": {"queued": 4, "totals": {"moved": 11, "requests_resumed": 3, "recomputed_tokens": 1234}},
        **changes,
    }


Answer = Callable[[str], tuple[int, bytes]]
"""From a path to a status code and a body."""


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """The address of a server that answers so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, body = answer(self.path)
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
