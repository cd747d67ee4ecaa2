"""`elastic demo`: a trained model writes while memory moves under it."""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.live import Live

import elastic
from elastic.assets import MODEL_DIR
from elastic.cli.acts.dropped_layers import serve_a_burst
from elastic.cli.inputs.checks import parse_place
from elastic.cli.inputs.model_loading import Loaded, load, write
from elastic.cli.views.panels import plain_console, screen
from elastic.cli.views.sizes import mib
from elastic.config import Place, parse_bytes
from elastic.weights.decoder import returned_cache

SMALL_PLACE, SMALL_PAGES = "cpu=24MiB", "4KiB"
"""For the model inside; another one has half of the free memory, in pages of the usual size."""
PIECES_BETWEEN_ACTIONS = 12
PIECES_OF_THE_NEIGHBOUR = 60
KV_IN_SECOND_ACT = 0.6
LAYERS_AT_ONCE = 2
RESERVE = 0.08
"""A share of the weights: room for one packed layer."""
Director = Callable[[Loaded, elastic.Runtime], Generator[None, None, None]]
"""A generator of actions on the runtime, resumed after each piece of text."""


def demo(options: Namespace) -> int:
    """Run the acts; returns 0 if every text is the plain model's that should be, and the ledger is right, else 1."""
    place = first_place(options)
    console = plain_console()
    loaded = load(options, place.device)
    expected = write(loaded, options)
    console.rule("act 1: the KV limit moves under a running generation")
    same, needs = _act(_move_the_limit, place, loaded, options, console, expected)
    console.rule("act 2: a budget too small for model and KV cache; pages travel between weights and cache")
    small = Place(f"{place.device}#small", place.device, needs.too_small_bytes(), place.page_bytes)
    also, _ = _act(_trade_layers, small, loaded, options, console, expected)
    console.rule("act 3: as small a budget; layers are swapped to int4 while the cache is short of pages, and restored")
    tight = Place(f"{place.device}#tight", place.device, needs.too_small_bytes(RESERVE), place.page_bytes)
    _act(_swap_layers, tight, loaded, options, console, expected, variants=("int4",))
    again = torch.equal(write(loaded, options), expected)
    burst = _burst(place, loaded, needs, options, console)
    in_acts, after = ("yes" if equal else "NO" for equal in (same and also, again))
    console.print(
        f"tokens equal to the plain model's in acts 1 and 2: {in_acts}; after act 3, unwrapped, again: {after}; "
        "ledger: recounted, right"
    )
    return 0 if same and also and again and burst else 1


def first_place(options: Namespace) -> Place:
    """Return the place of the first act, with pages of a size that is said, or that suits the model."""
    small = options.model == str(MODEL_DIR)
    place = parse_place(options.place, SMALL_PLACE if small else "cpu")
    pages = SMALL_PAGES if options.pages is None and small and place.page_bytes is None else options.pages
    if pages is None or place.device.type != "cpu":
        return place
    return Place(place.name, place.device, place.budget_bytes, parse_bytes(pages, option="--pages"))


def _burst(place: Place, loaded: Loaded, needs: Needs, options: Namespace, console: Console) -> bool:
    """Run the last act, where it can be; return whether its texts are the plain model's."""
    if place.device.type != "cpu":
        console.print("act 4 is for ranks that can read each other's KV cache: it is shown on a CPU")
        return True
    console.rule("act 4: two processes and a burst; they drop layers, compute them for each other, and restore them")
    return serve_a_burst(options.model, loaded, needs.weights, options.max_new_tokens, console)


@dataclass(frozen=True)
class Needs:
    """Bytes that the first act used."""

    weights: int
    kv: int
    prompt: int
    """Of the KV cache, for the prompt alone."""

    def too_small_bytes(self, reserve: float = 0) -> int:
        """Return a budget for all weights, a reserve as a share of them, and a part of the KV cache."""
        return int((1 + reserve) * self.weights + max(KV_IN_SECOND_ACT * self.kv, self.prompt))


def _act(
    director: Director,
    place: Place,
    loaded: Loaded,
    options: Namespace,
    console: Console,
    expected: torch.Tensor,
    variants: tuple[str, ...] = (),
) -> tuple[bool, Needs]:
    """Wrap, write while the director acts, recount, unwrap; return whether the tokens are the plain model's."""
    elastic.wrap(loaded.model, places=[place], variants=variants)
    try:
        runtime = elastic.runtime(loaded.model)
        weights = sum(size for owner, size in runtime.status().places[0].owners.items() if owner != "kv")
        cache: Any = returned_cache(loaded.model(loaded.inputs["input_ids"]))  # lives while its bytes are read
        prompt = runtime.kv.used_bytes
        del cache
        tokens, kv = _show(director, loaded, runtime, options, console)
        runtime.check()
        events = runtime.events()
    finally:
        elastic.unwrap(loaded.model)
    moved = sum(abs(event.released_bytes) for event in events)
    alike = int((tokens == expected).long().cumprod(-1).sum()) if tokens.shape == expected.shape else 0
    console.print(
        f"{len(events)} actions, {mib(moved)} changed hands; the first {alike} of {expected.numel()} tokens are the "
        "plain model's"
    )
    return torch.equal(tokens, expected), Needs(weights, kv, prompt)


def _show(
    director: Director, loaded: Loaded, runtime: elastic.Runtime, options: Namespace, console: Console
) -> tuple[torch.Tensor, int]:
    """Generate in a thread; meanwhile, show each piece of text and let the director act now and then.

    Returns the tokens and the most bytes that the KV cache used.
    """
    from transformers import TextIteratorStreamer

    def write_to_end() -> torch.Tensor:
        """Generate to the end, [1, tokens], and end the stream whatever happens."""
        try:
            return write(loaded, options, streamer=streamer)
        finally:
            streamer.end()

    streamer = TextIteratorStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
    acting = director(loaded, runtime)
    next(acting)
    text, most = options.prompt, 0
    with ThreadPoolExecutor(1) as pool, Live(console=console, auto_refresh=False) as live:
        writing = pool.submit(write_to_end)
        try:
            for piece in streamer:
                text += piece
                next(acting)
                most = max(most, runtime.kv.used_bytes)
                live.update(screen(text, runtime.status(), runtime.events()), refresh=True)
            tokens = writing.result()
        finally:
            acting.close()
    if not console.is_terminal:
        console.print()
    return tokens, most


def _move_the_limit(loaded: Loaded, runtime: elastic.Runtime) -> Generator[None, None, None]:
    """Shrink the limit to the bytes in use, to half of them (deferred), to nothing, and grow it again.

    Another request comes first: its pages stay mapped for the next one, and are the first that a shrink takes.
    """
    ids = loaded.inputs["input_ids"].repeat(2, 1)
    loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
    kv = runtime.kv
    for turn in itertools.count():
        for _ in range(PIECES_BETWEEN_ACTIONS):
            yield
        used = kv.used_bytes
        kv.resize((used, used // 2, 0, "max")[turn % 4])


def _trade_layers(loaded: Loaded, runtime: elastic.Runtime) -> Generator[None, None, None]:
    """Release layers when the KV cache fills up; take them back when another conversation ends."""
    ids = loaded.inputs["input_ids"]
    neighbour: Any = returned_cache(loaded.model(ids))
    released = 0
    growth = runtime.kv.used_bytes
    try:
        for piece in itertools.count():
            while _is_short(runtime, growth) and released < runtime.status().layers:
                runtime.release(range(released, released + LAYERS_AT_ONCE))
                released += LAYERS_AT_ONCE
            yield
            if released and neighbour is not None and piece > PIECES_OF_THE_NEIGHBOUR:
                neighbour = None
                runtime.restore(range(released))
                released = 0
    finally:
        neighbour = None
        runtime.restore()


def _swap_layers(loaded: Loaded, runtime: elastic.Runtime) -> Generator[None, None, None]:
    """Swap layers, the last first, when the KV cache fills up; restore them at the end."""
    runtime.kv.trim()
    full, growth = runtime.status().layers, 0
    try:
        while True:
            growth = growth or runtime.kv.used_bytes
            while growth and full and _is_short(runtime, growth):
                runtime.swap(range(max(0, full - LAYERS_AT_ONCE), full), "int4")
                full = max(0, full - LAYERS_AT_ONCE)
            yield
    finally:
        runtime.restore()


def _is_short(runtime: elastic.Runtime, growth: int) -> bool:
    """Return whether the KV cache could not grow twice by as much as a first page for each of its rows."""
    return runtime.kv.used_bytes + 2 * growth > runtime.kv.capacity_bytes
