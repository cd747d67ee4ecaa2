"""Products with matrices that are too small to be packed: torch's, oneDNN's with a packed matrix, and the kernel's.

    python benchmarks/small_products.py [--threads 1] [--rounds 60]

The 48 matrices of the 2.6M model's layers, float32, one after another, as a step has them; the caches hold others'
bytes before each round, and who goes first is drawn. Ratios are to torch's product, paired by round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import SEED, finish, ratio, show, table

from elastic.weights.prepacked import onednn
from elastic.weights.prepacked.small_linear import is_small, small_linear

SHAPES = [(256, 128), (128, 128), (768, 128), (128, 384)] * 12
TOKENS = (1, 4, 16, 64, 512)
OTHERS_BYTES = 24 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    random.seed(SEED)
    torch.set_grad_enabled(False)
    weights, others = [torch.randn(shape) for shape in SHAPES], torch.randn(OTHERS_BYTES // 4)
    assert all(map(is_small, weights)), "there is no kernel on this machine"
    layouts = [onednn.find_layout(shape, torch.float32) for shape in SHAPES]
    assert all(layouts), "this build of torch packs no matrices"
    packed = [layout.pack(weight) for layout, weight in zip(layouts, weights, strict=True) if layout]
    views = [layout.view(memory) for layout, memory in zip(layouts, packed, strict=True) if layout]
    kinds: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = {
        "torch": (F.linear, weights),
        "oneDNN, packed": (onednn.multiply, views),
        "kernel": (small_linear, weights),
    }
    rows, results = [], {}
    for tokens in TOKENS:
        inputs = [torch.randn(tokens, shape[1]) for shape in SHAPES]
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(options.rounds + 3):
            for kind in random.sample(list(kinds), len(kinds)):
                product, matrices = kinds[kind]
                others.sum()
                began_s = time.perf_counter()
                for x, matrix in zip(inputs, matrices, strict=True):
                    product(x, matrix, None)
                if turn >= 3:
                    seconds[kind].append(time.perf_counter() - began_s)
        medians = {kind: statistics.median(taken) * 1e6 for kind, taken in seconds.items()}
        ratios = {kind: ratio(taken, seconds["torch"]) for kind, taken in seconds.items()}
        rows.append([tokens, *(f"{medians[kind]:.0f} us, {show(ratios[kind])}" for kind in kinds)])
        results[str(tokens)] = {"us": medians, "of_torch": ratios}
    table(["tokens", *kinds], rows)
    finish("small_products", "cpu", {"threads": options.threads, "products": len(SHAPES), **results})


if __name__ == "__main__":
    main()
