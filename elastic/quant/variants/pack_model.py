"""Packing of all layers of a model for its variants, when it is wrapped."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from elastic.errors import ConfigError
from elastic.memory.backends.streams import synchronize
from elastic.memory.checksum import digest
from elastic.quant.formats.autotune import measure
from elastic.quant.formats.base import KernelTarget, format_of
from elastic.quant.formats.kernel_table import MatmulSpec, paths
from elastic.quant.formats.pruned import Pruned, Structured
from elastic.quant.variants.channels import pack_channels
from elastic.quant.variants.eligible import NO_MATRICES, LayerParameters, fitting, matrices, matrix_of
from elastic.quant.variants.from_checkpoint import checkpoint_packer
from elastic.quant.variants.host_block import in_one_block
from elastic.quant.variants.packed_weight import PackedMatrix
from elastic.quant.variants.variant import MatrixParameter, PackedLayer, Packing, Variant, pack_parameter
from elastic.quant.variants.variant_file import load, save

logger = logging.getLogger(__name__)
AT_ONCE = max(1, min(4, (os.cpu_count() or 1) // 4))
"""Layers packed at the same time: torch uses several threads for each."""


def build(
    layers: Sequence[LayerParameters],
    variant: Variant,
    pack: Callable[[LayerParameters], Mapping[str, Packing]],
) -> list[PackedLayer]:
    """Pack all layers, several at a time, each into one block of the host store."""
    from tqdm.auto import tqdm

    for device in {layer.device for layer in layers}:
        synchronize(device)  # weights were written on the caller's stream, and threads have others
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="elastic-pack") as pool:
        packed = pool.map(lambda layer: in_one_block(pack(layer), layer.device), layers)
        return list(
            tqdm(packed, total=len(layers), desc=f"Packing {variant.name}", delay=1, disable=None)
        )  # None: without a terminal


def obtain(
    layers: Sequence[LayerParameters],
    variant: Variant,
    cache: str | Path | None,
    inputs: Callable[[], Mapping[str, torch.Tensor]],
) -> list[PackedLayer]:
    """Return a variant of all layers: read from its file in the cache, or else packed and written there.

    `inputs` returns samples of the matrices' inputs, [rows, inputs], by their full names.
    """
    if not layers:
        raise ConfigError(
            f"variants: no layer of this model has weights of its own that {variant.name!r} could stand for, as all "
            "share theirs; wrap it without variants"
        )
    path = Path(cache) / f"elastic-{file_name(variant.name)}.safetensors" if cache is not None else None
    cached = path is not None and os.path.exists(path)  # False, too, where it cannot be looked for
    packed = (
        load(path, variant, layers) if path and cached else build(layers, variant, _packer(variant, layers, inputs))
    )
    if not any(layer.packings for layer in packed):
        raise ConfigError(
            f"variants: {variant.checkpoint} has all layers of this model in full precision, so {variant.name!r} would "
            "change nothing; give a checkpoint with quantized layers, or a name such as 'int4'"
        )
    for device in {layer.device for layer in layers}:
        measure_paths([p for layer, p in zip(layers, packed, strict=True) if layer.device == device], device)
    if path and not cached:
        save(path, variant, layers, packed)
    return packed


def _packer(
    variant: Variant, layers: Sequence[LayerParameters], inputs: Callable[[], Mapping[str, torch.Tensor]]
) -> Callable[[LayerParameters], Mapping[str, Packing]]:
    """Return the packer of a variant; warn of matrices without the samples that its criterion needs."""
    samples = inputs()
    if isinstance(variant.config, Pruned) and variant.config.calibrated:
        names = [f"{layer.name}.{name}" for layer in layers for name, _, _ in matrices(layer)]
        unseen = [name for name in names if name not in samples]
        if unseen:
            logger.warning(
                "variant %s: %d of %d matrices have no samples of inputs, as those of experts, and are pruned by "
                "magnitude; the first is %s",
                variant.name,
                len(unseen),
                len(names),
                unseen[0],
            )
    return packer(variant, samples)


def file_name(variant: str) -> str:
    """Return a variant's name as a part of a file's, another one for each: "2of4" for "2:4".

    A colon means another host to some programs. No name has a percent sign.
    """
    return variant.replace("of", "o%f").replace(":", "of")


def packer(variant: Variant, inputs: Mapping[str, torch.Tensor]) -> Callable[[LayerParameters], Mapping[str, Packing]]:
    """Return a function that packs one layer for a variant.

    `inputs` has samples of the matrices' inputs, [rows, inputs], by their full names, as far as they are known.
    """
    if variant.checkpoint is not None:
        return checkpoint_packer(variant.checkpoint)
    if isinstance(variant.config, Structured):
        return partial(pack_channels, config=variant.config, inputs=inputs)

    @torch.no_grad()
    def pack(layer: LayerParameters) -> Mapping[str, Packing]:
        packings: dict[str, Packing] = {}
        for name, parameter, transposed in matrices(layer):
            config = fitting(variant.config, matrix_of(parameter, transposed))
            if config is not None:
                sample = inputs.get(f"{layer.name}.{name}")
                packed = pack_parameter(parameter, config, KernelTarget.of(parameter.device), transposed, sample)
                packings[name] = MatrixParameter(packed, digest(parameter))
        if not packings:
            refusals = (
                f"{name}: {format_of(variant.config).supports(variant.config, matrix_of(parameter, transposed))}"
                for name, parameter, transposed in matrices(layer)
            )
            why = next(refusals, NO_MATRICES)
            raise ConfigError(f"variants: no matrix of {layer.name} can be packed as {variant.config}: {why}")
        return packings

    return pack


def measure_paths(layers: Iterable[PackedLayer], device: torch.device) -> None:
    """Measure the paths of each kind of matrix on a device, as far as the kernel table lacks them."""
    kinds: dict[MatmulSpec, PackedMatrix] = {}
    for layer in layers:
        for packing in layer.packings.values():
            if isinstance(packing, MatrixParameter):
                kinds.setdefault(packing.packed.spec(packing.packed.dtype), packing.packed)
    for packed in kinds.values():
        packed = packed if packed.experts is None else packed.expert(0)
        packed, rebinds = packed.for_target(KernelTarget.of(device)), packed.of_experts
        parts = {name: part.to(device) for name, part in packed.parts.items()}
        form = packed.format
        measure(paths, form.config, parts, form.matrix, form.target, packed.dtype, rebinds=rebinds)
