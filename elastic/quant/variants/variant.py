"""Variants: what a layer can be swapped to, by name, and a layer's parameters packed for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic.errors import ConfigError, StateError
from elastic.memory.host_store import HostTensor
from elastic.quant.formats.base import KernelTarget, MatrixShape, PackedTensors, format_of
from elastic.quant.formats.integer import Integers
from elastic.quant.kernels import integer_format  # noqa: F401  (registers its format)
from elastic.quant.variants.packed_weight import PackedMatrix, PackedSource, PlainSource
from elastic.weights.proxy.tensor import WeightProxy, WeightSource

DEFAULTS: Mapping[str, Any] = {
    "int8": Integers(8, group_size=-1, symmetric=True),
    "int4": Integers(4, group_size=128),
    "int3": Integers(3, group_size=128),
}
"""What the plain names stand for."""


@dataclass(frozen=True)
class Variant:
    """A variant of every decoder layer, as `wrap` is asked for it.

    Its matrices are rounded to nearest from the model's own weights; with `calibration`, after a search for the scales
    that suit the inputs which that text gives them (AWQ). Or they are read from a quantized checkpoint of the same
    model, norms included.
    """

    name: str
    config: Any = None
    """Such as `elastic.Integers(bits=4, group_size=64)`. None: what the name stands for ("int8", "int4", "int3")."""
    checkpoint: str | Path | None = None
    """The directory of an AutoGPTQ, GPTQModel or AutoAWQ checkpoint; its config then counts."""
    calibration: torch.Tensor | None = None
    """Token ids, int64 [sequences, tokens]."""

    @classmethod
    def parse(cls, variant: str | Variant) -> Variant:
        """A variant from its name. Raises `ConfigError`."""
        chosen = variant if isinstance(variant, cls) else cls(str(variant))
        if chosen.checkpoint is not None:
            return chosen
        if chosen.config is None:
            if chosen.name not in DEFAULTS:
                raise ConfigError(
                    f"variants: {variant!r} is not known; use one of {list(DEFAULTS)}, or elastic.Variant(name, config)"
                )
            chosen = replace(chosen, config=DEFAULTS[chosen.name])
        format_of(chosen.config)
        return chosen


class MatrixParameter:
    """A matrix, or those of all experts of a layer, packed, in host memory."""

    def __init__(self, packed: PackedMatrix, origin: int) -> None:
        self.packed = packed
        self.source_digest = origin
        self._elsewhere: dict[KernelTarget, MatrixParameter] = {}

    @property
    def parts(self) -> PackedTensors:
        return self.packed.parts

    def for_device(self, device: torch.device) -> MatrixParameter:
        """The very same codes, as the kernels of a device take them."""
        target = KernelTarget.of(device)
        if target == self.packed.target:
            return self
        if target not in self._elsewhere:
            self._elsewhere[target] = type(self)(self.packed.for_target(target), self.source_digest)
        return self._elsewhere[target]

    def content(self, like: torch.Tensor, parts: PackedTensors, full: WeightSource) -> nn.Parameter | WeightProxy:
        return WeightProxy(like, PackedSource(replace(self.packed, parts=parts), full))

    def renewed(self, full: torch.Tensor, origin: int) -> MatrixParameter:
        """Rounded to nearest from other weights."""
        old = self.packed
        return MatrixParameter(pack_parameter(full, old.config, old.target, old.transposed), origin)

    def with_storage(self, parts: PackedTensors) -> MatrixParameter:
        """The same with its parts elsewhere."""
        return type(self)(replace(self.packed, parts=parts), self.source_digest)


class ReplacedParameter:
    """A parameter that a quantized checkpoint has changed: a norm, or a bias."""

    def __init__(self, value: torch.Tensor, origin: int) -> None:
        self.parts: PackedTensors = {"value": value}
        self.source_digest = origin

    def content(self, like: torch.Tensor, parts: PackedTensors, full: WeightSource) -> nn.Parameter | WeightProxy:
        return WeightProxy(like, PlainSource(parts["value"], full))

    def for_device(self, device: torch.device) -> ReplacedParameter:
        return self

    def renewed(self, full: torch.Tensor, origin: int) -> ReplacedParameter:
        raise _read_before()

    def with_storage(self, parts: PackedTensors) -> ReplacedParameter:
        """The same with its value elsewhere."""
        return ReplacedParameter(parts["value"], self.source_digest)


class CheckpointParameter(MatrixParameter):
    """A matrix as a quantized checkpoint has it."""

    def renewed(self, full: torch.Tensor, origin: int) -> MatrixParameter:
        raise _read_before()


def _read_before() -> StateError:
    return StateError(
        "the model's weights were written since a quantized checkpoint of it was read: its layers cannot be swapped to "
        "that variant any more; wrap the model again with a checkpoint of the present weights"
    )


Packing = MatrixParameter | ReplacedParameter


class PackedLayer:
    """A layer in a variant (the hooks' `LayerVariant`): one block of host memory, and the packings over it."""

    def __init__(self, packings: Mapping[str, Packing], block: HostTensor | None) -> None:
        self.packings = dict(packings)
        self.block = block

    @property
    def together(self) -> bool:
        return any(isinstance(packing, ReplacedParameter) for packing in self.packings.values())

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for packing in self.packings.values() for part in packing.parts.values())


def pack_parameter(
    weight: torch.Tensor, config: Any, target: KernelTarget, transposed: bool, inputs: torch.Tensor | None = None
) -> PackedMatrix:
    """Pack a matrix, [outputs, inputs] (or transposed), or those of all experts, with one dimension more in front.

    `inputs` [tokens, inputs] are what it is used on, if that is known.
    """
    found, format_ = weight.detach(), format_of(config)
    found = found.transpose(-1, -2) if transposed else found
    matrix = MatrixShape(*found.shape[-2:])
    if weight.ndim == 2:
        return PackedMatrix(
            config, matrix, target, format_.quantize(config, found, inputs, target), weight.dtype, transposed
        )
    each = [format_.quantize(config, one, None, target) for one in found]
    parts = {name: torch.stack([one[name] for one in each]) for name in each[0]}
    return PackedMatrix(config, matrix, target, parts, weight.dtype, transposed, len(each))
