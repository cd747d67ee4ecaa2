"""Formats of packed matrices. The type of a small config selects the format, so that another format is another file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from elastic.errors import ConfigError

PackedTensors = Mapping[str, torch.Tensor]
"""The tensors that a packed matrix consists of, by name; contiguous."""
Kernel = Callable[[torch.Tensor, PackedTensors], torch.Tensor]
BoundKernel = Callable[[torch.Tensor], torch.Tensor]
"""x [tokens, inputs] in any float dtype, contiguous -> x @ matrix.T, [tokens, outputs] in the dtype of x."""


@dataclass(frozen=True)
class MatrixShape:
    """The shape of what is packed: outputs = inputs @ matrix.T."""

    outputs: int
    inputs: int


@dataclass(frozen=True)
class KernelTarget:
    """Where packed bytes are used, as far as they depend on it."""

    device: str
    """The type of a torch device: "cpu" or "cuda"."""
    instructions: str
    """CPU: what torch's kernels are compiled for here, "AVX512", "AVX2" or "DEFAULT". CUDA: such as "sm90"."""

    @classmethod
    def of(cls, device: torch.device) -> KernelTarget:
        """This machine's."""
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            return cls("cuda", f"sm{major}{minor}")
        return cls("cpu", torch.backends.cpu.get_cpu_capability())


class Format(Protocol):
    """How matrices of one kind of config are packed, and multiplied with."""

    def supports(self, config: Any, matrix: MatrixShape) -> str | None:
        """None, or in words why a matrix of this shape cannot be packed."""
        ...

    def quantize(
        self, config: Any, weight: torch.Tensor, inputs: torch.Tensor | None, target: KernelTarget
    ) -> PackedTensors:
        """Pack a matrix, [outputs, inputs]. `inputs` [tokens, inputs] are what it is used on, if that is known."""
        ...

    def value(self, config: Any, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget) -> torch.Tensor:
        """The matrix that the parts stand for, float32 [outputs, inputs]: the reference of every path."""
        ...

    def paths(
        self, config: Any, parts: PackedTensors, matrix: MatrixShape, target: KernelTarget
    ) -> Mapping[str, Kernel]:
        """The ways to multiply with these parts. "reference" (`value`, then a plain product) is always one."""
        ...

    def repack(
        self, config: Any, parts: PackedTensors, matrix: MatrixShape, packed_for: KernelTarget, target: KernelTarget
    ) -> PackedTensors:
        """The same matrix for another target, with the very same codes."""
        ...


def bind(path: Kernel, parts: PackedTensors) -> BoundKernel:
    """A path for parts that stay as they are: what can be looked at once is, not in every product."""
    own: Callable[[PackedTensors], BoundKernel] | None = getattr(path, "bind", None)
    return own(parts) if own is not None else lambda x: path(x, parts)


_formats: dict[type, Format] = {}


def register(config: type, format: Format) -> None:
    """Have matrices whose config is of this type packed by this format."""
    _formats[config] = format


def format_of(config: Any) -> Format:
    """The format of a config. Raises `ConfigError` for a type that is not registered."""
    if type(config) not in _formats:
        known = ", ".join(sorted(kind.__name__ for kind in _formats))
        raise ConfigError(f"{config!r} is the config of no format; use one of: {known}")
    return _formats[type(config)]


def config_from(name: str, values: Mapping[str, Any]) -> Any:
    """A config from the name of its type and its fields, as in a file. Raises `ConfigError` for what is unknown."""
    kind = next((kind for kind in _formats if kind.__name__ == name), None)
    if kind is None:
        raise ConfigError(f"{name!r} is no format; use one of: {', '.join(sorted(k.__name__ for k in _formats))}")
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"{dict(values)!r} are not the fields of {name}: {error}") from error
