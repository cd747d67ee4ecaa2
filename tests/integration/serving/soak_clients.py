"""Clients of a server that come and go, and the books of what its engine was asked for and told them."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from elastic.engines.base import Listener, Output, Request
from support.serving.live_server import body, texts

MOST = 48
"""Tokens of an answer at the most."""
LINES = ("import os\n", "x = 1\n", "def f(a):\n")
PROMPTS = [f"# {name}\n" + line * 6 for name in ("one", "two", "three") for line in LINES]


@dataclass
class Books:
    """All that the engine was asked for, and what it told."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)

    def keep(self, engine: Any) -> None:
        submit = engine.submit

        def noted(request: Request, listener: Listener) -> None:
            def hear(output: Output) -> None:
                assert output.request not in self.ends, "news after the end"
                self.tokens[output.request].extend(output.tokens)
                if output.finish:
                    self.ends[output.request] = output.finish
                listener(output)

            self.prompts[request.id], self.tokens[request.id] = request.prompt, []
            submit(request, hear)

        engine.submit = noted


async def client(http: httpx.AsyncClient, seed: int, until_s: float, seen: Counter[str]) -> None:
    rng = random.Random(seed)
    while time.monotonic() < until_s:
        leave_after = rng.randrange(12) if rng.random() < 0.3 else None
        asked = body(rng.choice(PROMPTS), rng.choice([8, 24, MOST]), stream=True)
        pieces = 0
        async with http.stream("POST", "/v1/completions", json=asked) as response:
            assert response.status_code == 200
            if leave_after != 0:
                async for _ in texts(response):
                    pieces += 1
                    if pieces == leave_after:
                        break
        seen["left" if leave_after is not None else "read"] += 1


async def everyone(url: str, duration_s: float, seen: Counter[str], clients: int = 64) -> None:
    """Have so many ask for answers one after another for so long; `seen` counts those that were read to the end."""
    end = time.monotonic() + duration_s
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as http:
        await asyncio.gather(*(client(http, seed, end, seen) for seed in range(clients)))
