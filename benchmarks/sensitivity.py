"""The sensitivity order: what it is worth on held-out text, and what finding it costs.

    python benchmarks/sensitivity.py

Quality: the trained model with 0, 1 ... 12 layers rounded to int4 or int3, in the order by LIS and in others. Scores
are measured on 2,048 tokens of files that the model was trained on, losses on the beginning of held-out ones. Intervals
are of paired differences: texts and, for random orders, seeds are resampled.

Cost: the search as it is, with less reuse, and lazy, beside one that passes through the whole model for each
candidate; all must find the same order. Runs of single layers are counted too.
"""

from __future__ import annotations

import functools
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import correlation
from typing import Any

import torch
from common import arguments, finish, paired, ratio, show, table
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import elastic
from elastic.assets import MODEL_DIR
from elastic.profiling import token_ids
from elastic.quant.sensitivity.evaluate import nats, prefixes, score_sets
from elastic.quant.sensitivity.fake_quant import dequantized_layer
from elastic.quant.sensitivity.layer_trace import LayerTrace
from elastic.quant.sensitivity.order import RULES, order, random_order
from elastic.quant.sensitivity.profile_file import ProfileSettings
from elastic.quant.sensitivity.scores import cosine, measure
from elastic.quant.variants.variant import DEFAULTS
from elastic.weights.decoder import find_decoder

ROOT = Path(__file__).parent.parent
SEEDS = 10
FILES, WINDOW, WINDOWS_PER_TEXT = 8, 512, 1
TERMS = {"LTS alone": (1, 0, 0), "LRS alone": (0, 1, 0), "MDS alone": (0, 0, 1)}
Orders = dict[str, tuple[int, ...]]


def texts() -> tuple[list[str], list[str]]:
    """Calibration text, which the model was trained on, and held-out text."""
    sys.path.append(str(ROOT))
    from training.evaluate import held_out_texts
    from training.train import corpus

    return random.Random(0).sample(corpus()[0], FILES), held_out_texts()


def held_out_windows(held_out: list[str], tokenizer: Any) -> tuple[torch.Tensor, list[int]]:
    """Token ids [windows, tokens], and which text each is from."""
    windows, origin = [], []
    for number, text in enumerate(held_out):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for start in range(0, min(len(ids) - WINDOW, WINDOWS_PER_TEXT * WINDOW), WINDOW):
            windows.append(ids[start : start + WINDOW])
            origin.append(number)
    return torch.tensor(windows), origin


def orders_for(variant: str, model: Any, tokenizer: Any, calibration: list[str]) -> tuple[elastic.Profile, Orders]:
    """Return the profile, and the orders to compare."""
    layers = len(find_decoder(model).layers)
    profile = functools.partial(elastic.profile, model, calibration, tokenizer=tokenizer, variant=variant)
    whole = profile()
    found = whole.order
    orders = {"LIS": found, "reverse": found[::-1], **{rule: order(rule, layers) for rule in RULES}}
    for name, (alpha1, alpha2, beta) in TERMS.items():
        orders[name] = profile(alpha1=alpha1, alpha2=alpha2, beta=beta, lazy=True).order
    last = found[-1]
    for seed in range(SEEDS):
        drawn = random_order(layers, seed)
        orders[f"random {seed}"] = drawn
        orders[f"random, {last} last {seed}"] = (*(p for p in drawn if p != last), last)
    return whole, orders


Curves = dict[str, dict[str, torch.Tensor]]


def curves(variant: str, model: Any, windows: torch.Tensor, orders: Orders) -> tuple[Curves, list[float]]:
    """For each order the rise in nats and the top-1 agreement, [layers swapped, windows]; the rise of single layers."""
    layers = find_decoder(model).layers
    singles = [frozenset([p]) for p in range(len(layers))]
    sets = {s for o in orders.values() for s in prefixes(o)} | set(singles)
    quantize = functools.cache(lambda i: dequantized_layer(layers[i], DEFAULTS[variant]))
    parts = []
    for ids in windows.split(2):
        trace = LayerTrace(model, layers, ids)
        best = trace.logits.argmax(-1)

        def score(logits: torch.Tensor, ids: Any = ids, best: Any = best) -> torch.Tensor:
            return torch.stack([nats(logits, ids), (logits.argmax(-1) == best).double().mean(1)])

        parts.append(score_sets(trace, layers, quantize, sets, score))
    whole = {s: torch.cat([part[s] for part in parts], dim=1) for s in sets}
    plain = whole[frozenset()][0]
    by_order = {
        name: {
            "nats": torch.stack([whole[s][0] - plain for s in prefixes(o)]),
            "agreement": torch.stack([whole[s][1] for s in prefixes(o)]),
        }
        for name, o in orders.items()
    }
    return by_order, [(whole[s][0] - plain).mean().item() for s in singles]


def terms_of(profile: elastic.Profile, rises: list[float]) -> dict[str, Any]:
    """Return for each term of LIS its weighted spread over the layers, and its rank correlation with loss."""
    setting, first, last = profile.setting, profile.rounds[0].mds, profile.order[-1]
    terms = {
        "LTS": [setting.alpha1 * x for x in profile.lts],
        "LRS": [setting.alpha2 * x for x in profile.lrs],
        "MDS": [setting.beta * first[p] for p in range(len(rises))],
    }
    others = [p for p in range(len(rises)) if p != last]
    return {
        name: {
            "spread": max(term) - min(term),
            "spread_without_last": max(term[p] for p in others) - min(term[p] for p in others),
            "rank_correlation_with_loss": -correlation(ranks(term), ranks(rises)),
            "rank_correlation_without_last": -correlation(
                ranks([term[p] for p in others]), ranks([rises[p] for p in others])
            ),
        }
        for name, term in terms.items()
    }


def ranks(values: Sequence[float]) -> list[float]:
    return [float(sum(other < value for other in values)) for value in values]


def group(name: str) -> str:
    """Return the row of the table that an order belongs to: seeds are averaged."""
    return name.rstrip("0123456789").strip() if name.startswith("random") else name


def on_the_way(curve: torch.Tensor) -> torch.Tensor:
    """Average over 1 ... all but one layer swapped, [windows]: with none and all, orders are alike."""
    return curve[1:-1].mean(0)


def difference(own: torch.Tensor, others: torch.Tensor, origin: Sequence[int], resamples: int = 2000) -> dict[str, Any]:
    """Compare our rise, [windows], with others, [orders, windows]: mean, 95 % interval, and share of resamples."""
    gains = others - own
    members = [[i for i, o in enumerate(origin) if o == text] for text in sorted(set(origin))]
    by_text = torch.stack([gains[:, chosen].mean(1) for chosen in members])
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(by_text), (resamples, len(by_text)), generator=generator)
    seeds = torch.randint(len(gains), (resamples, len(gains)), generator=generator)
    means = torch.stack([by_text[r][:, s].mean() for r, s in zip(rows, seeds, strict=True)]).sort().values
    return {
        "mean": by_text.mean().item(),
        "low": means[int(0.025 * resamples)].item(),
        "high": means[int(0.975 * resamples)].item(),
        "share_better": (means > 0).double().mean().item(),
    }


def quality(variant: str, model: Any, tokenizer: Any, calibration: list[str], held_out: list[str]) -> dict[str, Any]:
    windows, origin = held_out_windows(held_out, tokenizer)
    profile, orders = orders_for(variant, model, tokenizer, calibration)
    found, singles = curves(variant, model, windows, orders)
    own = on_the_way(found["LIS"]["nats"])
    rows = {}
    for row in dict.fromkeys(map(group, orders)):
        members = [curve for name, curve in found.items() if group(name) == row]
        rises = torch.stack([on_the_way(curve["nats"]) for curve in members])
        rows[row] = {
            "mnats": [1e3 * x for x in torch.stack([c["nats"] for c in members]).mean((0, 2)).tolist()],
            "agreement": torch.stack([c["agreement"] for c in members]).mean((0, 2)).tolist(),
            "mean_mnats": 1e3 * rises.mean().item(),
            "mnats_above_lis": difference(1e3 * own, 1e3 * rises, origin),
        }
    return {
        "variant": variant,
        "windows": len(windows),
        "texts": len(set(origin)),
        "orders": {name: o for name, o in orders.items() if not name.startswith("random")},
        "single_mnats": [1e3 * rise for rise in singles],
        "terms": terms_of(profile, singles),
        "rows": rows,
    }


def show_quality(result: dict[str, Any]) -> None:
    layers = len(result["orders"]["LIS"])
    print(
        f"\n{result['variant']}: rise in 1/1000 nats per token with k layers swapped; {result['windows']} windows of "
        f"{WINDOW} tokens of {result['texts']} held-out texts"
    )
    print("LIS order: " + " ".join(map(str, result["orders"]["LIS"])))
    ways = [("mnats", "{:.1f}"), ("agreement", "{:.3f}")]
    for key, form in ways:
        above = ["mean", "above LIS"] if key == "mnats" else []
        rows = []
        for name, row in result["rows"].items():
            gain = row["mnats_above_lis"]
            more = [f"{row['mean_mnats']:.1f}", f"{gain['mean']:+.1f} [{gain['low']:+.1f}, {gain['high']:+.1f}]"]
            rows.append([name, *(form.format(x) for x in row[key][1:]), *(more if above else [])])
        table([key, *map(str, range(1, layers + 1)), *above], rows)
    print("one layer swapped: " + ", ".join(f"{p}: {x:.1f}" for p, x in enumerate(result["single_mnats"])))
    table(
        ["term", "weighted spread", "without the last", "rank correlation with loss", "without the last"],
        [[name, *(f"{x:.2g}" for x in term.values())] for name, term in result["terms"].items()],
    )


def naive(model: Any, ids: torch.Tensor, variants: Sequence[Any], setting: ProfileSettings) -> tuple[int, ...]:
    """Find the order by whole passes of the model, one for each candidate."""
    layers = find_decoder(model).layers
    trace = LayerTrace(model, layers, ids)
    count = ids.numel()
    local = []
    for p, (state, output) in enumerate(zip(trace.states[:-1], trace.outputs, strict=True)):
        lts, lrs = cosine(output, state), cosine(output, trace.run(p, variants[p], state))
        local.append(setting.alpha1 * lts / count + setting.alpha2 * lrs / count)
    chosen: list[int] = []
    before = trace.logits
    while left := [p for p in range(len(layers)) if p not in chosen]:
        best, logits = (float("-inf"), 0), before
        for p in left:
            after = trace.whole({q: variants[q] for q in [*chosen, p]})
            score = local[p] + setting.beta * cosine(before, after) / count
            if (score, -p) > best:
                best, logits = (score, -p), after
        chosen.append(-best[1])
        before = logits
    return tuple(chosen)


def runs_of_layers(model: Any, work: Callable[[], Any]) -> int:
    """Count how often any layer, full or quantized, is run by one work."""
    kind = type(find_decoder(model).layers[0])
    plain, count = kind.forward, 0

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return plain(self, *args, **kwargs)

    kind.forward = counted
    try:
        work()
    finally:
        kind.forward = plain
    return count


def cost(name: str, model: Any, ids: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Seconds of each kind of search. Quantized layers are made beforehand for all."""
    layers = find_decoder(model).layers
    variants = [dequantized_layer(layer, DEFAULTS["int4"]) for layer in layers]
    setting = ProfileSettings("int4", {}, 0.25, 0.25, 0.5, False, "float32", ("",) * len(layers), "", *ids.shape)
    lazy = ProfileSettings(**{**vars(setting), "lazy": True})
    orders: dict[str, tuple[int, ...]] = {}

    def search(kind: str, setting: ProfileSettings, **more: Any) -> None:
        traces = [LayerTrace(model, layers, ids)]
        orders[kind] = measure(traces, layers, lambda i: variants[i], setting, **more).order

    works: dict[str, Callable[[], Any]] = {
        "naive": lambda: orders.update(naive=naive(model, ids, variants, setting)),
        "prefix reuse": lambda: search("prefix reuse", setting, most_kept_bytes=0),
        "full reuse": lambda: search("full reuse", setting),
        "lazy": lambda: search("lazy", lazy),
    }
    counts = {kind: runs_of_layers(model, work) for kind, work in works.items()}
    times = paired(works, "cpu", rounds, warmup=0)
    return {
        "model": name,
        "layers": len(layers),
        "tokens": ids.numel(),
        "same_order": len(set(orders.values())) == 1,
        "order": orders["naive"],
        "layer_runs": counts,
        "s": {kind: min(took) for kind, took in times.items()},
        "speedup": {kind: ratio(times["naive"], times[kind]) for kind in works if kind != "naive"},
    }


def random_llama(layers: int) -> Any:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.06,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def show_cost(results: list[dict[str, Any]]) -> None:
    kinds = list(results[0]["s"])
    rows = []
    for r in results:
        for kind in kinds:
            faster = show(r["speedup"][kind]) if kind in r["speedup"] else ""
            fewer = f"{r['layer_runs']['naive'] / r['layer_runs'][kind]:.2f}"
            rows.append(
                [r["model"], kind, r["layer_runs"][kind], fewer, f"{r['s'][kind]:.2f}", faster, r["same_order"]]
            )
    print()
    table(["model", "search", "layer runs", "fewer by", "s", "faster by", "same order"], rows)


def main() -> None:
    options = arguments(__doc__.splitlines()[0])
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    calibration, held_out = texts()
    if options.quick:
        held_out = held_out[:3]
    ids = token_ids(calibration, tokenizer, WINDOW)
    rounds = min(options.rounds, 5)
    costs = [cost("trained, 12 layers", model, ids, 1 if options.quick else rounds)]
    if not options.quick:
        deep = random_llama(32)
        costs.append(cost("random, 32 layers", deep, ids[:, :128] % 512, min(rounds, 3)))
    show_cost(costs)
    qualities = [quality(v, model, tokenizer, calibration, held_out) for v in ("int4", "int3")]
    for result in qualities:
        show_quality(result)
    print(f"\n{time.perf_counter() - start:.0f} s")
    finish("sensitivity", options.device, {"cost": costs, "quality": qualities})


if __name__ == "__main__":
    main()
