"""Replicas are added and evicted by HTTP while clients are served."""

from __future__ import annotations

import threading
from typing import Any

import httpx

import elastic
from elastic.engines.continuous import ContinuousEngine
from support.processes import wait_until
from support.serving.live_server import EMBEDDED, NAME, PATIENCE_S, answer, live, model
from support.wrapped_model import small

HEADERS = {"Authorization": "Bearer open sesame"}
PROMPTS = ["def add(a, b):\n", "import os\n", "x = "]
MOST = 24


def test_replicas_come_and_go_while_clients_are_served() -> None:
    expected = [answer(EMBEDDED, prompt, MOST)[0] for prompt in PROMPTS]
    asked = {"model": NAME, "prompt": PROMPTS, "max_tokens": MOST, "temperature": 0}
    stop, seen = threading.Event(), list[list[str]]()
    elastic.wrap(model(), places=[small(64 << 20, f"cpu#{label}") for label in "ab"])
    engine = ContinuousEngine(model())
    try:
        with live(engine, token="open sesame", actions=True) as server:

            def complete() -> None:
                while not stop.is_set():
                    told = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=PATIENCE_S).json()
                    seen.append([choice["text"] for choice in told["choices"]])

            def act(kind: str, **more: Any) -> dict[str, Any]:
                body = {"actions": [{"kind": kind, "layers": [0, 1, 3], "place": "cpu#b"}], **more}
                told = httpx.post(f"{server.url}/elastic/actions", json=body, headers=HEADERS, timeout=PATIENCE_S)
                assert told.status_code == 200, told.text
                return dict(told.json())

            client = threading.Thread(target=complete)
            client.start()
            try:
                assert act("replicate", dry_run=True)["steps"][0]["moved_bytes"] > 0
                assert act("replicate")["results"][0]["layers"] == [0, 1, 3]
                wait_until(lambda: any(len(parts) == 2 for parts in engine.runtime.passes()))
                before = len(seen)
                wait_until(lambda: len(seen) > before)
                assert act("evict")["results"][0]["status"] == "applied"
            finally:
                stop.set()
                client.join(PATIENCE_S)
        assert seen
        assert all(texts == expected for texts in seen)
        assert engine.runtime.replicated == ()
        model().elastic.check()
    finally:
        engine.stop(drain=False)
        elastic.unwrap(model())
