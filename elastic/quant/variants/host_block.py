"""The packed parameters of a layer side by side in one block of the host store."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from elastic.memory.checksum import digest
from elastic.memory.copy_engine import copy
from elastic.memory.host_store import HostTensor, host
from elastic.memory.weight_layout import LayerLayout, ParameterLayout
from elastic.quant.variants.variant import PackedLayer, Packing


def in_one_block(packings: Mapping[str, Packing], device: torch.device) -> PackedLayer:
    """The packings with their parts side by side in one block of the host store, page-locked for CUDA."""
    layout = block_layout(packings)
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for name, view in views(flat, layout).items():
        parameter, part = name
        copy(view, packings[parameter].parts[part].cpu())
    block = host.keep(flat, digest(flat), lock=device.type == "cuda")
    return over(packings, layout, block)


def block_layout(packings: Mapping[str, Packing]) -> LayerLayout:
    """Where the parts of all packings lie, by `parameter/part`."""
    parts = {f"{name}/{part}": ParameterLayout.like(t) for name, p in packings.items() for part, t in p.parts.items()}
    return LayerLayout.pack(parts)


def views(flat: torch.Tensor, layout: LayerLayout) -> dict[tuple[str, str], torch.Tensor]:
    """The parts in a block, by (parameter, part)."""
    found = {}
    for name, part in layout.parameters.items():
        parameter, _, key = name.rpartition("/")
        found[parameter, key] = part.show(flat[part.offset : part.offset + part.nbytes].view(part.dtype))
    return found


def over(packings: Mapping[str, Packing], layout: LayerLayout, block: HostTensor) -> PackedLayer:
    """The same packings over the bytes of a block."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for (name, part), view in views(block.tensor, layout).items():
        parts.setdefault(name, {})[part] = view
    return PackedLayer({name: packing.with_storage(parts[name]) for name, packing in packings.items()}, block)
