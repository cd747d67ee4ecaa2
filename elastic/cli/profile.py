"""`elastic profile`: the order in which to swap the layers of a model."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import elastic
from elastic.cli.inputs.checks import read_text, require_file_to_write
from elastic.cli.views.panels import plain_console
from elastic.config import Place
from elastic.errors import ConfigError
from elastic.model_files import load_model
from elastic.quant.sensitivity.profile_file import Profile
from elastic.quant.variants.pack_model import file_name


def profile(options: Namespace) -> int:
    """Profile a model, save and show the order; draw it if asked to."""
    place = Place.parse(options.device)
    if place.budget_bytes is not None:
        raise ConfigError(f"--device {options.device} says a size, which a profile does not keep to; leave it out")
    device = place.device
    texts = [read_text(path, "--calibration") for path in options.calibration]
    held_out = None if options.held_out is None else read_text(options.held_out, "--held-out")
    if options.held_out is not None and options.plot is None:
        raise ConfigError("--held-out is text for the losses of the plot; give --plot FILE")
    if options.plot is not None:
        from elastic.bench.report.plots import require_matplotlib

        require_matplotlib()
    beside = Path(options.model) / f"elastic-profile-{file_name(options.variant)}.json"
    path = beside if options.out is None else Path(options.out)
    require_file_to_write(options.out, "--out")
    require_file_to_write(options.plot, "--plot")
    model, tokenizer = load_model(options.model, device, options.dtype or "auto", option="MODEL")
    model = model.to(device)
    measured = _measure(model, tokenizer, texts, path, options)
    console = plain_console()
    console.print(_score_table(measured))
    console.print(f"order, the first to swap first: {' '.join(map(str, measured.order))}", soft_wrap=True)
    console.print(f"saved to {path}", soft_wrap=True)
    if options.plot is not None:
        _draw(model, tokenizer, measured, held_out, texts, options)
        console.print(f"drawn to {options.plot}", soft_wrap=True)
    return 0


def _measure(model: Any, tokenizer: Any, texts: list[str], path: Path, options: Namespace) -> Profile:
    """Profile the model, with a bar on standard error where that is a terminal."""
    columns = (*Progress.get_default_columns()[:-1], TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("candidates", total=None)
        return elastic.profile(
            model,
            texts,
            tokenizer=tokenizer,
            variant=options.variant,
            path=path,
            alpha1=options.alpha1,
            alpha2=options.alpha2,
            beta=options.beta,
            tokens=options.tokens,
            batch=options.batch,
            lazy=options.lazy,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _score_table(profile: Profile) -> Table:
    """Tabulate the layers in their order, with the scores that each was chosen by."""
    setting = profile.setting
    title = f"{setting.variant}, {setting.sequences * setting.tokens} tokens"
    table = Table("layer", "LTS", "LRS", "MDS", "LIS", title=title)
    for round_ in profile.rounds:
        p = round_.chosen
        scores = profile.lts[p], profile.lrs[p], round_.mds[p], round_.lis[p]
        table.add_row(str(p), *(f"{score:.6f}" for score in scores))
    return table


def _draw(
    model: Any, tokenizer: Any, profile: Profile, held_out: str | None, texts: list[str], options: Namespace
) -> None:
    """Draw the scores, and the losses on the held-out text, or else on the calibration text."""
    from elastic.cli.views.loss_plot import draw, losses_by_order
    from elastic.profiling import sequence_tokens, token_ids

    text = texts if held_out is None else held_out
    ids = token_ids(text, tokenizer, options.tokens, sequence_tokens(model))
    with torch.no_grad():
        losses = losses_by_order(model, profile, ids.to(model.device))
    draw(profile, losses, "calibration text" if held_out is None else "held-out text", Path(options.plot))
