"""Finding the codes of matrices: reading them from checkpoints, and what the search gains over the nearest codes.

    python benchmarks/codes.py

Reading: a matrix of 4096 x 4096, groups of 128, beside a plain copy of its float16 bytes, which is what loading the
full matrix would cost. Quality: the model in the package; calibration and evaluation on different texts that it was
not trained on. Standard errors are those of the paired differences over windows of 512 tokens.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import arguments, finish, paired, seconds, table
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from elastic.assets import MODEL_DIR
from elastic.quant.checkpoints.reader import QuantizedCheckpoint
from elastic.quant.formats.awq_search import search_scales
from elastic.quant.formats.integer import Integers, QuantizedMatrix, round_to_nearest

HELD_OUT = Path(__file__).parent.parent / "training" / "heldout.txt"
WINDOW, GROUP = 512, 128
KINDS = {
    "GPTQ 4 bits": ("gptq", 4, False),
    "GPTQ 4 bits, act-order": ("gptq", 4, True),
    "GPTQ 3 bits": ("gptq", 3, False),
    "GPTQ 8 bits": ("gptq", 8, False),
    "AWQ 4 bits": ("awq", 4, False),
}


def checkpoint(folder: Path, size: int, method: str, bits: int, act_order: bool) -> QuantizedCheckpoint:
    """Write one random matrix."""
    words = partial(torch.randint, -(2**31), 2**31 - 1, dtype=torch.int32)
    group_of = torch.arange(size, dtype=torch.int32) // GROUP
    tensors = {
        "m.qweight": words((size, size // 8) if method == "awq" else (size * bits // 32, size)),
        "m.qzeros": words((size // GROUP, size * bits // 32)),
        "m.scales": torch.rand(size // GROUP, size).half(),
        "m.g_idx": group_of[torch.randperm(size)] if act_order else group_of,
    }
    save_file(tensors, folder / "model.safetensors")
    config = {"quant_method": method, "bits": bits, "group_size": GROUP}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return QuantizedCheckpoint(folder)


def reading(size: int, rounds: int) -> dict[str, float]:
    """Milliseconds."""
    full = torch.rand(size, size).half()
    with tempfile.TemporaryDirectory() as root:
        works: dict[str, Callable[[], Any]] = {"copy of float16": full.clone}
        for i, (name, kind) in enumerate(KINDS.items()):
            (folder := Path(root) / str(i)).mkdir()
            works[name] = partial(checkpoint(folder, size, *kind).codes, "m.weight")
        times = paired(works, "cpu", rounds)
    return {name: 1e3 * statistics.median(took) for name, took in times.items()}


def losses(model: Any, windows: torch.Tensor) -> torch.Tensor:
    """Nats per token of each window."""
    return torch.stack([F.cross_entropy(model(w[None], use_cache=False).logits[0, :-1], w[1:]) for w in windows])


def captured(model: Any, windows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Collect the inputs of every matrix of the decoder layers, [tokens, inputs]."""
    samples: dict[str, list[torch.Tensor]] = {}
    hooks = []
    for name, module in model.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            rows = samples.setdefault(name, [])
            hooks.append(
                module.register_forward_pre_hook(lambda _, args, rows=rows: rows.append(args[0].flatten(0, 1)))
            )
    losses(model, windows)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(rows) for name, rows in samples.items()}


def quality(quick: bool) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(MODEL_DIR)(HELD_OUT.read_text(), return_tensors="pt").input_ids[0]
    windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    calibration, evaluation = windows[:8], windows[8 : 16 if quick else None]
    inputs = captured(model, calibration)
    weights = {name: model.model.layers.get_submodule(name).weight.data for name in inputs}

    def loss_with(codes: Callable[[str], QuantizedMatrix]) -> torch.Tensor:
        for name in weights:
            model.model.layers.get_submodule(name).weight.data = codes(name).value()
        return losses(model, evaluation)

    full = losses(model, evaluation)
    results: dict[str, Any] = {"full precision": float(full.mean()), "windows": len(evaluation)}
    for config in [Integers(b, g, s) for b in (4, 3) for g in (128, 32) for s in (False, True)][: 1 if quick else None]:
        nearest = loss_with(lambda name, c=config: round_to_nearest(weights[name], c))
        searched = loss_with(lambda name, c=config: search_scales(weights[name], inputs[name], c))
        gain = nearest - searched
        results[f"{config.bits} bits, groups of {config.group_size}{', symmetric' * config.symmetric}"] = {
            "nearest": float((nearest - full).mean()),
            "searched": float((searched - full).mean()),
            "gain": float(gain.mean()),
            "standard error": float(gain.std() / len(gain) ** 0.5),
        }
    return results


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    size = 512 if options.quick else 4096
    milliseconds = reading(size, options.rounds)
    table(["reading", "ms"], [[name, f"{took:.1f}"] for name, took in milliseconds.items()])
    weight, sample = torch.randn(size, size), torch.randn(512, size)
    search = min(seconds(lambda: search_scales(weight, sample, Integers(4)), "cpu") for _ in range(3))
    print(f"\nsearch, {size} x {size}: {search:.1f} s")
    losses = quality(options.quick)
    print(f"\nloss above that of full precision, {losses['full precision']:.4f}")
    rows = [(name, row) for name, row in losses.items() if isinstance(row, dict)]
    cells = [[name, *(f"{value:.4f}" for value in row.values())] for name, row in rows]
    table(["", "nearest", "searched", "gain", "standard error"], cells)
    finish("codes", options.device, {"reading_ms": milliseconds, "search_s": search, "quality": losses})


if __name__ == "__main__":
    main()
