"""Formats of packed matrices. The type of a small config selects the format: a new format is a new file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from elastic.errors import ConfigError

PackedTensors = Mapping[str, torch.Tensor]
"""The tensors that a packed matrix consists of, by name; contiguous."""
PartShapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of such tensors, by name."""
Kernel = Callable[[torch.Tensor, PackedTensors], torch.Tensor]
"""x: [tokens, inputs] in any float dtype, and parts -> x @ matrix.T, [tokens, outputs] in the dtype of x."""
BoundKernel = Callable[[torch.Tensor], torch.Tensor]
"""A kernel with its parts fixed: x -> x @ matrix.T, shapes and dtypes as of `Kernel`."""


@dataclass(frozen=True)
class MatrixShape:
    """The shape of a packed matrix, as a linear layer applies it: outputs = inputs @ matrix.T."""

    outputs: int
    inputs: int


@dataclass(frozen=True)
class KernelTarget:
    """The hardware that packed bytes are laid out for."""

    device: str
    """The type of a torch device: "cpu" or "cuda"."""
    instructions: str
    """CPU: the instruction set of torch's kernels, "AVX512", "AVX2" or "DEFAULT". CUDA: such as "sm90"."""

    @classmethod
    def of(cls, device: torch.device) -> KernelTarget:
        """Return the target of a device of this machine."""
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            return cls("cuda", f"sm{major}{minor}")
        return cls("cpu", torch.backends.cpu.get_cpu_capability())

    @property
    def compute_capability(self) -> int:
        """Of a CUDA device: 90 for 9.0."""
        return int(self.instructions.removeprefix("sm"))


@dataclass(frozen=True)
class Format(ABC):
    """How a matrix of one shape is packed by a config for one target, and its products: the base of all formats.

    Raises `ConfigError` for a matrix that the config cannot pack.
    """

    config: Any
    matrix: MatrixShape
    target: KernelTarget

    def __post_init__(self) -> None:
        problem = self.supports(self.config, self.matrix)
        if problem is not None:
            shape = [self.matrix.outputs, self.matrix.inputs]
            raise ConfigError(f"{self.config} cannot pack a matrix of shape {shape}: {problem}")

    @staticmethod
    def supports(config: Any, matrix: MatrixShape) -> str | None:
        """Return None, or in words why a matrix of this shape cannot be packed; where no format says more, all can."""
        return None

    @abstractmethod
    def part_shapes(self, dtype: torch.dtype) -> PartShapes:
        """Return the parts that a matrix of this dtype is packed into without samples, in their order.

        Where the weights decide whether there is a part, it is there. Raises `ConfigError` for a format whose parts are
        known for whole layers only.
        """

    @abstractmethod
    def quantize(self, weight: torch.Tensor, inputs: torch.Tensor | None) -> PackedTensors:
        """Pack a matrix.

        weight: [outputs, inputs], any float dtype. inputs: [tokens, inputs], any float dtype: samples of what the
        matrix is multiplied with, if they are known.
        """

    @abstractmethod
    def value(self, parts: PackedTensors) -> torch.Tensor:
        """Expand parts to the matrix that they stand for, float32 [outputs, inputs]: the reference of every path."""

    @abstractmethod
    def paths(self, parts: PackedTensors) -> Mapping[str, Kernel]:
        """Return the kernels that multiply x: [tokens, inputs] with such parts, by name.

        They may depend on which parts there are, not on their contents. "reference" (`value`, then a plain product) is
        always one of them.
        """

    def repack(self, parts: PackedTensors, target: KernelTarget) -> PackedTensors:
        """Return the parts of the same [outputs, inputs] matrix for another target: as they are, where none differ."""
        return parts


def bind(path: Kernel, parts: PackedTensors) -> BoundKernel:
    """Fix the parts of a kernel for x: [tokens, inputs]; a kernel with a `bind` of its own prepares them once."""
    bind_parts: Callable[[PackedTensors], BoundKernel] | None = getattr(path, "bind", None)
    return bind_parts(parts) if bind_parts is not None else lambda x: path(x, parts)


_formats: dict[type, type[Format]] = {}


def register(config: type, format: type[Format]) -> None:
    """Have matrices whose config is of this type packed by this format."""
    _formats[config] = format


def format_of(config: Any) -> type[Format]:
    """Return the format of a config. Raises `ConfigError` for a type that is not registered."""
    if type(config) not in _formats:
        names = ", ".join(sorted(kind.__name__ for kind in _formats))
        raise ConfigError(f"{config!r} is the config of no format; use one of: {names}")
    return _formats[type(config)]


def require_samples(inputs: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise `ConfigError` for samples, [tokens, inputs], not of a matrix, [outputs, inputs], or not finite."""
    if inputs.dim() != 2 or inputs.shape[1] != weight.shape[1]:
        raise ConfigError(
            f"inputs are {list(inputs.shape)}; the matrix, {list(weight.shape)}, needs [tokens, {weight.shape[1]}]"
        )
    if not bool(inputs.isfinite().all()):
        raise ConfigError("inputs hold values that are not finite; collect them from a forward pass without")


def evenly(rows: torch.Tensor, most: int) -> torch.Tensor:
    """Take at most so many of the rows, [rows, ...], evenly spaced."""
    if len(rows) <= most:
        return rows
    return rows[torch.linspace(0, len(rows) - 1, most, dtype=torch.float32, device=rows.device).long()]


def config_from(name: str, values: Mapping[str, Any]) -> Any:
    """Make a config from the name of its type and its fields. Raises `ConfigError` for unknown ones."""
    kinds = {kind.__name__: kind for kind in _formats}
    if name not in kinds:
        raise ConfigError(f"{name!r} is no format; use one of: {', '.join(sorted(kinds))}")
    try:
        return kinds[name](**values)
    except TypeError as error:
        raise ConfigError(f"{dict(values)!r} are not the fields of {name}: {error}") from error
