"""Variants of layers, by name, and a layer's parameters packed for one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic.errors import ConfigError, StateError, require, require_path
from elastic.memory.host_store import HostTensor
from elastic.quant.formats.base import KernelTarget, MatrixShape, PackedTensors, format_of
from elastic.quant.formats.integer import Integers
from elastic.quant.formats.pruned import NAMES, Pruned, pruned_by_name
from elastic.quant.kernels import integer_format  # noqa: F401  (registers its format)
from elastic.quant.pruning import sparse_format, structured_format  # noqa: F401  (the same)
from elastic.quant.variants.packed_weight import PackedMatrix, PackedSource, PlainSource, stack_parts
from elastic.types import DROPPED, HOST
from elastic.weights.model import ABSENT
from elastic.weights.proxy.tensor import WeightProxy, WeightSource

DEFAULTS: Mapping[str, Any] = {
    "int8": Integers(8, group_size=-1, symmetric=True),
    "int4": Integers(4, group_size=128),
    "int3": Integers(3, group_size=128),
}
"""Plain name -> the config that it stands for; names of pruned variants follow a pattern (`pruned_by_name`)."""

_NAME = re.compile(r"\w[\w:.-]{0,99}", re.ASCII)

NAMED = f"{', '.join(DEFAULTS)}, {NAMES}"
"""Plain names, for messages."""


@dataclass(frozen=True)
class Variant:
    """A variant of every decoder layer, as given to `wrap`.

    Its matrices are rounded to nearest from the model's own weights; with `calibration`, after a search for the scales
    that suit the inputs which that text gives them (AWQ). Or they are pruned, by magnitude or by a criterion that needs
    calibration. Or they are read from a quantized checkpoint of the same model, norms included.
    """

    name: str
    config: Any = None
    """A config such as `elastic.Integers(bits=4, group_size=64)`. None: that of the name, such as "int4" or "2:4"."""
    checkpoint: str | Path | None = None
    """The directory of an AutoGPTQ, GPTQModel or AutoAWQ checkpoint; its config then counts."""
    calibration: torch.Tensor | None = None
    """Token ids of calibration text, int64 [sequences, tokens]."""

    @classmethod
    def parse(cls, variant: str | Variant) -> Variant:
        """Complete a variant, or make one from its name. Raises `ConfigError` for an unknown name or config."""
        chosen = variant if isinstance(variant, cls) else cls(str(variant))
        require(isinstance(chosen.name, str), "name of a variant", chosen.name, "a text")
        if chosen.config is None and chosen.checkpoint is None:
            config = config_of(chosen.name)
            if config is None:
                raise ConfigError(
                    f"variants: {variant!r} is not known; use one of {NAMED}, or elastic.Variant(name, config)"
                )
            chosen = replace(chosen, config=config)
        _check_name(chosen.name)
        if chosen.checkpoint is not None:
            require_path(chosen.checkpoint, "checkpoint")
            return chosen
        format_of(chosen.config)
        _check_calibration(chosen)
        return chosen


def config_of(name: str) -> Any | None:
    """Return the config that a plain name stands for; None for an unknown one.

    Raises `ConfigError` for the name of a pruned variant with impossible numbers, such as "3:5".
    """
    return DEFAULTS[name] if name in DEFAULTS else pruned_by_name(name)


def _check_name(name: str) -> None:
    """Raise `ConfigError` for a name that no file can have, or that says of a layer that it is in no variant."""
    allowed = "1 to 100 letters, digits, '_', ':', '.' and '-', and begin with one of the first three"
    require(_NAME.fullmatch(name) is not None, "name of a variant", name, allowed)
    dtype = getattr(torch, name, None)
    floats = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    is_full = name == "full" or (floats and str(dtype) == f"torch.{name}")  # and no alias, such as `half`
    taken = is_full or name in (HOST, ABSENT, DROPPED)
    require(not taken, "name of a variant", name, "another one: this says of a layer that it is in no variant")


def _check_calibration(variant: Variant) -> None:
    """Raise `ConfigError` for what is no text, and where a criterion lacks it, or would not use it."""
    text = variant.calibration
    if text is not None and not isinstance(text, torch.Tensor):
        raise ConfigError(
            f"calibration: a tensor of token ids [sequences, tokens] is needed, not {type(text).__name__}"
        )
    if not isinstance(variant.config, Pruned):
        return
    if variant.config.calibrated and variant.calibration is None:
        raise ConfigError(
            f"variants: {variant.name!r} is pruned by {variant.config.by!r}, which needs calibration=, token ids "
            "[sequences, tokens]; without them use by='magnitude'"
        )
    if variant.calibration is not None and not variant.config.calibrated:
        raise ConfigError(
            f"variants: {variant.name!r} is pruned by 'magnitude', which uses no calibration; leave it out, or use "
            "by='wanda' or by='sparsegpt'"
        )


class MatrixParameter:
    """A matrix, or those of all experts of a layer, packed, in host memory."""

    def __init__(self, packed: PackedMatrix, source_digest: int, *, from_checkpoint: bool = False) -> None:
        self.packed = packed
        self.parts = packed.parts
        self.source_digest = source_digest
        self.from_checkpoint = from_checkpoint
        """True if the codes were read from a quantized checkpoint, not rounded from the model's weights."""
        self._by_target: dict[KernelTarget, MatrixParameter] = {}

    def for_device(self, device: torch.device) -> MatrixParameter:
        """Return the very same codes for the kernels of a device; packed again once, where those are others."""
        target = KernelTarget.of(device)
        if target == self.packed.format.target:
            return self
        if target not in self._by_target:
            packed = self.packed.for_target(target)
            self._by_target[target] = MatrixParameter(packed, self.source_digest, from_checkpoint=self.from_checkpoint)
        return self._by_target[target]

    def content(self, like: torch.Tensor, parts: PackedTensors, full: WeightSource) -> nn.Parameter | WeightProxy:
        """Return the proxy for the parameter's slot, with the shape, `[...]`, and dtype of `like`."""
        return WeightProxy(like, PackedSource(full, replace(self.packed, parts=parts)))

    def renewed(self, full: torch.Tensor, origin: int) -> MatrixParameter:
        """Round new weights, of the parameter's shape `[...]` and any float dtype, to nearest, or prune by magnitude.

        Channels that were left out of a layer stay so. Raises `StateError` for a matrix from a checkpoint.
        """
        if self.from_checkpoint:
            raise StateError(_STALE_CHECKPOINT)
        old = self.packed
        renew = getattr(old.format, "renew", None)
        if renew is not None:
            parts = renew(old.parts, full.T if old.transposed else full)
            return MatrixParameter(replace(old, parts=parts), origin)
        return MatrixParameter(pack_parameter(full, old.format.config, old.format.target, old.transposed), origin)

    def with_storage(self, parts: PackedTensors) -> MatrixParameter:
        """Return the same packing over other parts of the same shapes and dtypes, `[...]` each."""
        packed = replace(self.packed, parts=parts)
        return MatrixParameter(packed, self.source_digest, from_checkpoint=self.from_checkpoint)


@dataclass(frozen=True, eq=False)
class ReplacedParameter:
    """A parameter that a quantized checkpoint has changed: a norm, or a bias. Its only part is `value`."""

    parts: PackedTensors
    source_digest: int
    from_checkpoint: bool = field(default=True, init=False)

    def for_device(self, device: torch.device) -> ReplacedParameter:
        """Return the parameter itself: it has no layout of a device's."""
        return self

    def content(self, like: torch.Tensor, parts: PackedTensors, full: WeightSource) -> nn.Parameter | WeightProxy:
        """Return the proxy for the parameter's slot, with the shape, `[...]`, and dtype of `like`."""
        return WeightProxy(like, PlainSource(full, parts["value"]))

    def renewed(self, full: torch.Tensor, origin: int) -> ReplacedParameter:
        """Raise `StateError` for new weights of any shape: the value was read from a checkpoint."""
        raise StateError(_STALE_CHECKPOINT)

    def with_storage(self, parts: PackedTensors) -> ReplacedParameter:
        """Return the same with its value, of the same shape `[...]` and dtype, in another tensor."""
        return ReplacedParameter(parts, self.source_digest)


Packing = MatrixParameter | ReplacedParameter
_STALE_CHECKPOINT = (
    "the model's weights were written since a quantized checkpoint of it was read: its layers cannot be swapped to "
    "that variant any more; wrap the model again with a checkpoint of the present weights"
)


class PackedLayer:
    """A layer in a variant (a `LayerVariant` of `elastic.weights`): packings over one block of host memory.

    Without packings, and without a block, the layer is full in it too.
    """

    def __init__(self, packings: Mapping[str, Packing], block: HostTensor | None) -> None:
        self.packings = dict(packings)
        self.block = block
        self.together = any(isinstance(packing, ReplacedParameter) for packing in packings.values())


def pack_parameter(
    weight: torch.Tensor, config: Any, target: KernelTarget, transposed: bool, inputs: torch.Tensor | None = None
) -> PackedMatrix:
    """Pack a parameter: one matrix, or those of all experts.

    weight: [outputs, inputs] or, `transposed`, [inputs, outputs], with the experts in front if it has any; any float
    dtype. inputs: [tokens, inputs], samples of what one matrix is multiplied with, if they are known.
    """
    stack = weight.detach().transpose(-1, -2) if transposed else weight.detach()
    form = format_of(config)(config, MatrixShape(*stack.shape[-2:]), target)
    if weight.ndim == 2:
        return PackedMatrix(form, form.quantize(stack, inputs), weight.dtype, transposed)
    experts = [form.quantize(expert, None) for expert in stack]
    return PackedMatrix(form, stack_parts(experts), weight.dtype, transposed, len(experts))
