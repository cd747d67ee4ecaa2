"""Packing every layer of a model for its variants, when it is wrapped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from elastic.errors import ConfigError
from elastic.memory.copying import copy, digest
from elastic.memory.host import HostTensor, host
from elastic.memory.layout import LayerLayout, ParameterLayout
from elastic.quant.formats import Target
from elastic.quant.measure import measure
from elastic.quant.paths import paths
from elastic.quant.selection import LayerParameters, fitting, matrices, matrix_of
from elastic.quant.variants import (
    MatrixPacking,
    PackedLayer,
    Packing,
    Variant,
    pack_parameter,
)

AT_ONCE = max(1, min(4, (os.cpu_count() or 1) // 4))
"""Layers packed side by side: torch uses several threads for each."""


def build(
    layers: Sequence[LayerParameters],
    variant: Variant,
    pack: Callable[[LayerParameters], Mapping[str, Packing]],
    progress: bool = True,
) -> list[PackedLayer]:
    """Pack all layers, several at a time, each into one block of the host store."""
    from tqdm.auto import tqdm

    hidden = None if progress else True  # None: where nobody looks
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="elastic-pack") as pool:
        made = pool.map(lambda layer: in_one_block(pack(layer), layer.device), layers)
        return list(tqdm(made, total=len(layers), desc=f"Packing {variant.name}", delay=1, disable=hidden))


def obtain(
    layers: Sequence[LayerParameters],
    variant: Variant,
    cache: str | Path | None,
    inputs: Callable[[], Mapping[str, torch.Tensor]],
) -> list[PackedLayer]:
    """A variant of all layers: from its file in the cache, if there is one, else packed now, and written there."""
    from elastic.quant.cache import file_of, load, save

    path = file_of(cache, variant) if cache is not None else None
    known = path is not None and path.exists()
    packed = load(path, variant, layers) if path and known else build(layers, variant, packer(variant, inputs()))
    for device in {layer.device for layer in layers}:
        measure_paths([p for layer, p in zip(layers, packed, strict=True) if layer.device == device], device)
    if path and not known:
        save(path, variant, layers, packed)
    return packed


def packer(variant: Variant, inputs: Mapping[str, torch.Tensor]) -> Callable[[LayerParameters], Mapping[str, Packing]]:
    """What packs one layer for a variant. `inputs` has what matrices are used on, by their full names, if known."""
    if variant.checkpoint is not None:
        from elastic.quant.from_checkpoint import checkpoint_packer

        return checkpoint_packer(variant.checkpoint)

    @torch.no_grad()
    def pack(layer: LayerParameters) -> Mapping[str, Packing]:
        packings: dict[str, Packing] = {}
        for name, parameter, transposed in matrices(layer):
            config = fitting(variant.config, matrix_of(parameter, transposed))
            if config is not None:
                seen = inputs.get(f"{layer.name}.{name}")
                packed = pack_parameter(parameter, config, Target.of(parameter.device), transposed, seen)
                packings[name] = MatrixPacking(packed, digest(parameter))
        if not packings:
            raise ConfigError(f"variants: no matrix of {layer.name} can be packed as {variant.config}")
        return packings

    return pack


def measure_paths(layers: Iterable[PackedLayer], device: torch.device) -> None:
    """Decide how products with these matrices are computed on a device, for every kind of them, where that is not
    decided yet."""
    seen = set()
    for packing in (p for layer in layers for p in layer.packings.values() if isinstance(p, MatrixPacking)):
        packed = packing.packed if packing.packed.experts is None else packing.packed.expert(0)
        product = packed.product_of(packed.dtype)
        if product not in seen:
            seen.add(product)
            packed = packed.for_target(Target.of(device))
            parts = {name: part.to(device) for name, part in packed.parts.items()}
            measure(paths, packed.config, parts, packed.matrix, packed.target, packed.dtype)


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
    return PackedLayer({name: packing.over(parts[name]) for name, packing in packings.items()}, block)
