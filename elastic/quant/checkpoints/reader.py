"""Matrices from checkpoints that AutoGPTQ, GPTQModel or AutoAWQ made; none of these is needed to read them."""

from __future__ import annotations

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
        if not self.path.is_dir():
            raise ConfigError(
                f"checkpoint={str(path)!r} is no directory; a quantized checkpoint is one with its config"
            )
        self._declared = read_declared(self.path)
        self._tensors = Checkpoint(self.path)
        self._check_names()

    @property
    def config(self) -> Integers:
        """What all matrices are quantized to."""
        return self._declared.integers

    def codes(self, parameter: str) -> QuantizedMatrix | None:
        """The matrix of a parameter such as "model.layers.3.mlp.up_proj.weight"; None if it is not quantized here.

        It is always [outputs, inputs]; the weight of a Conv1D (GPT-2) is the transpose of it. Scales and zeros are
        exactly those of the file. With act-order the columns come sorted by group, with their order.
        """
        module, _, name = parameter.rpartition(".")
        found = self._tensors.locate(f"{module}.qweight") if name == "weight" else None
        if found is None:
            return None
        reader = _Reader(self._tensors, found[1].removesuffix("qweight"), self.config)
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
        """What is not quantized (norms, biases, embeddings), over the mapped file; None if the checkpoint lacks it."""
        found = self._tensors.locate(parameter)
        return None if found is None else _mapped(*found)

    def _check_names(self) -> None:
        """AutoAWQ scales some activations (of BLOOM, Falcon, MPT, …), for which models have no place."""
        names = set(self._tensors.names)
        for name in names:
            if name.endswith(".scales") and f"{name.removesuffix('scales')}qweight" not in names:
                raise ConfigError(
                    f"{self.path}: {name!r} scales an activation, not a matrix, which is not supported; "
                    "quantize the model again with GPTQModel"
                )


class _Reader:
    """The tensors that one quantized matrix consists of, each checked."""

    def __init__(self, tensors: Checkpoint, prefix: str, config: Integers) -> None:
        self._tensors = tensors
        self._prefix = prefix
        self.bits = config.bits
        self._group_size = config.group_size

    def has(self, part: str) -> bool:
        return self._tensors.locate(self._prefix + part) is not None

    def read(self, part: str, dtypes: tuple[torch.dtype, ...], *shape: int | None) -> torch.Tensor:
        """A tensor of one of these dtypes and of this shape, None being any size above zero."""
        found = self._tensors.locate(self._prefix + part)
        if found is None:
            raise self.error("qweight", f"comes without {self._prefix + part!r}")
        tensor = _mapped(*found)
        fits = tensor.dim() == len(shape) and all(b in (None, a) for a, b in zip(tensor.shape, shape, strict=True))
        if not fits or tensor.dtype not in dtypes:
            expected = f"[{', '.join('any' if n is None else str(n) for n in shape)}] of {_words(dtypes)}"
            raise self.error(part, f"is {list(tensor.shape)} of {_words((tensor.dtype,))}, expected {expected}")
        return tensor

    def size(self, inputs: int) -> int:
        """How many inputs share a scale."""
        size = inputs if self._group_size == -1 else self._group_size
        if inputs % size:
            raise self.error("qweight", f"has {inputs} inputs, which groups of {size} do not divide")
        return size

    def scales(self, groups: int, outputs: int) -> torch.Tensor:
        """float32 [outputs, groups]."""
        scales = self.read("scales", _FLOATS, groups, outputs).t().float().contiguous()
        if not bool(scales.isfinite().all()):
            raise self.error("scales", "holds values that are not finite")
        return scales

    def error(self, part: str, what: str) -> ConfigError:
        found = self._tensors.locate(self._prefix + part)
        where = f"{found[0].path}: " if found else ""
        return ConfigError(
            f"{where}{self._prefix + part!r} {what}, at {self.bits} bits in groups of {self._group_size}; "
            "the checkpoint is damaged or differs from its config (settings of single modules, 'dynamic', are not read)"
        )


def _read_gptq(reader: _Reader, added_to_zeros: int, act_order: bool) -> QuantizedMatrix:
    qweight = reader.read("qweight", _WORDS, None, None)
    rows, outputs = qweight.shape
    if rows % _words_per_unit(reader.bits) or outputs * reader.bits % 32:
        raise reader.error("qweight", f"is {[rows, outputs]}, which are no whole numbers of packed codes")
    inputs = rows * 32 // reader.bits
    groups = inputs // reader.size(inputs)
    zeros = unpack(reader.read("qzeros", _WORDS, groups, outputs * reader.bits // 32), reader.bits)
    scales = reader.scales(groups, outputs)
    order = _order(reader, inputs, groups, act_order)
    codes = unpack(qweight.t(), reader.bits)
    if order is not None:
        codes = codes.index_select(1, order)
    return QuantizedMatrix(codes, scales, zeros.t().float().contiguous() + added_to_zeros, order)


def _read_awq(reader: _Reader) -> QuantizedMatrix:
    qweight = reader.read("qweight", _WORDS, None, None)
    inputs, words = qweight.shape
    groups = inputs // reader.size(inputs)
    zeros = unpack_awq(reader.read("qzeros", _WORDS, groups, words))
    scales = reader.scales(groups, words * 8)
    return QuantizedMatrix(unpack_awq(qweight).t().contiguous(), scales, zeros.t().float().contiguous())


def _order(reader: _Reader, inputs: int, groups: int, act_order: bool) -> torch.Tensor | None:
    """The inputs sorted by group; None if they are already."""
    if not reader.has("g_idx"):
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


def _words_per_unit(bits: int) -> int:
    """Codes of 3 bits fill three words with 32 of them; others fill one."""
    return 1 if 32 % bits == 0 else bits


def _mapped(file: CheckpointFile, name: str) -> torch.Tensor:
    tensor = file.tensor(name)
    if tensor is None:
        raise ConfigError(
            f"{file.path}: {name!r} cannot be mapped: it is empty, of a dtype that torch lacks, or not aligned; "
            "write the file again with safetensors"
        )
    return tensor


def _words(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
