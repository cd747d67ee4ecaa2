"""Two processes under a burst of requests: they drop layers, compute them for each other, and restore them after it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from elastic.cli.inputs.model_loading import Loaded
from elastic.cli.views.sizes import mib
from elastic.cli.views.stages import grid
from elastic.config import Overload
from elastic.engines.base import Output, Request
from elastic.weights.decoder import cache_argument, returned_cache

if TYPE_CHECKING:
    from elastic.cluster.control.status import FleetStatus
    from elastic.cluster.fleet.fleet import Fleet

REQUESTS, PROMPTS = 32, 2
MOST_TOKENS = 96
SECTORS = 4
"""KV for about so many requests is left to a rank by the model's weights."""
SOON = Overload(tick_s=0.02, pressure_ticks=2, recovery_ticks=2, cooldown_s=0.1, dwell_s=0.2, idle_s=0.1)
"""A demonstration has no time to wait whether a burst lasts."""
FRAME_S, PATIENCE_S = 0.05, 60.0


@dataclass
class Answers:
    """The tokens of each request, as they come. Called on threads of the fleet."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def listen(self, output: Output) -> None:
        """Take new tokens."""
        with self.changed:
            self.tokens.setdefault(output.request, []).extend(output.tokens)
            if output.finish is not None:
                self.ended.add(output.request)
                self.changed.notify_all()


def serve_a_burst(model: str, loaded: Loaded, weights: int, tokens: int, console: Console) -> bool:
    """Serve a burst with two ranks that have little room for KV; return whether all texts are the plain model's.

    `loaded` is the plain model on a CPU, `weights` its bytes when it is wrapped, `tokens` those of an answer at most.
    """
    from elastic.cluster.fleet.fleet import Fleet

    count = min(tokens, MOST_TOKENS)
    ids = loaded.inputs["input_ids"][0].tolist()
    prompts = [tuple(ids[: max(1, len(ids) - number)]) for number in range(PROMPTS)]
    expected = [greedy(loaded.model, prompt, count) for prompt in prompts]
    pages = loaded.model.config.get_text_config(decoder=True).num_hidden_layers << 16  # one of 64 KiB for each layer
    budget = weights + pages // 2 + SECTORS * pages  # half a page of each layer is lost, on an average
    places = [[f"cpu#r{number}={budget // 1024}KiB"] for number in range(2)]
    answers = Answers()
    with Fleet(model, ranks=places, policy=SOON, replace=False) as fleet:
        for number in range(REQUESTS):
            request = Request(prompts[number % PROMPTS], count, ignore_eos=True, id=str(number))
            fleet.submit(request, answers.listen)
        _watch(fleet, answers, console)
        events = fleet.events()
    for event in events:
        if event.kind in ("dropped", "restored", "overloaded"):
            about = f"{mib(event.moved_bytes)} of KV copied, paused for {event.stalled_ms:.1f} ms at the most"
            console.print(f"{event.kind}: {about if event.kind != 'overloaded' else 'no drop is enough'}; {event.why}")
    same = sum(answers.tokens.get(str(number)) == expected[number % PROMPTS] for number in range(REQUESTS))
    console.print(f"{same} of {REQUESTS} answers are the plain model's, token for token")
    return same == REQUESTS


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Return the tokens that a plain model goes on with, each the most probable; an end token ends nothing."""
    tokens: list[int] = []
    new, cache, name = torch.tensor([prompt], device=model.device), None, cache_argument(model)
    for _ in range(count):
        out = model(input_ids=new, **{name: cache}, use_cache=True)
        cache, new = returned_cache(out), out.logits[:, -1:].argmax(-1)
        tokens.append(int(new))
    return tokens


def _watch(fleet: Fleet, answers: Answers, console: Console) -> None:
    """Show who computes what until all requests have ended, and all layers are back.

    Of what is kept, in a file or on the screen, that is the moment with the most dropped layers.
    """
    until, most, kept = time.monotonic() + PATIENCE_S, 0, Group()
    with Live(console=console, auto_refresh=False) as live:
        while (len(answers.ended) < REQUESTS or fleet.groups()) and time.monotonic() < until:
            status = fleet.status()
            frame, dropped = _frame(status, len(answers.ended)), sum(len(rank.dropped) for rank in status.ranks)
            if dropped > most:
                most, kept = dropped, frame
            live.update(frame, refresh=True)
            time.sleep(FRAME_S)
        live.update(kept, refresh=True)
    if not console.is_terminal:
        console.print()


def _frame(status: FleetStatus, ended: int) -> Group:
    """Draw the ranks and their layers, and count the requests."""
    words = Text(f"{ended} of {REQUESTS} requests have ended, {status.queued} wait; {status.policy}")
    paths = {each.name: each.path for each in status.instances if each.path}
    dropped = {rank.name: rank.dropped for rank in status.ranks}
    return Group(grid(paths, dropped, {name: name for name in dropped}), words) if paths else Group(words)
