"""Variants on disk: one safetensors file for each, with the layers' blocks as they are used here, read by mmap.

All that describes the blocks is in the metadata, under a checksum, and each block has one of its own: a file that is
damaged, or of another model, is refused. Bytes that were packed for another instruction set are packed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from elastic.errors import ConfigError
from elastic.memory.checkpoint_file import CheckpointFile
from elastic.memory.checksum import digest
from elastic.memory.host_store import host
from elastic.memory.weight_layout import LayerLayout, ParameterLayout
from elastic.quant.formats.base import KernelTarget, MatrixShape, config_from, format_of
from elastic.quant.formats.kernel_table import KernelTable, paths
from elastic.quant.variants.eligible import LayerParameters
from elastic.quant.variants.host_block import in_one_block, views
from elastic.quant.variants.packed_weight import PackedMatrix
from elastic.quant.variants.variant import (
    CheckpointParameter,
    MatrixParameter,
    PackedLayer,
    Packing,
    ReplacedParameter,
    Variant,
)

VERSION = "elastic-variant-1"
_KINDS: dict[str, type] = {"rounded": MatrixParameter, "read": CheckpointParameter, "plain": ReplacedParameter}


def file_of(directory: str | Path, variant: Variant) -> Path:
    """Where a variant is kept."""
    return Path(directory) / f"elastic-{variant.name}.safetensors"


def save(path: Path, variant: Variant, layers: Sequence[LayerParameters], packed: Sequence[PackedLayer]) -> None:
    """Write a variant of all layers; the file is complete or not there. Raises `ConfigError` where it cannot be."""
    from safetensors.torch import save_file

    matrices = [p.packed for one in packed for p in one.packings.values() if isinstance(p, MatrixParameter)]
    used = {matrix.product_of(matrix.dtype) for matrix in matrices}
    about = {
        "version": VERSION,
        "variant": described(variant),
        "target": asdict(KernelTarget.of(layers[0].device)),
        "paths": paths.only(used).to_json(),
        "layers": {layer.name: _about_layer(one) for layer, one in zip(layers, packed, strict=True)},
    }
    text = json.dumps(about)
    blocks = {layer.name: one.block.tensor for layer, one in zip(layers, packed, strict=True) if one.block}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
            temporary = Path(file.name)
        try:
            save_file(blocks, temporary, {"about": text, "sha256": _sha256(text)})
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"variant_cache: {path} cannot be written: {error}") from error


def load(path: Path, variant: Variant, layers: Sequence[LayerParameters]) -> list[PackedLayer]:
    """What `save` wrote. Raises `ConfigError` for a damaged file, and for one of another model or variant."""
    file = CheckpointFile(path)
    about = _read_about(file)
    if about["variant"] != described(variant):
        raise _foreign(path, f"it has {about['variant']}, and asked for is {described(variant)}")
    if list(about["layers"]) != [layer.name for layer in layers] and set(about["layers"]) != {w.name for w in layers}:
        raise _foreign(path, "it has other layers than the model")
    packed_for, target = KernelTarget(**about["target"]), KernelTarget.of(layers[0].device)
    if packed_for == target:
        paths.merge(KernelTable.from_json(about["paths"]))
    return [_load_layer(file, layer, about["layers"][layer.name], packed_for, target) for layer in layers]


def described(variant: Variant) -> dict[str, Any]:
    """What a file of the variant must have been made of."""
    return {
        "name": variant.name,
        "config": None if variant.config is None else _named(variant.config),
        "calibration": None if variant.calibration is None else digest(variant.calibration),
        "checkpoint": None if variant.checkpoint is None else _state_of(Path(variant.checkpoint)),
    }


@dataclass(frozen=True)
class _Entry:
    """One parameter of a layer, as described in a file."""

    kind: str
    origin: int
    parts: dict[str, tuple[str, tuple[int, ...]]]
    packed: dict[str, Any]


def _about_layer(layer: PackedLayer) -> dict[str, Any]:
    assert layer.block is not None
    return {
        "digest": layer.block.digest,
        "parameters": {name: asdict(_entry(packing)) for name, packing in layer.packings.items()},
    }


def _entry(packing: Packing) -> _Entry:
    kind = next(name for name, kind in _KINDS.items() if type(packing) is kind)
    parts = {name: (_dtype_name(part.dtype), tuple(part.shape)) for name, part in packing.parts.items()}
    if isinstance(packing, ReplacedParameter):
        return _Entry(kind, packing.source_digest, parts, {})
    packed = packing.packed
    described = {
        "config": _named(packed.config),
        "matrix": asdict(packed.matrix),
        "dtype": _dtype_name(packed.dtype),
        "transposed": packed.transposed,
        "experts": packed.experts,
    }
    return _Entry(kind, packing.source_digest, parts, described)


def _load_layer(
    file: CheckpointFile,
    layer: LayerParameters,
    about: Mapping[str, Any],
    packed_for: KernelTarget,
    target: KernelTarget,
) -> PackedLayer:
    entries = {name: _Entry(**entry) for name, entry in about["parameters"].items()}
    for name, entry in entries.items():
        if name not in layer.parameters or digest(layer.parameters[name][1]) != entry.origin:
            raise _foreign(file.path, f"{layer.name}.{name} of the model is another one")
    flat = file.tensor(layer.name) if layer.name in file.names else None
    layout = _layout(entries)
    if flat is None or flat.nbytes != layout.nbytes or digest(flat) != about["digest"]:
        raise _damaged(file.path, f"the checksum of {layer.name} does not fit")
    found = views(flat, layout)
    packings = {name: _packing(name, entry, found, packed_for) for name, entry in entries.items()}
    if packed_for != target:
        return in_one_block({name: _repacked(p, target) for name, p in packings.items()}, layer.device)
    kept = host.keep(flat, about["digest"], file=flat if target.device == "cpu" else None, lock=target.device == "cuda")
    return PackedLayer(
        {name: p.with_storage(_parts_of(name, views(kept.tensor, layout))) for name, p in packings.items()}, kept
    )


def _packing(name: str, entry: _Entry, found: Mapping[tuple[str, str], torch.Tensor], target: KernelTarget) -> Packing:
    parts = _parts_of(name, found)
    if entry.kind == "plain":
        return ReplacedParameter(parts["value"], entry.origin)
    about = entry.packed
    packed = PackedMatrix(
        config_from(about["config"]["type"], about["config"]["fields"]),
        MatrixShape(**about["matrix"]),
        target,
        parts,
        getattr(torch, about["dtype"]),
        about["transposed"],
        about["experts"],
    )
    made: Packing = _KINDS[entry.kind](packed, entry.origin)
    return made


def _repacked(packing: Packing, target: KernelTarget) -> Packing:
    """The same codes for this machine's instructions."""
    if isinstance(packing, ReplacedParameter):
        return packing
    return type(packing)(packing.packed.for_target(target), packing.source_digest)


def _parts_of(name: str, found: Mapping[tuple[str, str], torch.Tensor]) -> dict[str, torch.Tensor]:
    return {part: tensor for (parameter, part), tensor in found.items() if parameter == name}


def _layout(entries: Mapping[str, _Entry]) -> LayerLayout:
    like = {
        f"{name}/{part}": ParameterLayout.like(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
        for name, entry in entries.items()
        for part, (dtype, shape) in entry.parts.items()
    }
    return LayerLayout.pack(like)


def _read_about(file: CheckpointFile) -> dict[str, Any]:
    text = file.metadata.get("about")
    if not isinstance(text, str):
        raise _foreign(file.path, "Elastic did not write it")
    if _sha256(text) != file.metadata.get("sha256"):
        raise _damaged(file.path, "the checksum of its description does not fit")
    about: dict[str, Any] = json.loads(text)
    if about.get("version") != VERSION:
        raise _foreign(file.path, f"its version is {about.get('version')!r}, not {VERSION!r}")
    return about


def _named(config: Any) -> dict[str, Any]:
    format_of(config)
    return {"type": type(config).__name__, "fields": asdict(config)}


def _state_of(checkpoint: Path) -> list[list[Any]]:
    """Name, size and time of each file."""
    files = sorted(checkpoint.iterdir()) if checkpoint.is_dir() else [checkpoint]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError(f"variant_cache: {path} is damaged: {why}; delete it, and it is made again")


def _foreign(path: Path, why: str) -> ConfigError:
    return ConfigError(f"variant_cache: {path} is not for this: {why}; delete it, or choose another directory")
