"""Blocks of the host store that hold the packed parameters of a layer side by side."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from elastic.memory.checksum import digest
from elastic.memory.copy_engine import copy
from elastic.memory.host_store import HostTensor, host
from elastic.memory.weight_layout import LayerLayout, ParameterLayout
from elastic.quant.variants.variant import PackedLayer, Packing


def in_one_block(packings: Mapping[str, Packing], device: torch.device) -> PackedLayer:
    """Copy the parts of all packings into one block of the host store, page-locked for CUDA; there may be none."""
    if not packings:
        return PackedLayer({}, None)
    layout = LayerLayout.pack(
        {f"{name}/{part}": ParameterLayout.like(t) for name, p in packings.items() for part, t in p.parts.items()}
    )
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for name, views in parts_in(flat, layout).items():
        for part, view in views.items():
            copy(view, packings[name].parts[part].cpu())
    block = host.keep(flat, digest(flat), lock=device.type == "cuda")
    return over_block(packings, layout, block)


def parts_in(flat: torch.Tensor, layout: LayerLayout) -> dict[str, dict[str, torch.Tensor]]:
    """View the parts in a block, uint8 [nbytes], by parameter and part, in the shapes and dtypes of the layout."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, part in layout.parameters.items():
        parameter, _, key = name.rpartition("/")
        view = part.show(flat[part.offset : part.offset + part.nbytes].view(part.dtype))
        parts.setdefault(parameter, {})[key] = view
    return parts


def over_block(packings: Mapping[str, Packing], layout: LayerLayout, block: HostTensor) -> PackedLayer:
    """Return the same packings over a block, uint8 [nbytes], with the layout of their parts."""
    parts = parts_in(block.tensor, layout)
    return PackedLayer({name: packing.with_storage(parts[name]) for name, packing in packings.items()}, block)
