"""Products of full matrices in oneDNN's order, as they lie in pages inside vLLM, against plain ones.

    python benchmarks/prepacked.py [--threads 1] [--rounds 5]

The time of plain products / that of packed ones, by rows; every product with another copy of the matrix, 64 MB of them
in turn. Beside it, the bytes per second of packing, which is done once, when the engine starts.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from common import finish, table

from elastic.weights.prepacked.choice import ROWS, packed_time_ratios
from elastic.weights.prepacked.onednn import find_layout

SHAPES = ((128, 128), (256, 128), (768, 128), (128, 384), (768, 768), (1280, 768), (4096, 768), (768, 2048))
"""Outputs, inputs: of the 2.6M model, then of the 100M one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows, results = [], {}
    for shape in SHAPES:
        layout = find_layout(shape, torch.float32)
        if layout is None:
            continue
        rounds = [packed_time_ratios(layout) for _ in range(options.rounds)]
        gains = {count: sorted(1 / of_round[i] for of_round in rounds) for i, count in enumerate(ROWS)}
        weight, start = torch.randn(shape), time.perf_counter()
        layout.pack(weight)
        packed = weight.nbytes / (time.perf_counter() - start) / 1e9
        figures = {str(n): {"median": statistics.median(g), "least": g[0], "most": g[-1]} for n, g in gains.items()}
        results["x".join(map(str, shape))] = {**figures, "pack GB/s": packed}
        spread = [f"{f['median']:.2f} [{f['least']:.2f}, {f['most']:.2f}]" for f in figures.values()]
        rows.append(["x".join(map(str, shape)), *spread, f"{packed:.2f}"])
    table(["outputs x inputs", *(f"{count} rows" for count in ROWS), "pack GB/s"], rows)
    finish("prepacked", "cpu", {"threads": options.threads, **results})


if __name__ == "__main__":
    main()
