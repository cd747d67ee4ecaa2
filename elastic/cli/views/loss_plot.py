"""The picture of a profile: scores of each layer, and the loss of the model as layers are swapped."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from elastic.bench.report.plots import png_figure
from elastic.quant.formats.base import config_from
from elastic.quant.sensitivity.evaluate import nats, prefixes, score_sets
from elastic.quant.sensitivity.fake_quant import dequantized_layer
from elastic.quant.sensitivity.layer_trace import LayerTrace
from elastic.quant.sensitivity.order import random_order
from elastic.quant.sensitivity.profile_file import Profile
from elastic.weights.decoder import find_decoder

RANDOM_ORDERS = 5


def losses_by_order(model: Any, profile: Profile, ids: torch.Tensor) -> dict[str, list[float]]:
    """Return nats per token with 0, 1, ... all layers quantized, for the profile's order, its reverse and random ones.

    ids: [sequences, tokens], int64 token ids.
    """
    layers = find_decoder(model).layers
    fields = dict(profile.setting.config)
    config = config_from(fields.pop("type"), fields)
    orders = {"LIS": profile.order, "reverse": profile.order[::-1]}
    orders |= {f"random {seed}": random_order(len(layers), seed) for seed in range(RANDOM_ORDERS)}
    sets = {s for order in orders.values() for s in prefixes(order)}
    quantize = functools.cache(lambda i: dequantized_layer(layers[i], config))
    losses = [
        score_sets(LayerTrace(model, layers, row), layers, quantize, sets, functools.partial(nats, ids=row))
        for row in ids.chunk(len(ids))
    ]
    mean = {s: float(torch.cat([row[s] for row in losses]).mean()) for s in sets}
    return {name: [mean[s] for s in prefixes(order)] for name, order in orders.items()}


def draw(profile: Profile, losses: Mapping[str, Sequence[float]], text: str, path: Path) -> None:
    """Draw two panels into one PNG file. Raises `ConfigError` where it cannot be written."""
    with png_figure(path, 1, 2, figsize=(12, 4.5)) as (_, (scores, loss)):
        _draw_scores(scores, profile)
        for name, values in reversed(list(losses.items())):
            is_random = name.startswith("random")
            style = {"color": "0.75", "linewidth": 1} if is_random else {"marker": "o"}
            label = None if is_random and not name.endswith(" 0") else name.removesuffix(" 0")
            loss.plot(range(len(values)), values, label=label, **style)
        loss.set(xlabel=f"layers in {profile.setting.variant}", ylabel="nats per token", title=f"Loss on {text}")
        loss.legend()


def _draw_scores(axes: Any, profile: Profile) -> None:
    """Draw one minus each cosine, on a logarithmic scale: they differ by orders of magnitude."""
    mds = [next(r.mds[p] for r in profile.rounds if p in r.mds) for p in range(len(profile.lts))]
    for name, scores in (("LTS", profile.lts), ("LRS", profile.lrs), ("MDS, when first measured", mds)):
        axes.semilogy(range(len(scores)), [max(1 - score, 1e-9) for score in scores], marker="o", label=name)
    axes.set(xlabel="layer", ylabel="1 - cosine (higher: more sensitive)", title="Sensitivity scores")
    axes.legend()
