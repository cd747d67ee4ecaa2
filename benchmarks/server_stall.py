"""The latency of `/health` while bodies that were made to stall a server are sent to it.

    python benchmarks/server_stall.py [--seconds 3] [--senders 2]

`elastic serve` with the model inside, in a process of its own. For each kind of body, senders post it again and again
from another process while this one asks for `/health`, a hundred times a second at most. Target: at most 250 ms on two
cores, whatever is sent; all bodies are within the bound of 4 MiB.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from common import arguments, finish, table

from elastic.assets import MODEL_DIR

SIZE = 4_000_000
CONTEXT_CHARACTERS = 41_000
"""Just within the bound on the text of the model inside: it is tokenized to its end, then refused."""
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def filled(before: bytes, with_: bytes, after: bytes, size: int = SIZE) -> bytes:
    """Make a body of so many bytes: the same again and again between two ends."""
    return before + with_ * ((size - len(before) - len(after)) // len(with_)) + after


def numbered(before: bytes, size: int = SIZE) -> bytes:
    """Make an object of many fields."""
    return before + b",".join(b'"%07d":1' % i for i in range((size - len(before)) // 12)) + b"}" * before.count(b"{")


def bodies(size: int) -> dict[str, tuple[str, bytes]]:
    """Kind -> path and body."""
    words = " ".join(random.choices(["import", "self", "lambda", "x", "é", "\n", "0.5", "def"], k=size // 4))
    message = b'{"role":"user","content":"x"},'
    within = json.dumps({"prompt": words[:CONTEXT_CHARACTERS]}).encode()
    return {
        "messages of numbers": (CHATS, filled(b'{"messages":[', b"0,", b"0]}", size)),
        "valid messages": (CHATS, filled(b'{"messages":[', message, message[:-1] + b"]}", size)),
        "content parts of numbers": (CHATS, filled(b'{"messages":[{"role":"user","content":[', b"0,", b"0]}]}", size)),
        "lists of one token": (COMPLETIONS, filled(b'{"prompt":[', b"[1],", b"[1]]}", size)),
        "token ids": (COMPLETIONS, filled(b'{"prompt":[', b"1,", b"1]}", size)),
        "token ids to the bound": (COMPLETIONS, b'{"prompt":[' + b"1," * 170_000 + b"1]}"),
        "objects to the bound": (COMPLETIONS, b'{"prompt":"x","user":[' + b"{}," * 49_000 + b"{}]}"),
        "fields to the bound": (COMPLETIONS, numbered(b'{"prompt":"x","logit_bias":{', 12 * 49_000)),
        "empty strings": (COMPLETIONS, filled(b'{"prompt":[', b'"",', b'""]}', size)),
        "stop strings": (COMPLETIONS, filled(b'{"prompt":"x","stop":[', b'"y",', b'"y"]}', size)),
        "logit_bias": (COMPLETIONS, numbered(b'{"prompt":"x","logit_bias":{', size)),
        "unknown fields": (COMPLETIONS, numbered(b'{"prompt":"x",', size)),
        "nesting": (COMPLETIONS, filled(b'{"prompt":', b"[", b"", size)),
        "nested objects": (COMPLETIONS, filled(b'{"prompt":', b'{"a":', b"", size)),
        "a number": (COMPLETIONS, filled(b'{"prompt":"x","seed":', b"9", b"}", size)),
        "a model name": (COMPLETIONS, filled(b'{"prompt":"x","model":"', b"m", b'"}', size)),
        "quotes": (COMPLETIONS, b'"' * size),
        "escapes": (COMPLETIONS, filled(b'{"prompt":"', b"\\n", b'"}', size)),
        "not JSON at its end": (COMPLETIONS, filled(b'{"prompt":"', b"x", b"", size)),
        "a text": (COMPLETIONS, json.dumps({"prompt": words}, ensure_ascii=False).encode()[: size + 100]),
        "a text of one letter": (COMPLETIONS, filled(b'{"prompt":"', b"x", b'"}', size)),
        "a chat of one text": (CHATS, filled(b'{"messages":[{"role":"user","content":"', b"x ", b'"}]}', size)),
        "many texts": (COMPLETIONS, json.dumps({"prompt": [words[:30_000]] * 100}).encode()),
        "a text to the bound": (COMPLETIONS, within),
    }


@contextmanager
def served() -> Iterator[tuple[str, int]]:
    """Start a server of the model inside; yield host and port."""
    command = [sys.executable, "-m", "elastic.cli.main", "serve", str(MODEL_DIR), "--port", "0", "--place", "cpu=64MiB"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        host, port = server.stdout.readline().split("//")[1].split(":")
        yield host, int(port)
    finally:
        server.terminate()
        server.wait(60)


def post_again_and_again(where: tuple[str, int], path: str, body: bytes, until: Any, statuses: Any) -> None:
    """Send bodies, in a process of its own."""
    seen: Counter[str] = Counter()
    while not until.is_set():
        connection = http.client.HTTPConnection(*where, timeout=60)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            seen[str(answer.status)] += 1
        except OSError as error:
            seen[type(error).__name__] += 1
        finally:
            connection.close()
    statuses.put(dict(seen))


def health_ms(where: tuple[str, int], seconds: float) -> list[float]:
    """Latencies of `/health` over a connection that stays."""
    connection = http.client.HTTPConnection(*where, timeout=120)
    found, end = [], time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        connection.request("GET", "/health")
        connection.getresponse().read()
        found.append(1e3 * (time.perf_counter() - start))
        time.sleep(0.01)
    connection.close()
    return found


def beside(where: tuple[str, int], path: str, body: bytes, senders: int, seconds: float) -> dict[str, Any]:
    """Latencies of `/health` while a body is posted, and what became of the posts."""
    forked = multiprocessing.get_context("fork")
    until, statuses = forked.Event(), forked.Queue()
    processes = [
        forked.Process(target=post_again_and_again, args=(where, path, body, until, statuses)) for _ in range(senders)
    ]
    for process in processes:
        process.start()
    time.sleep(0.3)  # until they have begun
    latencies = health_ms(where, seconds)
    until.set()
    seen: Counter[str] = Counter()
    for _ in processes:
        seen.update(statuses.get(timeout=120))
    for process in processes:
        process.join()
    return {**quantiles(latencies), "bytes": len(body), "answers": dict(seen)}


def quantiles(latencies: list[float]) -> dict[str, float]:
    ordered = sorted(latencies)
    return {
        "asked": len(ordered),
        "p50_ms": ordered[len(ordered) // 2],
        "p99_ms": ordered[int(0.99 * len(ordered))],
        "max_ms": ordered[-1],
    }


def main() -> None:
    options = arguments(
        __doc__.splitlines()[0],
        seconds={"type": float, "default": 3.0, "help": "for each kind of body"},
        senders={"type": int, "default": 2, "help": "processes that post it"},
    )
    size, seconds = (200_000, 0.5) if options.quick else (SIZE, options.seconds)
    with served() as where:
        results = {"nothing": {**quantiles(health_ms(where, seconds)), "bytes": 0, "answers": {}}}
        for kind, (path, body) in bodies(size).items():
            results[kind] = beside(where, path, body, options.senders, seconds)
    rows = [
        [kind, r["bytes"], *(f"{r[q]:.1f}" for q in ("p50_ms", "p99_ms", "max_ms")), r["answers"]]
        for kind, r in results.items()
    ]
    table(["body", "bytes", "P50 ms", "P99 ms", "max ms", "answers"], rows)
    finish("server_stall", options.device, {"senders": options.senders, "seconds": seconds, "kinds": results})


if __name__ == "__main__":
    main()
