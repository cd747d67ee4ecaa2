"""`elastic bench`: replay a trace, and compare results."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.bench.replay.open_loop import ReplayOptions, replay
from elastic.bench.replay.progress import choose_progress
from elastic.bench.replay.records import write_records
from elastic.bench.report.compare import Result, read_results, rows, warnings
from elastic.bench.report.plots import draw, require_matplotlib
from elastic.bench.report.summary import summarize
from elastic.bench.traces.prompts import Prompt, random_prompts, text_prompts
from elastic.cli.inputs.bench_options import check_pairs, make_trace
from elastic.cli.inputs.checks import parse_place, read_secret, read_text, require_file_to_write, write_text
from elastic.cli.inputs.interrupts import terminable
from elastic.config import SLO
from elastic.errors import ConfigError
from elastic.weights.decoder import batch_context_length

if TYPE_CHECKING:
    from elastic.bench.replay.run import ReplayRun
    from elastic.bench.replay.targets import LoadTarget
    from elastic.bench.traces.trace import Trace
    from elastic.engines.base import Engine

VOCABULARY_IF_UNKNOWN = 1000
KEY = "OPENAI_API_KEY"


def bench(options: Namespace) -> int:
    """Compare, or replay; returns the exit code, 1 where no request was completed.

    After Ctrl-C or SIGTERM what there is by then is written and shown, too.
    """
    if options.mode == "compare":
        return compare(options)
    with terminable() as interrupts:
        try:
            result = measure(options)
            return interrupts.code if result.interrupted else int(not any(r.completed for r in result.records))
        except KeyboardInterrupt:  # before there was anything
            return interrupts.code


def compare(options: Namespace) -> int:
    """Show result files side by side; draw them if asked to."""
    if options.plot is not None:
        require_matplotlib()
    results = read_results(options.files)
    show(results)
    if options.plot is not None:
        draw(results, Path(options.plot))
    return 0


def measure(options: Namespace) -> ReplayRun:
    """Replay a trace; write and show its figures."""
    check_pairs(options)
    for name in ("out", "records"):
        require_file_to_write(getattr(options, name), f"--{name}")
    bounds = (options.slo_ttft, options.slo_tpot, options.slo_e2el)
    slo = None if bounds == (None, None, None) else SLO(*bounds)
    context = batch_context_length(_config(options.model)) if options.model else None
    trace = make_trace(options, context)
    prompts = make_prompts(options, trace)
    limits = ReplayOptions(warmup=options.warmup, timeout_s=options.timeout)
    with make_target(options, slo) as target:
        result = replay(target, trace, prompts, slo, options=limits, progress=choose_progress())
        summary = summarize(result, detailed=options.save_detailed)
        if options.records is not None:  # written before the target ends, which may take long
            write_records(options.records, result.records)
        if options.out is not None:
            write_text(options.out, json.dumps(summary) + "\n", "--out")
    show([Result(Path(options.out or "result").stem, summary)])
    return result


def show(results: Sequence[Result]) -> None:
    """Print the table, with rich or without, and notes about it on standard error."""
    table = rows(results)
    if importlib.util.find_spec("rich"):
        from rich.table import Table

        from elastic.cli.views.panels import print_whole

        grid = Table(*table[0])
        for column in grid.columns[1:]:
            column.justify = "right"
        for row in table[1:]:
            grid.add_row(*row)
        print_whole(grid)
    else:
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        for row in table:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for warning in warnings(results):
        print(f"note: {warning}", file=sys.stderr)


def make_prompts(options: Namespace, trace: Trace) -> list[Prompt]:
    """Return passages of the text of `--prompts`, or else random tokens."""
    choice: dict[str, Any] = {"seed": options.seed, "shared_prefix": options.shared_prefix}
    if options.prompts is None:
        tokens = options.vocabulary
        if tokens is None:
            tokens = int(_config(options.model).vocab_size) if options.model else VOCABULARY_IF_UNKNOWN
        return random_prompts(trace, tokens, **choice)
    path = options.model if options.tokenizer is None else options.tokenizer
    if path is None:
        raise ConfigError("--prompts with --url needs --tokenizer, a directory with the server's tokenizer")
    from elastic.model_files import read_tokenizer

    text = read_text(options.prompts, "--prompts")
    tokenizer = read_tokenizer(path, option="--tokenizer")
    return text_prompts(trace, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], **choice)


@contextmanager
def make_target(options: Namespace, slo: SLO | None) -> Iterator[Engine | LoadTarget]:
    """Make the target of the replay, ready; it is stopped at the end."""
    if options.url is None:
        with make_engine(options, slo) as engine:
            yield engine
        return
    from elastic.bench.replay.http_target import HTTPTarget

    key = read_secret("", None, KEY) if os.environ.get(KEY) else None
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with HTTPTarget(options.url, model=options.served_model_name, headers=headers) as remote:
        yield remote


@contextmanager
def make_engine(options: Namespace, slo: SLO | None) -> Iterator[Engine]:
    """Start an engine for the wrapped model of a directory."""
    import elastic
    from elastic.engines.continuous.engine import ContinuousEngine
    from elastic.model_files import load_model

    place = parse_place(options.place)
    model, _ = load_model(options.model, place.device, options.dtype or "auto", option="--model")
    variants = tuple(name for name in options.variants.split(",") if name)
    chosen = {"policy": options.policy or "manual", "slo": slo, "variants": variants, "prepack": options.prepack}
    elastic.wrap(model.to(place.device), places=[place], **chosen)
    try:
        engine = ContinuousEngine(model, max_queue=options.max_queue)
        engine.start()
        try:
            yield engine
        finally:
            engine.stop(drain=False, timeout_s=60)
    finally:
        elastic.unwrap(model)


def _config(model: str) -> Any:
    """Read the config of a model's text decoder. Raises `ConfigError`."""
    from elastic.model_files import read_config

    return read_config(model, option="--model").get_text_config(decoder=True)
