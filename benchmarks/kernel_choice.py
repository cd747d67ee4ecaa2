"""Whether kernels are chosen alike on a quiet machine and beside processes that compute.

    python benchmarks/kernel_choice.py [--processes 3] [--threads 2] [--rounds 3]

Of six kinds of int4 matrices the kernel for each number of tokens is chosen on the machine as it is, then beside
processes that multiply with all threads. Told are the choices that differ, of all, and the seconds that they took.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch
from common import finish, table

from elastic.quant.formats.autotune import measure
from elastic.quant.formats.base import KernelTarget, MatrixShape, format_of
from elastic.quant.formats.integer import Integers
from elastic.quant.formats.kernel_table import KernelTable

CONFIG = Integers(4, 32, False)
SHAPES = ((256, 128), (128, 128), (768, 128), (128, 384), (768, 768), (2048, 2048))
BUSY = """
import torch
torch.set_num_threads({})
a, b = torch.randn(64, 512), torch.randn(512, 512)
while True:
    a @ b
"""


def choose() -> tuple[dict[tuple[int, int], dict[int, str]], float]:
    """Choose the kernels of all kinds anew; return them, and the seconds that it took."""
    target, chosen, start = KernelTarget.of(torch.device("cpu")), {}, time.perf_counter()
    for outputs, inputs in SHAPES:
        matrix = MatrixShape(outputs, inputs)
        parts = format_of(CONFIG)(CONFIG, matrix, target).quantize(torch.randn(outputs, inputs), None)
        chosen[outputs, inputs] = measure(KernelTable(), CONFIG, parts, matrix, target, torch.float32)
    return chosen, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--processes", type=int, default=3, help="that compute meanwhile")
    parser.add_argument("--threads", type=int, default=2, help="of each process, and of this one")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    choose()  # compiles kernels
    quiet, quiet_s = choose()
    command = [sys.executable, "-c", BUSY.format(options.threads)]
    others = [subprocess.Popen(command) for _ in range(options.processes)]
    try:
        time.sleep(5)
        busy = [choose() for _ in range(options.rounds)]
    finally:
        for other in others:
            other.kill()
    differ = [sum(quiet[s][n] != chosen[s][n] for s in SHAPES for n in quiet[s]) for chosen, _ in busy]
    total = sum(map(len, quiet.values()))
    rows = [["quiet", f"0 of {total}", f"{quiet_s:.2f}"]]
    rows += [["busy", f"{count} of {total}", f"{s:.2f}"] for count, (_, s) in zip(differ, busy, strict=True)]
    table(["", "choices that differ", "s"], rows)
    result = {"of": total, "differ": differ, "quiet_s": quiet_s, "busy_s": [s for _, s in busy]}
    finish("kernel_choice", "cpu", {"processes": options.processes, "threads": options.threads, **result})


if __name__ == "__main__":
    main()
