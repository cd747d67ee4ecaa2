"""The progress of a replay on a terminal: a bar with rich, a line without it, nothing where there is no terminal."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Show = Callable[[int, int], None]
"""A function that is called with the numbers of requests that have ended and that were submitted."""
Progress = Callable[[int], AbstractContextManager[Show]]
"""A context manager around a replay, from its number of requests."""


def choose_progress() -> Progress:
    """Choose the progress that standard error allows."""
    if not sys.stderr.isatty():
        return no_progress
    return rich_progress if importlib.util.find_spec("rich") else plain_progress


@contextmanager
def no_progress(total: int) -> Iterator[Show]:
    """Show nothing."""
    yield lambda ended, submitted: None


@contextmanager
def plain_progress(total: int) -> Iterator[Show]:
    """Write one line over and over."""

    def show(ended: int, submitted: int) -> None:
        print(f"\r{ended}/{total} requests, {submitted - ended} under way ", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print(file=sys.stderr)


@contextmanager
def rich_progress(total: int) -> Iterator[Show]:
    """Draw a bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[busy]} under way"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=total, busy=0)
        yield lambda ended, submitted: bar.update(task, completed=ended, busy=submitted - ended)
