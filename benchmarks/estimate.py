"""How well estimates from fingerprints predict the seconds of a model's steps, beside the paper's method (iServe).

    python benchmarks/estimate.py

Three random models of different kinds (llama; qwen3_moe; gemma3, of sliding and full layers), in full precision and in
variants. Fingerprints of a few layers are measured first: ours by kind of layer, at lengths that `fit_cost` chooses;
the paper's with one layer of each kind and one more, at one prompt and two outputs of one request (L2). Then the whole
model computes prompts and decode steps at other lengths, behind other contexts, at batches of 1, 2 and 8. Printed are
errors of both, and processor seconds and the largest model that each way of measuring needs. One process, so neither
shards nor stages. Targets: a mean of 4.9 % and P90 of 10 %.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from common import SEED, arguments, finish, table

from elastic.engines.continuous.chunk_profile import Mix, profile_chunks
from elastic.estimation.fingerprint import paper_fingerprints, take_layers
from elastic.estimation.model_layout import LayerKind, layout_of
from elastic.estimation.profile import engine_for, fingerprint_layers, measure_fingerprints
from elastic.planning.estimate.paper import Latency, extrapolated_latency
from elastic.planning.estimate.performance import InstanceCost
from elastic.planning.pipeline.chunk_cost import Chunk

WEIGHTS = ("full", "int8", "int4", "2:4")
PROMPT, OUTPUTS = 64, (4, 12)
"""Of the paper's requests."""
CONTEXT, STEP_TOKENS = 640, 256
HELD_OUT: tuple[Mix, ...] = (
    ((0, 90),),
    ((0, 200),),
    ((170, 120),),
    ((77, 1),),
    ((333, 1),),
    ((560, 1),),
    ((150, 1),) * 2,
    ((410, 1),) * 2,
    ((210, 1),) * 8,
    ((480, 1),) * 8,
)
LLAMA: dict[str, Any] = {
    "vocab_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}


def models(*, quick: bool) -> dict[str, Callable[[], Any]]:
    """Return makers of configs, by name."""
    layers, hidden = (4, 128) if quick else (24, 512)
    shape = {**LLAMA, "num_hidden_layers": layers, "hidden_size": hidden}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 2 * hidden, "head_dim": hidden // 8}
    types = [("full_attention" if layer % 3 == 2 else "sliding_attention") for layer in range(layers)]
    sliding = {"layer_types": types, "sliding_window": 128, "head_dim": hidden // 8}
    return {
        "llama": lambda: transformers.LlamaConfig(**shape, intermediate_size=3 * hidden),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**shape, **experts),
        "gemma3": lambda: transformers.Gemma3TextConfig(**shape, **sliding, intermediate_size=3 * hidden),
    }


def step_s(model: Any, weights: str, mixes: Sequence[Mix], rounds: int) -> list[float]:
    """Return the seconds of batches in a model, medians of the rounds."""
    with engine_for(model, weights, torch.device("cpu"), CONTEXT + STEP_TOKENS, STEP_TOKENS) as engine:
        return [sample.seconds for sample in profile_chunks(engine, mixes, rounds, SEED).whole]


def paper_latency(model: Any, kinds: Sequence[LayerKind], weights: str, rounds: int) -> Latency:
    """Return the model's TTFT and TPOT by the paper's method L2."""
    found = []
    for layers in paper_fingerprints(kinds):
        small = take_layers(model, layers)
        steps: list[Mix] = [((0, PROMPT),), *(((PROMPT + n, 1),) for n in range(max(OUTPUTS) - 1))]
        seconds = step_s(small, weights, steps, rounds)
        short, long = ((n, sum(seconds[:n])) for n in OUTPUTS)
        found.append(Latency.solve(short, long))
    names = {kind.name: len(kind.layers) for kind in kinds}
    return extrapolated_latency(found[0], dict(zip(names, found[1:], strict=True)), names)


def predicted(mix: Mix, cost: InstanceCost) -> float:
    return cost.pass_s([Chunk(str(i), start, count) for i, (start, count) in enumerate(mix)])


def compare(name: str, config: Any, weights: Sequence[str], rounds: int, most_s: float) -> list[dict[str, Any]]:
    """Measure fingerprints of one model, then the model; return a record for each form of its weights."""
    torch.manual_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    kinds = layout_of(model).kinds
    whole = sum(p.nbytes for p in model.parameters())
    records = []
    for form in weights:
        began = time.process_time()
        profile = measure_fingerprints(model, (form,), context=CONTEXT, step_tokens=STEP_TOKENS, most_s=most_s)
        ours_s, began = time.process_time() - began, time.process_time()
        paper = paper_latency(model, kinds, form, rounds)
        paper_s, began = time.process_time() - began, time.process_time()
        seconds = step_s(model, form, HELD_OUT, rounds)
        parts = [(profile.layers[kind.name, form], len(kind.layers)) for kind in kinds]
        cost = InstanceCost(((*parts, (profile.around[form], 1)),))
        pairs = list(zip(HELD_OUT, seconds, strict=True))
        by_paper = [paper.ttft_s if mix[0][1] > 1 else paper.tpot_s for mix in HELD_OUT]
        records.append(
            {
                "model": name,
                "weights": form,
                "kinds": {kind.name: [len(fingerprint_layers(kind)), len(kind.layers)] for kind in kinds},
                "model_bytes": whole,
                "ours": [predicted(mix, cost) / taken - 1 for mix, taken in pairs],
                "paper": [guess / taken - 1 for guess, (_, taken) in zip(by_paper, pairs, strict=True)],
                "seconds": seconds,
                "ours_core_s": ours_s,
                "paper_core_s": paper_s,
                "whole_core_s": time.process_time() - began,
            }
        )
    return records


def summary(errors: Sequence[float]) -> list[str]:
    off = sorted(map(abs, errors))
    return [f"{statistics.mean(off):.1%}", f"{off[int(0.9 * (len(off) - 1))]:.1%}", f"{off[-1]:.1%}"]


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    rounds, most_s = (2, 0.3) if options.quick else (7, 3.0)
    weights = WEIGHTS[:2] if options.quick else WEIGHTS
    records = []
    for name, config in models(quick=options.quick).items():
        records += compare(name, config(), weights, rounds, most_s)
    rows = [
        [r["model"], r["weights"], *summary(r["ours"]), *summary(r["paper"]), f"{r['ours_core_s']:.1f}"]
        for r in records
    ]
    rows.append(
        [
            "all",
            "",
            *(summary([e for r in records for e in r["ours"]])),
            *summary([e for r in records for e in r["paper"]]),
            "",
        ]
    )
    table(["model", "weights", "ours: mean", "P90", "most", "paper: mean", "P90", "most", "core s"], rows)
    finish("estimate", options.device, {"records": records, "held_out": HELD_OUT})


if __name__ == "__main__":
    main()
