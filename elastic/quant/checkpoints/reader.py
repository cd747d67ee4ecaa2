"""A reader of checkpoints made by AutoGPTQ, GPTQModel or AutoAWQ, which are not needed for it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from elastic.errors import ConfigError
from elastic.memory.checkpoint_file import Checkpoint, CheckpointFile
from elastic.quant.checkpoints.bit_unpacking import unpack, unpack_awq
from elastic.quant.checkpoints.config import read_declared
from elastic.quant.formats.integer import Integers, QuantizedMatrix

_WORDS = (torch.int32,)
_INDICES = (torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class QuantizedCheckpoint:
    """A directory with a config and safetensors files, by mmap; they must not be changed while this is in use.

    GPTQ is read in its formats `gptq` (v1) and `gptq_v2`, with act-order or without, at 8, 4 and 3 bits; AWQ in its
    format `gemm` at 4 bits. Parameters have the names that a model gives them; a model inside another (an adapter, a
    head) has longer ones than its checkpoint. Everything is checked before it is used: what is damaged, or of another
    kind, is a `ConfigError` that names the file, the tensor and what was expected.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not os.path.isdir(self.path):
            raise ConfigError(
                f"checkpoint={str(path)!r} is no directory; a quantized checkpoint is one with its config"
            )
        self._declared = read_declared(self.path)
        self.config: Integers = self._declared.integers
        """The config that all matrices are quantized to."""
        self._tensors = Checkpoint(self.path)
        names = set(self._tensors.names)
        for name in names:  # AutoAWQ scales some activations (of BLOOM, Falcon, MPT, …), for which models have no place
            if name.endswith(".scales") and f"{name.removesuffix('scales')}qweight" not in names:
                raise ConfigError(
                    f"{self.path}: {name!r} scales an activation, not a matrix, which is not supported; "
                    "quantize the model again with GPTQModel"
                )

    def codes(self, parameter: str) -> QuantizedMatrix | None:
        """Read the matrix of a parameter such as "model.layers.3.mlp.up_proj.weight"; None if it is not quantized.

        It is always [outputs, inputs]; the weight of a Conv1D (GPT-2) is the transpose of it. Scales and zeros are
        exactly those of the file. With act-order the columns come sorted by group, with their order.
        """
        module, _, name = parameter.rpartition(".")
        location = self._tensors.locate(f"{module}.qweight") if name == "weight" else None
        if location is None:
            return None
        reader = _MatrixReader(self._tensors, location[1].removesuffix("qweight"), self.config)
        if self._declared.method == "awq":
            codes = _read_awq(reader)
        else:
            codes = _read_gptq(reader, self._declared.added_to_zeros, self._declared.act_order)
        if self.config.symmetric and not bool((codes.zeros == 2 ** (self.config.bits - 1)).all()):
            raise reader.error(
                "qzeros", f"is not symmetric, as {self._declared.file} says; correct its 'sym' or format"
            )
        return codes

    def plain(self, parameter: str) -> torch.Tensor | None:
        """Map a parameter that is not quantized (norm, bias, embedding), in its own shape `[...]` and dtype.

        Returns None if the checkpoint lacks it.
        """
        location = self._tensors.locate(parameter)
        return None if location is None else _map(*location)


class _MatrixReader:
    """The tensors that one quantized matrix consists of, each checked."""

    def __init__(self, tensors: Checkpoint, prefix: str, config: Integers) -> None:
        self._tensors = tensors
        self._prefix = prefix
        self._config = config
        self.bits = config.bits

    def locate(self, suffix: str) -> tuple[CheckpointFile, str] | None:
        """Return the file of a tensor and its name there; None if there is no such tensor."""
        return self._tensors.locate(self._prefix + suffix)

    def read(self, suffix: str, dtypes: tuple[torch.dtype, ...], *shape: int | None) -> torch.Tensor:
        """Map a tensor of one of these dtypes and of this shape, `[*shape]`, None being any size above zero."""
        location = self.locate(suffix)
        if location is None:
            raise self.error("qweight", f"comes without {self._prefix + suffix!r}")
        tensor = _map(*location)
        fits = tensor.dim() == len(shape) and all(b in (None, a) for a, b in zip(tensor.shape, shape, strict=True))
        if not fits or tensor.dtype not in dtypes:
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            actual, *expected = (str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, *dtypes))
            problem = f"is {list(tensor.shape)} of {actual}, expected [{sizes}] of {' or '.join(expected)}"
            raise self.error(suffix, problem)
        return tensor

    def groups(self, inputs: int) -> int:
        """Return the number of groups that so many inputs are divided into."""
        size = self._config.inputs_per_group(inputs)
        if inputs % size:
            raise self.error("qweight", f"has {inputs} inputs, which groups of {size} do not divide")
        return inputs // size

    def scales(self, groups: int, outputs: int) -> torch.Tensor:
        """Read the scales, float32 [outputs, groups]."""
        scales = self.read("scales", _FLOATS, groups, outputs).t().float().contiguous()
        if not bool(scales.isfinite().all()):
            raise self.error("scales", "holds values that are not finite")
        return scales

    def error(self, suffix: str, problem: str) -> ConfigError:
        """Return an error about one of the tensors."""
        location = self.locate(suffix)
        file = f"{location[0].path}: " if location else ""
        return ConfigError(
            f"{file}{self._prefix + suffix!r} {problem}, at {self.bits} bits in groups of {self._config.group_size}; "
            "the checkpoint is damaged or differs from its config (settings of single modules, 'dynamic', are not read)"
        )


def _read_gptq(reader: _MatrixReader, added_to_zeros: int, act_order: bool) -> QuantizedMatrix:
    qweight = reader.read("qweight", _WORDS, None, None)
    rows, outputs = qweight.shape
    words_per_unit = 1 if 32 % reader.bits == 0 else reader.bits  # codes of 3 bits fill three words with 32 of them
    if rows % words_per_unit or outputs * reader.bits % 32:
        raise reader.error("qweight", f"is {[rows, outputs]}, which are no whole numbers of packed codes")
    inputs = rows * 32 // reader.bits
    groups = reader.groups(inputs)
    zeros = unpack(reader.read("qzeros", _WORDS, groups, outputs * reader.bits // 32), reader.bits)
    scales = reader.scales(groups, outputs)
    order = _act_order(reader, inputs, groups, act_order)
    codes = unpack(qweight.t(), reader.bits)
    if order is not None:
        codes = codes.index_select(1, order)
    return QuantizedMatrix(codes, scales, zeros.t().float().contiguous() + added_to_zeros, order)


def _read_awq(reader: _MatrixReader) -> QuantizedMatrix:
    qweight = reader.read("qweight", _WORDS, None, None)
    inputs, words = qweight.shape
    groups = reader.groups(inputs)
    zeros = unpack_awq(reader.read("qzeros", _WORDS, groups, words))
    scales = reader.scales(groups, words * 8)
    return QuantizedMatrix(unpack_awq(qweight).t().contiguous(), scales, zeros.t().float().contiguous())


def _act_order(reader: _MatrixReader, inputs: int, groups: int, act_order: bool) -> torch.Tensor | None:
    """Return the inputs sorted by group, int64 [inputs]; None if they are already."""
    if reader.locate("g_idx") is None:
        if act_order and groups > 1:
            raise reader.error("qweight", "comes without 'g_idx', which act-order (desc_act) needs")
        return None
    group_of = reader.read("g_idx", _INDICES, inputs).long()
    if not bool(((group_of >= 0) & (group_of < groups)).all()):
        raise reader.error("g_idx", f"names groups outside 0 to {groups - 1}")
    if bool((group_of.bincount(minlength=groups) != inputs // groups).any()):
        raise reader.error("g_idx", f"has groups of several sizes, expected {inputs // groups} inputs in each")
    order = group_of.argsort(stable=True)
    return None if bool((order == torch.arange(inputs)).all()) else order


def _map(file: CheckpointFile, name: str) -> torch.Tensor:
    """Map a tensor of a file. Raises `ConfigError` for one that cannot be."""
    tensor = file.tensor(name)
    if tensor is None:
        raise ConfigError(
            f"{file.path}: {name!r} cannot be mapped: it is empty, of a dtype that torch lacks, or not aligned; "
            "write the file again with safetensors"
        )
    return tensor
