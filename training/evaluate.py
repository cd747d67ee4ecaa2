"""Measure the trained model on text it has not seen: bits per byte against `xz -9`, and what int4 costs it.

    python training/evaluate.py elastic/assets/stdlib-2.6m

Prints a table, and one JSON line last; writes it to evaluation.json beside the model.
"""

from __future__ import annotations

import argparse
import copy
import json
import lzma
import math
import pathlib

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HELD_OUT = pathlib.Path(__file__).with_name("heldout.txt")
END = "<|endoftext|>"
CONTEXT, STRIDE = 1024, 512
INT4_GROUP = 128


def held_out_texts() -> list[str]:
    return HELD_OUT.read_text(encoding="utf-8").split(END)


@torch.inference_mode()
def nats(model, ids: list[int]) -> float:
    """The negative log-likelihood of `ids` after an end-of-text token, in windows that overlap by half."""
    tokens, total, done = torch.tensor([[0, *ids]]), 0.0, 1
    for start in range(0, tokens.shape[1], STRIDE):
        window = tokens[:, start : start + CONTEXT]
        new = start + window.shape[1] - done
        if new <= 0:
            break
        logits = model(window, use_cache=False).logits[0, -new - 1 : -1].float()
        total += torch.nn.functional.cross_entropy(logits, window[0, -new:], reduction="sum").item()
        done += new
    return total


def round_to_int4(weight: torch.Tensor, group: int = INT4_GROUP) -> torch.Tensor:
    """Symmetric round-to-nearest in groups along the input dimension."""
    grouped = weight.reshape(-1, min(group, weight.shape[1]))
    scale = grouped.abs().amax(dim=1, keepdim=True).clamp(min=1e-9) / 7
    return ((grouped / scale).round().clamp(-8, 7) * scale).reshape(weight.shape)


def quantized(model):
    """A copy of the model with every matrix of every decoder layer in int4."""
    copied = copy.deepcopy(model)
    for name, parameter in copied.named_parameters():
        if ".layers." in name and parameter.ndim == 2:
            parameter.data = round_to_int4(parameter.data)
    return copied


def bootstrap_error(rises: torch.Tensor, sizes: torch.Tensor, rounds: int = 2000, seed: int = 0) -> float:
    """The standard error of the mean rise per byte, resampling whole texts."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(rises), (rounds, len(rises)), generator=generator)
    return (rises[picks].sum(1) / sizes[picks].sum(1)).std().item()


def measure(path: pathlib.Path, texts: list[str]) -> list[dict[str, float]]:
    """Of each text: its bytes, and the bits that the model needs for it, in full and in int4."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    int4 = quantized(model)
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return [
        {
            "bytes": len(text.encode()),
            "bits": nats(model, ids) / math.log(2),
            "int4_bits": nats(int4, ids) / math.log(2),
        }
        for text, ids in zip(texts, encoded, strict=True)
    ]


def summarize(measured: list[dict[str, float]]) -> dict[str, float]:
    """All figures, of what was measured of all held-out texts. Losses are bits per byte."""
    raw = "".join(held_out_texts()).encode()
    sizes, plain, rounded = (torch.tensor([float(text[name]) for text in measured]) for name in measured[0])
    xz = 8 * len(lzma.compress(raw, preset=9)) / len(raw)
    bits = (plain.sum() / sizes.sum()).item()
    error = bootstrap_error(rounded - plain, sizes)
    rise = ((rounded - plain).sum() / sizes.sum()).item()
    return {
        "held_out_bytes": len(raw),
        "held_out_texts": len(measured),
        "bits_per_byte": bits,
        "xz_bits_per_byte": xz,
        "share_of_xz": bits / xz,
        "int4_rise_bits_per_byte": rise,
        "int4_rise_standard_error": error,
        "int4_rise_in_errors": rise / error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path)
    path = parser.parse_args().model
    texts = measure(path, held_out_texts())
    figures = summarize(texts)
    for name, value in figures.items():
        print(f"{name:28} {value:.4f}" if isinstance(value, float) else f"{name:28} {value}")
    (path / "evaluation.json").write_text(json.dumps({**figures, "texts": texts}, indent=2) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
