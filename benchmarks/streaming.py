"""A model that is twice as large as its budget: tokens per second, beside the copy limit and, on CUDA, accelerate.

    python benchmarks/streaming.py [--device cuda:0]

The copy limit is what the links allow: for each token every absent layer is copied once, at the rate of a plain copy of
one layer in the same run. Peer on CUDA: accelerate's `cpu_offload`, which copies every layer of the model for each
token. On a CPU it copies nothing, so there is no peer there.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from common import CACHE, arguments, finish, paired, ratio, returned_cache, seconds, show, table, twin
from transformers import LlamaConfig, LlamaForCausalLM

import elastic
from elastic.memory.copy_engine import copy

TOKENS = 8


def big_model(device: str, quick: bool) -> Any:
    on_cpu, small = device == "cpu" or quick, device == "cpu" and quick
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=512 if small else 1024 if on_cpu else 4096,
        intermediate_size=1376 if small else 2752 if on_cpu else 11008,
        num_hidden_layers=8 if quick and not small else 16,
        num_attention_heads=16 if on_cpu else 32,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return (
            LlamaForCausalLM(config)
            .to(torch.float32 if device == "cpu" else torch.bfloat16)
            .eval()
            .requires_grad_(False)
        )


def decode(model: Any, device: str) -> None:
    token = torch.ones(1, 1, dtype=torch.long, device=device)
    cache = returned_cache(model(token.repeat(1, 16)))
    for _ in range(TOKENS - 1):
        cache = returned_cache(model(token, **{CACHE: cache}))


def plain_copy_s(runtime: Any, device: str, rounds: int) -> float:
    """Seconds of a plain copy of one layer from the host store into mapped memory."""
    layer = next(w for w in runtime.weights.layers if w.absent)
    sources = [layer.host_copies[name].tensor for name in layer.slots]
    targets = [torch.empty_like(source, device=device) for source in sources]

    def work() -> None:
        for target, source in zip(targets, sources, strict=True):
            copy(target, source)

    return statistics.median([seconds(work, device) for _ in range(rounds + 2)][2:])


def offloaded(model: Any, device: str) -> Any:
    """accelerate's offloading of the same model."""
    from accelerate import cpu_offload

    other = twin(model).to("cpu")
    return cpu_offload(other, execution_device=torch.device(device))


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    device = options.device
    model = big_model(device, options.quick)
    nbytes = sum(p.nbytes for p in model.parameters())
    works = {"resident": lambda: decode(resident, device), "streamed": lambda: decode(model, device)}
    resident = twin(model)
    if device != "cpu":
        peer = offloaded(model, device)
        works["cpu_offload"] = lambda: decode(peer, device)
    page_bytes = 4096 if options.quick and device == "cpu" else None  # each head of KV takes pages of its own
    elastic.wrap(model, places=[elastic.Place(device, torch.device(device), nbytes // 2, page_bytes)])
    if options.quick and device != "cpu":  # what is left beside small layers is too little for large pages of KV
        model.elastic.release(range(len(model.elastic.weights.layers)))
    absent = sum(layer.absent is not None for layer in model.elastic.weights.layers)
    times = paired(works, device, options.rounds)
    per_layer = plain_copy_s(model.elastic, device, options.rounds)
    limit = [t + TOKENS * absent * per_layer for t in times["resident"]]
    overlapped = [max(t, TOKENS * absent * per_layer) for t in times["resident"]]
    results: dict[str, Any] = {
        "model_bytes": nbytes,
        "budget_bytes": nbytes // 2,
        "layers": len(model.elastic.weights.layers),
        "absent": absent,
        "copy_gb_s": model.elastic.weights.layers[0].nbytes / 1e9 / per_layer,
        "tokens_per_s": {key: TOKENS / statistics.median(value) for key, value in times.items()},
        "time_over_copy_then_compute": ratio(times["streamed"], limit),
        "time_over_overlapped_limit": ratio(times["streamed"], overlapped),
    }
    if "cpu_offload" in times:
        results["speed_over_cpu_offload"] = ratio(times["cpu_offload"], times["streamed"])
    elastic.unwrap(model)
    table(
        [
            "layers absent",
            "copy GB/s",
            *(f"{key} tok/s" for key in times),
            "time / (copy + compute)",
            "time / max",
        ],
        [
            [
                f"{absent} of {results['layers']}",
                f"{results['copy_gb_s']:.1f}",
                *(f"{value:.2f}" for value in results["tokens_per_s"].values()),
                show(results["time_over_copy_then_compute"]),
                show(results["time_over_overlapped_limit"]),
            ]
        ],
    )
    finish("streaming", device, results)


if __name__ == "__main__":
    main()
