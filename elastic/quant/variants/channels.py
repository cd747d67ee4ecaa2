"""Structured pruning of a layer: its FFN columns and query heads, and which of them stay.

A channel lies between matrices: it is an output of some and an input of one. It is left out of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from elastic.errors import ConfigError
from elastic.memory.checksum import digest
from elastic.quant.formats.base import KernelTarget
from elastic.quant.formats.pruned import Structured
from elastic.quant.pruning.structured_format import StructuredFormat, without
from elastic.quant.variants.eligible import LayerParameters, matrices, matrix_of
from elastic.quant.variants.packed_weight import PackedMatrix
from elastic.quant.variants.variant import MatrixParameter

FFN = (  # the modules whose outputs are the columns, and the one whose inputs they are
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),  # Phi-3, GLM: the gate's outputs, then the others
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)
COLUMNS_AT_ONCE = 8
_BESIDE_HEADS = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
"""What an attention module may consist of, so that its query heads do not know of one another before `o_proj`."""


@dataclass(frozen=True)
class ChannelGroup:
    """Channels of one kind between matrices of a layer, in units that stay or go together."""

    sources: tuple[str, ...]
    """The parameters whose outputs they are; of more outputs than channels, all that are the same channel go."""
    sink: str
    """The parameter whose inputs they are."""
    channels: int
    unit: int
    """Neighbouring channels that stay or go together: 1, or the size of a head."""
    stay: int
    """How many channels stay."""


@torch.no_grad()
def pack_channels(
    layer: LayerParameters, config: Structured, inputs: Mapping[str, torch.Tensor]
) -> dict[str, MatrixParameter]:
    """Pack the matrices of a layer that get smaller.

    `inputs` has samples of the matrices' inputs, [rows, inputs], by their full names, as far as they are known.
    """
    parameters = {name: (parameter, transposed) for name, parameter, transposed in matrices(layer)}
    flat, packings = flat_matrices(layer, config), {}
    for group in channel_groups(layer, config, flat):
        kept = _kept(group, flat, inputs.get(f"{layer.name}.{group.sink}"), config)
        for name in (*group.sources, group.sink):
            if name == group.sink:
                parts = without(flat[name], 1, kept)
            else:
                # each channel may be there several times, one set of all channels after another
                sets = torch.arange(0, flat[name].shape[0], group.channels, device=kept.device)
                parts = without(flat[name], 0, (sets.unsqueeze(1) + kept).view(-1))
            parameter, transposed = parameters[name]
            form = StructuredFormat(config, matrix_of(parameter, transposed), KernelTarget.of(parameter.device))
            packed = PackedMatrix(form, parts, parameter.dtype, transposed)
            packings[name] = MatrixParameter(packed, digest(parameter))
    return packings


def flat_matrices(layer: LayerParameters, config: Structured) -> dict[str, torch.Tensor]:
    """Return a layer's matrices, [outputs, inputs] each, by name. Raises `ConfigError` for an FFN of experts."""
    parameters = list(matrices(layer))
    if config.ffn < 1 and any(parameter.ndim == 3 for _, parameter, _ in parameters):
        raise ConfigError(
            f"variants: ffn={config.ffn}: {layer.name or 'the layer'} has experts, whose columns cannot be left out; "
            "use another variant, such as '2:4'"
        )
    return {name: p.detach().T if transposed else p.detach() for name, p, transposed in parameters if p.ndim == 2}


def channel_groups(layer: LayerParameters, config: Structured, flat: Mapping[str, torch.Tensor]) -> list[ChannelGroup]:
    """Return the groups that get smaller; `flat` are the layer's matrices, [outputs, inputs] each, by name.

    Raises `ConfigError` for a layer without what is to be removed.
    """
    columns = [_columns(layer, config, flat, sink) for sink in flat] if config.ffn < 1 else []
    heads = [_heads(layer, config, flat, sink) for sink in flat] if config.heads < 1 else []
    for name, share, groups in (("ffn", config.ffn, columns), ("heads", config.heads, heads)):
        if share < 1 and not any(groups):
            what = "FFN of plain matrices with columns" if name == "ffn" else "query heads of their own matrix"
            raise ConfigError(
                f"variants: {name}={share}: {layer.name} has no {what} that can be left out, or so few that none would "
                "be; use another variant, such as '2:4'"
            )
    return [group for group in (*columns, *heads) if group is not None]


def _columns(
    layer: LayerParameters, config: Structured, flat: Mapping[str, torch.Tensor], sink: str
) -> ChannelGroup | None:
    """Return the columns of an FFN; None where none goes, or something else of its size knows them all, as a norm."""
    prefix, leaf = _split(sink)
    networks = [[_matrix(flat, prefix, name) for name in names] for names, last in FFN if leaf == last]
    sources = next((tuple(filter(None, names)) for names in networks if None not in names), None)
    if sources is None:
        return None
    columns = flat[sink].shape[1]
    stay = max(round(config.ffn * columns / COLUMNS_AT_ONCE), 1) * COLUMNS_AT_ONCE
    own = {name.removesuffix("weight") + kind for name in (*sources, sink) for kind in ("weight", "bias")}
    others = [p for name, (_, p) in layer.parameters.items() if name.startswith(prefix) and name not in own]
    fits = all(flat[name].shape[0] in (columns, 2 * columns) for name in sources)
    if not fits or stay >= columns or any(columns in p.shape for p in others):
        return None
    return ChannelGroup(sources, sink, columns, 1, stay)


def _heads(
    layer: LayerParameters, config: Structured, flat: Mapping[str, torch.Tensor], sink: str
) -> ChannelGroup | None:
    """Return the query heads of an attention module; None where they are not by themselves, or none goes."""
    prefix, leaf = _split(sink)
    source, size = _matrix(flat, prefix, "q_proj"), layer.head_sizes.get(prefix.removesuffix("."))
    if leaf != "o_proj" or source is None or size is None:
        return None
    channels = flat[sink].shape[1]
    inside = {name: p for name, (_, p) in layer.parameters.items() if name.startswith(prefix)}
    only_heads = all(_split(name)[0] == prefix and _split(name)[1] in _BESIDE_HEADS for name in inside)
    norms = [p for name, p in inside.items() if _split(name)[1] in ("q_norm", "k_norm")]
    stay = max(round(config.heads * channels / size), 1) * size
    if not only_heads or channels % size or flat[source].shape[0] != channels or any(p.shape != (size,) for p in norms):
        return None
    return ChannelGroup((source,), sink, channels, size, stay) if stay < channels else None


def _kept(
    group: ChannelGroup, flat: Mapping[str, torch.Tensor], inputs: torch.Tensor | None, config: Structured
) -> torch.Tensor:
    """Return the channels that stay, int64 [channels], ascending; those of equal importance in any order."""
    importance = flat[group.sink].float().square().sum(0)
    if config.by == "wanda" and inputs is not None:
        importance *= inputs.float().square().sum(0).to(importance.device)
    else:
        for name in group.sources:
            importance += flat[name].float().square().sum(1).view(-1, group.channels).sum(0)
    best = importance.view(-1, group.unit).sum(1).topk(group.stay // group.unit).indices.sort().values
    return (best.unsqueeze(1) * group.unit + torch.arange(group.unit, device=best.device)).view(-1)


def _split(name: str) -> tuple[str, str]:
    """Return the prefix of a parameter's module, with its dot, and the module's name; adapters' base layers are it."""
    path = name.rpartition(".")[0].removesuffix(".base_layer")
    prefix, dot, leaf = path.rpartition(".")
    return prefix + dot, leaf


def _matrix(flat: Mapping[str, torch.Tensor], prefix: str, leaf: str) -> str | None:
    """Return the name of a module's matrix."""
    return next((name for name in flat if _split(name) == (prefix, leaf)), None)
