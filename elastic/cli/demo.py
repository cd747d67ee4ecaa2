"""`elastic demo`: a trained model writes while its KV cache is shrunk and grown under it, and writes the same."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from rich.console import Console
from rich.live import Live

import elastic
from elastic.cli.loading import Loaded, load
from elastic.cli.view import mib, screen
from elastic.config import Place, parse_bytes

DEFAULT_PLACE = "cpu=24MiB"
PIECES_BETWEEN_ACTIONS = 12


def demo(options: Namespace) -> int:
    """Run the demo; returns 0 if the texts are the same and the ledger is right, else 1."""
    place = Place.parse(options.place or DEFAULT_PLACE)
    place = Place(place.name, place.device, place.budget_bytes, _page_bytes(options.pages, place))
    console = Console()
    loaded = load(options.model, options.prompt, options.max_new_tokens, place.device)
    expected = _write(loaded, options)
    elastic.wrap(loaded.model, places=[place])
    try:
        runtime = elastic.runtime(loaded.model)
        _leave_idle_pages(loaded)
        tokens = _show(loaded, runtime, options, console)
        runtime.check()
        same = torch.equal(tokens, expected)
        released = sum(event.released_bytes for event in runtime.events())
    finally:
        elastic.unwrap(loaded.model)
    again = torch.equal(_write(loaded, options), expected)
    console.print(f"{len(runtime.events())} actions, {mib(released)} given back to the system and taken again")
    console.print(
        f"tokens equal to the plain model's: {_yes(same)}; after unwrap too: {_yes(again)}; ledger: recounted, right"
    )
    return 0 if same and again else 1


def _page_bytes(size: str, place: Place) -> int | None:
    """Small pages on a CPU, so that a small model has many; the driver's granularity on CUDA."""
    return parse_bytes(size, option="--pages") if place.device.type == "cpu" else None


def _write(loaded: Loaded, options: Namespace, **more: Any) -> torch.Tensor:
    torch.manual_seed(options.seed)
    tokens: torch.Tensor = loaded.model.generate(
        **loaded.inputs,
        max_new_tokens=options.max_new_tokens,
        do_sample=True,
        temperature=0.7,
        **more,
    )
    return tokens


def _leave_idle_pages(loaded: Loaded) -> None:
    """Another request before ours: its pages stay mapped for the next one, and are what a shrink takes first."""
    ids = loaded.inputs["input_ids"].repeat(2, 1)
    loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)


def _show(loaded: Loaded, runtime: elastic.Runtime, options: Namespace, console: Console) -> torch.Tensor:
    """Generate in a thread; here, show each piece of text and move the KV limit now and then."""
    from transformers import TextIteratorStreamer

    streamer = TextIteratorStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
    sizes = _limits(runtime)
    text = options.prompt
    with ThreadPoolExecutor(1) as pool, Live(console=console, auto_refresh=False) as live:
        writing = pool.submit(_write_to_end, loaded, options, streamer)
        for count, piece in enumerate(streamer):
            text += piece
            if count % PIECES_BETWEEN_ACTIONS == PIECES_BETWEEN_ACTIONS - 1:
                runtime.kv.resize(next(sizes))
            live.update(screen(text, runtime.status(), runtime.events()), refresh=True)
        tokens = writing.result()
    if not console.is_terminal:
        console.print()
    return tokens


def _write_to_end(loaded: Loaded, options: Namespace, streamer: Any) -> torch.Tensor:
    try:
        return _write(loaded, options, streamer=streamer)
    finally:
        streamer.end()


def _limits(runtime: elastic.Runtime) -> Iterator[int]:
    """Down to what is in use, to half of it (deferred), to nothing, and up again."""
    while True:
        yield runtime.kv.used_bytes
        yield runtime.kv.used_bytes // 2
        yield 0
        yield runtime.kv.maximum_bytes


def _yes(fact: bool) -> str:
    return "yes" if fact else "NO"
