"""Two ranks come to share a model: each reads its part of the files (new), or all of it, and gives half up (whole).

Prints, for each round and both ways, the seconds from the start of the fleet to the first token, and the most memory
that a rank's process had (its pages, Python and torch included), and one line of JSON. The files are in the page cache.

    python benchmarks/shares.py --layers 12 --hidden 1024 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
import transformers

from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Output, Request

MIB = 1 << 20


def main() -> None:
    """Run both ways in turn, as often as was said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, metavar="N", help="decoder layers (%(default)s)")
    parser.add_argument("--hidden", type=int, default=1024, metavar="N", help="hidden size (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each way (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        weights = save(Path(folder), options.layers, options.hidden)
        ways: dict[str, list[dict[str, float]]] = {"new": [], "whole": []}
        for number in range(options.rounds):
            for way, found in ways.items():
                found.append(begin(folder, weights, together=way == "new"))
                print(f"{number} {way}: {found[-1]}", flush=True)
    middle = {
        way: {name: round(statistics.median(each[name] for each in found), 3) for name in found[0]}
        for way, found in ways.items()
    }
    print(json.dumps({"weights_mib": weights // MIB, "rounds": options.rounds, **middle}))


def save(folder: Path, layers: int, hidden: int) -> int:
    """Save a model of random weights in float32; return the bytes of its decoder layers."""
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        eos_token_id=None,
    )
    with torch.no_grad():
        model = transformers.LlamaForCausalLM(config)
        model.save_pretrained(folder)
    return sum(parameter.nbytes for parameter in model.model.layers.parameters())


def begin(path: str, weights: int, *, together: bool) -> dict[str, float]:
    """Start two ranks, have them share all layers, and wait for a token."""
    told = threading.Event()

    def listen(output: Output) -> None:
        if output.tokens:
            told.set()

    places = [[f"cpu#{number}={weights + 256 * MIB}"] for number in range(2)]
    shared = {"tp": 2} if together else {"shards": 2}
    began_s = time.perf_counter()
    with Fleet(path, ranks=places, launch="local", beat_timeout_s=60, replace=False, **shared) as fleet:
        if not together:
            fleet.reshard(["r0", "r1"], tp=2)
        fleet.submit(Request(tuple(range(3, 19)), 4), listen)
        told.wait()
        seconds = time.perf_counter() - began_s
        peaks = [memory(rank.pid, "VmHWM") for rank in fleet.status().ranks]
        owners = fleet.look("r0").status.places[0].owners
        pages = sum(nbytes for owner, nbytes in owners.items() if owner.startswith("layer"))
    return {"seconds": round(seconds, 2), "peak_mib": max(peaks) // MIB, "weights_mib": pages // MIB}


def memory(pid: int, field: str) -> int:
    """Return a field of a process's status in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    main()
