"""The feed-forward networks of a decoder layer, found by the model's tensor-parallel plan or by their shapes.

A dense network is a module with one matrix, or two, from the hidden size to a size inside, and one back from it:
between them, elements are taken one by one. A plan names them ("colwise", "rowwise"); without one they must be the only
matrices of their module, and share one dimension. Experts are parameters of three dimensions, of which the first is
their number and another the hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from elastic.errors import ConfigError

Shape = tuple[int, ...]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_INNER, _OUTER = ("colwise", "packed_colwise"), ("rowwise",)
_FUSED_INNER, _FUSED_OUTER = "colwise_gather_output", "rowwise_split_input"


@dataclass(frozen=True)
class FFN:
    """A network that can be cut."""

    module: str
    kind: Literal["dense", "experts"]
    source: Literal["plan", "structure"]
    rows: int
    """The size inside, or the number of experts."""
    dims: Mapping[str, int]
    """By parameter, the dimension that holds the rows; where it is twice as large, two matrices are fused."""
    summed: str
    once: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Matrix:
    """The weight of a linear module."""

    module: str
    output_dim: int
    outputs: int
    inputs: int
    style: str


def tp_styles(tp_plan: Mapping[str, str] | None, layer: str, names: Iterable[str]) -> dict[str, str]:
    """Return the styles that a plan gives to modules and parameters of a layer, by name within it.

    `tp_plan` is transformers' `base_model_tp_plan`, `layer` the layer's name in any model around the one that the plan
    is of ("model.layers.3"), `names` are those of its parameters. In a plan, `*` stands for any number.
    """
    path = _NUMBER.sub("*", layer).split(".")
    prefixes = [".".join(path[first:]) for first in range(len(path))]
    by_name = {}
    for name in names:
        for key in filter(None, (name, name.rpartition(".")[0])):
            styles = ((tp_plan or {}).get(f"{prefix}.{_NUMBER.sub('*', key)}") for prefix in prefixes)
            style = next((style for style in styles if style is not None), None)
            if style is not None:
                by_name[key] = style
    return by_name


def find_ffns(
    shapes: Mapping[str, Shape], hidden: int, styles: Mapping[str, str], transposed: Collection[str]
) -> tuple[FFN, ...]:
    """Find all that a layer has, outside of attention.

    Raises `ConfigError` in words where there is none, and where one might be something else.
    """
    own = {name: shape for name, shape in shapes.items() if not _ATTENTION.search(name.rpartition(".")[0])}
    matrices: dict[str, list[_Matrix]] = {}
    tensors: dict[str, list[str]] = {}
    for name, shape in own.items():
        module, _, parameter = name.rpartition(".")
        if parameter == "weight" and len(shape) == 2:
            dim = int(module in transposed)
            matrix = _Matrix(module, dim, shape[dim], shape[1 - dim], styles.get(module, ""))
            matrices.setdefault(module.rpartition(".")[0], []).append(matrix)
        elif parameter not in ("weight", "bias") and len(shape) == 3:
            tensors.setdefault(module, []).append(name)
    experts = [_experts(module, candidates, own, hidden, styles) for module, candidates in tensors.items()]
    planned = any(name in styles for name in (*own, *(name.rpartition(".")[0] for name in own)))
    pairs = {
        module: _by_plan(candidates) if planned else _by_shapes(candidates, hidden)
        for module, candidates in matrices.items()
    }
    if not planned and sum(pair is not None for pair in pairs.values()) > 1:
        names = ", ".join(module or "the layer itself" for module, pair in pairs.items() if pair)
        raise ConfigError(f"{names} all look like feed-forward networks; give a tensor-parallel plan that names them")
    dense = [_dense(module, *pair, own, planned=planned) for module, pair in pairs.items() if pair is not None]
    ffns = (*dense, *(ffn for ffn in experts if ffn is not None))
    if not ffns:
        there = ", ".join(f"{name} {list(shape)}" for name, shape in own.items() if len(shape) > 1) or "none"
        raise ConfigError(
            "no feed-forward network can be cut: looked for a module with one or two matrices to a size inside and one "
            f"back, and for experts of three dimensions, among {there}"
        )
    return ffns


def _dense(module: str, inner: Sequence[_Matrix], outer: _Matrix, shapes: Mapping[str, Shape], *, planned: bool) -> FFN:
    """Make a dense network of the matrices to its inside and the one back."""
    rows = outer.inputs
    dims = {f"{matrix.module}.weight": matrix.output_dim for matrix in inner}
    dims[f"{outer.module}.weight"] = 1 - outer.output_dim
    for matrix in inner:
        if matrix.outputs not in (rows, 2 * rows):
            raise ConfigError(
                f"{matrix.module} has {matrix.outputs} outputs and {outer.module} {rows} inputs; a network that is cut "
                "has as many, or twice as many where two matrices are fused"
            )
        if f"{matrix.module}.bias" in shapes:
            dims[f"{matrix.module}.bias"] = 0
    once = tuple(name for name in (f"{outer.module}.bias",) if name in shapes)
    _require_elementwise(module, rows, {*dims, *once}, shapes)
    return FFN(module, "dense", "plan" if planned else "structure", rows, dims, outer.module, once)


def _by_plan(matrices: Sequence[_Matrix]) -> tuple[list[_Matrix], _Matrix] | None:
    """Return the matrices to and from the size inside that a plan names.

    A fused one is gathered in plans ("colwise_gather_output"), for a run of its rows is not a part of both halves; with
    other sizes, matrices of that style stay whole.
    """
    inner = [matrix for matrix in matrices if matrix.style in _INNER]
    outer = [matrix for matrix in matrices if matrix.style in _OUTER]
    if not inner and not outer:
        outer = [matrix for matrix in matrices if matrix.style == _FUSED_OUTER]
        inner = [m for m in matrices if m.style == _FUSED_INNER and outer and m.outputs == 2 * outer[0].inputs]
    if not inner or not outer:
        return None
    if len(outer) > 1 or len(inner) > 2:
        names = ", ".join(matrix.module for matrix in (*inner, *outer))
        raise ConfigError(f"the plan cuts {names} together; a network has one or two matrices to its inside, one back")
    return inner, outer[0]


def _by_shapes(matrices: Sequence[_Matrix], hidden: int) -> tuple[list[_Matrix], _Matrix] | None:
    """Return the matrices to and from the size inside, if the module has no others and they share one dimension."""
    if len(matrices) not in (2, 3):
        return None
    pairs = []
    for outer in (matrix for matrix in matrices if matrix.outputs == hidden):
        inner = [matrix for matrix in matrices if matrix is not outer]
        if all((m.outputs, m.inputs) == (outer.inputs, hidden) for m in inner):
            pairs.append((inner, outer))
        elif len(inner) == 1 and (inner[0].outputs, inner[0].inputs) == (2 * outer.inputs, hidden):
            raise ConfigError(
                f"{inner[0].module} seems to hold two matrices in one; how they lie in it cannot be seen from shapes. "
                "Give a tensor-parallel plan that says so"
            )
    if len(pairs) > 1:
        names = ", ".join(outer.module for _, outer in pairs)
        raise ConfigError(f"any of {names} may be the last of its network; give a tensor-parallel plan that says which")
    return pairs[0] if pairs else None


def _experts(
    module: str, names: Sequence[str], shapes: Mapping[str, Shape], hidden: int, styles: Mapping[str, str]
) -> FFN | None:
    """Recognize experts: two parameters or more of three dimensions in one module, and all else that they have."""
    count = shapes[names[0]][0]
    if len(names) < 2 or any(shapes[name][0] != count or hidden not in shapes[name][1:] for name in names):
        return None
    own = {name: shape for name, shape in shapes.items() if name.rpartition(".")[0] == module}
    odd = [name for name, shape in own.items() if shape[0] != count]
    if odd:
        raise ConfigError(
            f"{module} has {count} experts, and {odd[0]} of shape {own[odd[0]]}; it cannot be cut by them"
        )
    planned = module in styles or any(name in styles for name in names)
    return FFN(module, "experts", "plan" if planned else "structure", count, dict.fromkeys(own, 0), module)


def _require_elementwise(module: str, rows: int, divided: Collection[str], shapes: Mapping[str, Shape]) -> None:
    """Raise `ConfigError` if the module has another parameter of the size inside: a norm there is over all parts."""
    depth = module.count(".") + 2 if module else 1
    for name, shape in shapes.items():
        direct = name.startswith(f"{module}." if module else "") and name.count(".") <= depth
        if direct and name not in divided and shape == (rows,):
            raise ConfigError(
                f"{name} has the {rows} elements of the size inside, too; what is done with it may need all parts"
            )
