"""Linears with weights in 8, 4 and 3 bits, and pruned ones, beside float32 ones: time, error, memory.

    python benchmarks/quantized_linear.py [--device cuda:0]

For each shape and number of tokens, the path that the table chooses by measurement, and its time beside `F.linear` in
full precision (float32; on CUDA bfloat16) in the same rounds. Weights are rotated over copies of 100 MB or more, so
that they come from memory, as those of a model do. The error is that of the product with the matrix that the packed one
stands for (relative, against float64), not that of rounding or pruning. "dynamic" also admits products with activations
rounded to int8, which are not weight-only any more. Memory is a share of 16 bits a weight; pruned matrices keep the
dtype of the model, so that in float32 theirs is about 106 %, of 200 %. On a GPU, in an environment with vLLM, the
products of its Marlin kernels too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import arguments, finish, paired, ratio, show, table

from elastic.errors import BackendUnavailable
from elastic.quant.formats.autotune import measure
from elastic.quant.formats.base import Kernel, KernelTarget, MatrixShape, PackedTensors, format_of
from elastic.quant.formats.integer import Integers
from elastic.quant.formats.kernel_table import KernelTable
from elastic.quant.formats.pruned import SemiStructured, Unstructured
from elastic.quant.kernels import integer_format  # noqa: F401  (registers its format)
from elastic.quant.kernels.marlin import Marlin, MarlinFormat
from elastic.quant.pruning import sparse_format  # noqa: F401  (the same)

SHAPES = ((768, 768), (768, 2048), (2048, 2048), (4096, 4096), (4096, 11008), (11008, 4096))
TOKENS = (1, 8, 64, 512)
CONFIGS: dict[str, Any] = {
    "int8": Integers(8, -1, symmetric=True),
    "int4": Integers(4, 128),
    "int3": Integers(3, 128),
    "2:4": SemiStructured(2, 4),
    "4:8": SemiStructured(4, 8),
    "sparse50": Unstructured(0.5),
}
ON_MARLIN = {"int8, Marlin": Marlin(8, 128, symmetric=True), "int4, Marlin": Marlin(4, 128)}
ROTATED_BYTES = 100_000_000
IN_A_ROW = 20
"""Products that are timed together on a GPU: a wait for one alone takes as long as it does."""


def configs(device: str) -> dict[str, Any]:
    """Return the formats that there are products for on a device, by name."""
    if device == "cpu":
        return CONFIGS
    try:
        MarlinFormat(ON_MARLIN["int4, Marlin"], MatrixShape(64, 128), KernelTarget.of(torch.device(device))).paths({})
    except BackendUnavailable as error:
        print(f"without Marlin's kernels: {error}")
        return CONFIGS
    return CONFIGS | ON_MARLIN


class Rotated:
    """Calls a function some times, on another copy of its weights each time."""

    def __init__(self, work: Callable[[Any], Any], copies: Sequence[Any], times: int) -> None:
        self.work, self.copies, self.times, self.turn = work, copies, times, 0

    def __call__(self) -> None:
        for _ in range(self.times):
            self.turn += 1
            self.work(self.copies[self.turn % len(self.copies)])


def copies(nbytes: int) -> int:
    return max(math.ceil(ROTATED_BYTES / nbytes), 2) - 1


def clones(parts: PackedTensors) -> list[PackedTensors]:
    size = sum(part.nbytes for part in parts.values())
    return [{name: part.clone() for name, part in parts.items()} for _ in range(copies(size))]


def error(y: torch.Tensor, x: torch.Tensor, value: torch.Tensor) -> float:
    """Relative, over 64 tokens at most."""
    exact = x[:64].double() @ value.double().t()
    return float((y[:64].double() - exact).norm() / exact.norm())


@dataclass(frozen=True)
class Variant:
    """One format of one matrix, the paths that were measured, and copies to rotate."""

    name: str
    matrix: MatrixShape
    value: torch.Tensor
    paths: Mapping[str, Kernel]
    parts: list[PackedTensors]
    chosen: dict[str, dict[int, str]]
    """With dynamic products and without, as far as there are any, tokens -> path."""

    def row(self, path: str, kind: str, x: torch.Tensor) -> dict[str, Any]:
        nbytes = sum(part.nbytes for part in self.parts[0].values())
        return {
            "format": self.name,
            "shape": f"{self.matrix.inputs} -> {self.matrix.outputs}",
            "tokens": x.shape[0],
            "path": path,
            "chosen": kind,
            "error": error(self.paths[path](x, self.parts[0]), x, self.value),
            "memory_of_16_bit": nbytes / (2 * self.value.numel()),
        }


def variant(name: str, config: Any, weight: torch.Tensor, device: str) -> Variant:
    matrix = MatrixShape(*weight.shape)
    target = KernelTarget.of(torch.device(device))
    form = format_of(config)(config, matrix, target)
    parts = {key: part.to(device) for key, part in form.quantize(weight, None).items()}
    kinds = {"weight-only": config}
    if type(config) is Integers:  # there is no such product on Marlin
        kinds["dynamic"] = replace(config, dynamic=True)
    chosen = {
        kind: measure(KernelTable(), chosen, parts, matrix, target, weight.dtype, buckets=TOKENS)
        for kind, chosen in kinds.items()
    }
    return Variant(name, matrix, form.value(parts), form.paths(parts), [parts, *clones(parts)], chosen)


def compare(
    variants: list[Variant], plain: list[torch.Tensor], tokens: int, device: str, rounds: int
) -> list[dict[str, Any]]:
    """Time all chosen paths, and the full-precision linear, in the same rounds."""
    weight = plain[0]
    x = torch.randn(tokens, weight.shape[1], device=device, dtype=weight.dtype)
    count = 1 if device == "cpu" else IN_A_ROW
    works: dict[str, Any] = {"full": Rotated(partial(F.linear, x), plain, count)}
    rows = {}
    for variant_ in variants:
        for kind, chosen in variant_.chosen.items():
            key = f"{variant_.name} {chosen[tokens]}"
            works[key] = Rotated(partial(variant_.paths[chosen[tokens]], x), variant_.parts, count)
            rows.setdefault(key, variant_.row(chosen[tokens], kind, x))
    times = paired(works, device, max(3, rounds // 3) if tokens * weight.numel() > 5e8 else rounds, warmup=1)
    full = {
        "full_ms": 1e3 * statistics.median(times["full"]) / count,
        "error_full": error(F.linear(x, weight), x, weight),
    }
    for key, row in rows.items():
        row |= {"ms": 1e3 * statistics.median(times[key]) / count, "speedup": ratio(times["full"], times[key])} | full
    return list(rows.values())


def chosen_paths(rows: list[dict[str, Any]]) -> None:
    table(
        ["format", "shape", "tokens", "path", "ms", "full ms", "full / path", "error", "full's error", "memory"],
        [
            [
                row["format"],
                row["shape"],
                row["tokens"],
                row["path"],
                f"{row['ms']:.3f}",
                f"{row['full_ms']:.3f}",
                show(row["speedup"]),
                f"{row['error']:.1e}",
                f"{row['error_full']:.1e}",
                f"{row['memory_of_16_bit']:.1%}",
            ]
            for row in rows
        ],
    )


def bounds(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Check the targets, as full / path: at least 3, 2, and 1 / 2.1, or 1 / 1.1 with dynamic products."""
    ratios: Mapping[tuple[Any, ...], float] = {
        (row["format"], row["shape"], row["tokens"], row["chosen"]): row["speedup"]["median"] for row in rows
    }
    picked = {
        f"int4 {shape}, {count} tokens, {kind}": ratios.get(("int4", shape, count, kind))
        for shape in ("4096 -> 4096", "4096 -> 11008")
        for count in (1, 8, 512)
        for kind in ("weight-only", "dynamic")
    }
    return {key: value for key, value in picked.items() if value is not None}


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    rows: list[dict[str, Any]] = []
    formats = configs(options.device)
    for inputs, outputs in SHAPES[:1] if options.quick else SHAPES:
        weight = (torch.randn(outputs, inputs) / inputs**0.5).to(options.device, dtype)
        plain = [weight, *(weight.clone() for _ in range(copies(weight.nbytes)))]
        variants = [variant(name, config, weight, options.device) for name, config in formats.items()]
        for tokens in TOKENS:
            rows += compare(variants, plain, tokens, options.device, options.rounds)
    chosen_paths(rows)
    print()
    table(["full / path", "median"], [[key, f"{value:.2f}"] for key, value in bounds(rows).items()])
    finish("quantized_linear", options.device, rows)


if __name__ == "__main__":
    main()
