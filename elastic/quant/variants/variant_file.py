"""Variants on disk: one safetensors file for each, with the layers' blocks as they are used in memory, read by mmap.

All that describes the blocks is in the metadata, under a checksum, and each block has one of its own: a file that is
damaged, or of another model, is refused. Bytes that were packed for another instruction set are packed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from elastic.directories import replacing
from elastic.errors import ConfigError
from elastic.memory.checkpoint_file import CheckpointFile
from elastic.memory.checksum import digest
from elastic.memory.host_store import host
from elastic.memory.weight_layout import LayerLayout, ParameterLayout
from elastic.quant.formats.base import KernelTarget, MatrixShape, config_from, format_of
from elastic.quant.formats.kernel_table import KernelTable, paths
from elastic.quant.variants.calibration import fingerprint_of_tokens
from elastic.quant.variants.eligible import LayerParameters
from elastic.quant.variants.host_block import in_one_block, over_block, parts_in
from elastic.quant.variants.packed_weight import PackedMatrix
from elastic.quant.variants.variant import MatrixParameter, PackedLayer, Packing, ReplacedParameter, Variant

VERSION = "elastic-variant-4"
"""Of the files that are written and read; those before have other checksums."""


def save(path: Path, variant: Variant, layers: Sequence[LayerParameters], packed: Sequence[PackedLayer]) -> None:
    """Write a variant of all layers; the file is complete or not there. Raises `ConfigError` where it cannot be."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    packings = [packing for layer in packed for packing in layer.packings.values()]
    used = {p.packed.spec(p.packed.dtype) for p in packings if isinstance(p, MatrixParameter)}
    description: dict[str, Any] = {
        "version": VERSION,
        "variant": describe_source(variant),
        "target": asdict(KernelTarget.of(layers[0].device)),
        "paths": paths.only(used).to_json(),
        "layers": {},
    }
    blocks = {}
    for layer, variant_of in zip(layers, packed, strict=True):
        entries = {name: asdict(_entry(packing)) for name, packing in variant_of.packings.items()}
        block: dict[str, Any] = {"target": asdict(KernelTarget.of(layer.device)), "parameters": entries}
        if variant_of.block is not None:
            blocks[layer.name] = variant_of.block.tensor
            block["digest"] = variant_of.block.digest
        description["layers"][layer.name] = block
    text = json.dumps(description)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial:
            save_file(blocks, partial, {"about": text, "sha256": hashlib.sha256(text.encode()).hexdigest()})
    except (OSError, SafetensorError) as error:  # the latter, for a disk that is full
        raise ConfigError(f"variant_cache: {path} cannot be written: {error}") from error


def load(path: Path, variant: Variant, layers: Sequence[LayerParameters]) -> list[PackedLayer]:
    """Read a file of `save`. Raises `ConfigError` for a damaged file, and for one of another model or variant."""
    source = describe_source(variant)
    try:
        return _read_layers(CheckpointFile(path), source, layers)
    except ConfigError as error:
        raise error if str(error).startswith("variant_cache: ") else _damaged(path, str(error)) from error
    except OSError as error:
        raise ConfigError(f"variant_cache: {path} cannot be read: {error}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _damaged(path, f"it is not what was written ({error!r})") from error


def _read_layers(
    file: CheckpointFile, source: Mapping[str, Any], layers: Sequence[LayerParameters]
) -> list[PackedLayer]:
    """Read all layers. Raises whatever reading something else may raise."""
    path, description, names = file.path, _read_description(file), [layer.name for layer in layers]
    if description["variant"] != source:
        raise _foreign(path, f"it has {description['variant']}, and asked for is {source}")
    if set(description["layers"]) != set(names):
        raise _foreign(path, "it has other layers than the model")
    target, described = description["target"], description["layers"]
    if KernelTarget(**target) == KernelTarget.of(layers[0].device):
        paths.merge(KernelTable.from_json(description["paths"]))
    return [_load_layer(file, layer, {"target": target, **described[layer.name]}) for layer in layers]


def describe_source(variant: Variant) -> dict[str, Any]:
    """Return all that the blocks of a variant are made from, apart from the model's weights, as JSON."""
    files: list[list[Any]] | None = None
    if variant.checkpoint is not None:
        checkpoint = Path(variant.checkpoint)
        inside = sorted(checkpoint.iterdir()) if checkpoint.is_dir() else [checkpoint]
        files = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in inside if file.is_file()]
    return {
        "name": variant.name,
        "config": None if variant.config is None else _describe_config(variant.config),
        "calibration": None if variant.calibration is None else fingerprint_of_tokens(variant.calibration),
        "checkpoint": files,
    }


@dataclass(frozen=True)
class _Entry:
    """The description of one parameter of a layer, as in a file."""

    kind: str
    """One of "rounded" (or pruned), "read" (from a checkpoint) and "plain"."""
    origin: int
    """The digest of the full parameter."""
    parts: dict[str, tuple[str, tuple[int, ...]]]
    """Part -> the name of its dtype, and its shape."""
    packed: dict[str, Any]
    """The fields of a `PackedMatrix`, but for parts and target; empty for a plain parameter."""


def _entry(packing: Packing) -> _Entry:
    parts = {name: (str(part.dtype).removeprefix("torch."), tuple(part.shape)) for name, part in packing.parts.items()}
    if isinstance(packing, ReplacedParameter):
        return _Entry("plain", packing.source_digest, parts, {})
    packed = packing.packed
    described = {
        "config": _describe_config(packed.format.config),
        "matrix": asdict(packed.format.matrix),
        "dtype": str(packed.dtype).removeprefix("torch."),
        "transposed": packed.transposed,
        "experts": packed.experts,
    }
    return _Entry("read" if packing.from_checkpoint else "rounded", packing.source_digest, parts, described)


def _load_layer(file: CheckpointFile, layer: LayerParameters, description: Mapping[str, Any]) -> PackedLayer:
    """Read the block of a layer; one that was packed for another target is packed again."""
    packed_for, device = KernelTarget(**description["target"]), layer.device
    entries = {name: _Entry(**entry) for name, entry in description["parameters"].items()}
    for name, entry in entries.items():
        if name not in layer.parameters or digest(layer.parameters[name][1]) != entry.origin:
            raise _foreign(file.path, f"{layer.name}.{name} of the model is another one")
    if not entries:
        return PackedLayer({}, None)
    flat = file.tensor(layer.name) if layer.name in file.shapes else None
    layout = _layout(entries)
    if flat is None or flat.nbytes != layout.nbytes or digest(flat) != description["digest"]:
        raise _damaged(file.path, f"the checksum of {layer.name} does not fit")
    parts = parts_in(flat, layout)
    packings = {name: _packing(entry, parts[name], packed_for) for name, entry in entries.items()}
    if packed_for != KernelTarget.of(device):
        return in_one_block({name: p.for_device(device) for name, p in packings.items()}, device)
    on_cuda = device.type == "cuda"
    block = host.keep(flat, description["digest"], file=None if on_cuda else flat, lock=on_cuda)
    return over_block(packings, layout, block)


def _packing(entry: _Entry, parts: dict[str, torch.Tensor], target: KernelTarget) -> Packing:
    if entry.kind == "plain":
        return ReplacedParameter(parts, entry.origin)
    fields = entry.packed
    config = config_from(fields["config"]["type"], fields["config"]["fields"])
    form = format_of(config)(config, MatrixShape(**fields["matrix"]), target)
    dtype = getattr(torch, fields["dtype"])
    packed = PackedMatrix(form, parts, dtype, fields["transposed"], fields["experts"])
    return MatrixParameter(packed, entry.origin, from_checkpoint=entry.kind == "read")


def _layout(entries: Mapping[str, _Entry]) -> LayerLayout:
    like = {
        f"{name}/{part}": ParameterLayout.like(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
        for name, entry in entries.items()
        for part, (dtype, shape) in entry.parts.items()
    }
    return LayerLayout.pack(like)


def _read_description(file: CheckpointFile) -> dict[str, Any]:
    """Read the description of the blocks. Raises `ConfigError` where it is not one, or damaged."""
    text = file.metadata.get("about")
    if not isinstance(text, str):
        raise _foreign(file.path, "Elastic did not write it")
    if hashlib.sha256(text.encode()).hexdigest() != file.metadata.get("sha256"):
        raise _damaged(file.path, "the checksum of its description does not fit")
    description: dict[str, Any] = json.loads(text)
    if description.get("version") != VERSION:
        raise _foreign(file.path, f"its version is {description.get('version')!r}, not {VERSION!r}")
    return description


def _describe_config(config: Any) -> dict[str, Any]:
    format_of(config)  # refuses what could not be read again
    return {"type": type(config).__name__, "fields": asdict(config)}


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(f"variant_cache: {path} is damaged: {why}; delete it, and it is made again")


def _foreign(path: Path, why: str) -> ConfigError:
    return ConfigError(f"variant_cache: {path} is not for this: {why}; delete it, or choose another directory")
