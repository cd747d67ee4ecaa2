"""`elastic top`: a live view of a server."""

from __future__ import annotations

import itertools
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any

from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from elastic.cli.inputs.checks import require_at_least
from elastic.cli.views.dashboard import SPAN_S, KVUsageSample, frame, sample
from elastic.cli.views.panels import plain_console
from elastic.cli.views.status_client import NoAnswer, ask, base_url
from elastic.cli.views.status_document import StatusDocument

LEAST_S = 0.1
TIMEOUT_S = 5.0


def top(options: Namespace) -> int:
    """Show frames until interrupted, or one with `--once`; a server that does not answer is asked again."""
    url, every_s = base_url(options.url), options.every
    require_at_least(LEAST_S, every_s, "--every", " seconds")
    console = plain_console()
    if options.once:
        document = ask(url, TIMEOUT_S)
        console.print(frame(document, [sample(document)], url))
        return 0
    live: Any = Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else nullcontext()
    with suppress(KeyboardInterrupt), live:
        for picture in frames(url):
            live.update(picture, refresh=True) if console.is_terminal else console.print(picture)
            time.sleep(every_s)
    return 0


def frames(url: str) -> Iterator[RenderableType]:
    """Yield a frame for each answer; where there is none, one line about it above the last frame."""
    history: deque[KVUsageSample] = deque()
    last: StatusDocument | None = None
    for attempt in itertools.count(1):
        try:
            last = ask(url, TIMEOUT_S)
            remember(history, sample(last))
            yield frame(last, history, url)
        except NoAnswer as error:
            yield frame(last, history, url, str(error)) if last else Text(f"{error}; asked {attempt} times")


def remember(history: deque[KVUsageSample], new: KVUsageSample) -> None:
    """Keep the last minute of samples; begin anew where the clock went back."""
    if history and new.at_s < history[-1].at_s:
        history.clear()
    history.append(new)
    while history[0].at_s < new.at_s - SPAN_S:
        history.popleft()
