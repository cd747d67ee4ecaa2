"""The picture of a profile: scores of each layer, and what the model loses as layers are swapped."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from elastic.errors import BackendUnavailable, ConfigError
from elastic.quant.formats.integer import Integers
from elastic.quant.sensitivity.evaluate import nats, prefixes, score_sets
from elastic.quant.sensitivity.fake_quant import dequantized_layer
from elastic.quant.sensitivity.layer_trace import LayerTrace
from elastic.quant.sensitivity.order import random_order
from elastic.quant.sensitivity.profile_file import Profile
from elastic.weights.decoder import find_decoder

RANDOM_ORDERS = 5


def require_matplotlib() -> None:
    """Raise `BackendUnavailable` where it is absent."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailable("--plot needs matplotlib: pip install 'elastic-llm[plot]'")


def losses_by_order(model: Any, found: Profile, ids: torch.Tensor) -> dict[str, list[float]]:
    """Nats per token with 0, 1, ... all layers quantized, for the order found, its reverse and random ones."""
    layers = find_decoder(model).layers
    config = Integers(**{key: value for key, value in found.setting.config.items() if key != "type"})
    orders = {"LIS": found.order, "reverse": found.order[::-1]}
    orders |= {f"random {seed}": random_order(len(layers), seed) for seed in range(RANDOM_ORDERS)}
    sets = {s for order in orders.values() for s in prefixes(order)}
    quantize = functools.cache(lambda i: dequantized_layer(layers[i], config))
    parts = [
        score_sets(LayerTrace(model, layers, row), layers, quantize, sets, functools.partial(nats, ids=row))
        for row in ids.chunk(len(ids))
    ]
    mean = {s: float(torch.cat([part[s] for part in parts]).mean()) for s in sets}
    return {name: [mean[s] for s in prefixes(order)] for name, order in orders.items()}


def draw(found: Profile, losses: Mapping[str, Sequence[float]], text: str, path: Path) -> None:
    """Two panels in one PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (scores, loss) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    _draw_scores(scores, found)
    for name, values in reversed(list(losses.items())):
        is_random = name.startswith("random")
        style = {"color": "0.75", "linewidth": 1} if is_random else {"marker": "o"}
        label = None if is_random and not name.endswith(" 0") else name.removesuffix(" 0")
        loss.plot(range(len(values)), values, label=label, **style)
    loss.set(xlabel=f"layers in {found.setting.variant}", ylabel="nats per token", title=f"Loss on {text}")
    loss.legend()
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def _draw_scores(axes: Any, found: Profile) -> None:
    """One minus each cosine, on a logarithmic scale: they differ by orders of magnitude."""
    mds = [next(r.mds[p] for r in found.rounds if p in r.mds) for p in range(len(found.lts))]
    for name, scores in (("LTS", found.lts), ("LRS", found.lrs), ("MDS, when first measured", mds)):
        axes.semilogy(range(len(scores)), [max(1 - score, 1e-9) for score in scores], marker="o", label=name)
    axes.set(xlabel="layer", ylabel="1 - cosine (higher: more sensitive)", title="Sensitivity scores")
    axes.legend()
