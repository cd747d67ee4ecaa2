"""What layers of a model compute and read for a batch, and the memory that a batch takes while it is computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from elastic.engines.executor.kernels.paged_attention import attention_library
from elastic.engines.executor.layer_groups import layer_groups
from elastic.estimation.kv_room import KVShape
from elastic.estimation.model_layout import LayerKind, ModelLayout
from elastic.estimation.weight_pages import WeightPages, variant_config
from elastic.memory.weight_layout import LayerLayout
from elastic.planning.estimate.configuration import FULL
from elastic.planning.estimate.roofline import Work
from elastic.planning.sharding.heads import kv_shards
from elastic.quant.formats.base import KernelTarget
from elastic.quant.formats.pruned import Structured
from elastic.quant.variants.eligible import expert_shapes
from elastic.quant.variants.packed_layout import packed_layout
from elastic.weights.decoder import layer_configs

_CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "num_selected_experts", "top_k")
"""Names in configs, or in their `ffn_config`, of how many experts a token is sent to."""
_SCORE_BYTES = 16
"""For a pair of tokens of a prompt: the mask, how it is made, and its form for the kernel."""
_MADE_SCORE_BYTES = 8
"""For a pair of tokens and a query head, where no kernel attends: the scores and their softmax in float32."""
_GROUPS = ("whole", "cut", "experts")
_LOGIT_COPIES = 4
"""Copies in float32 of what is sampled from."""


def layer_work(pages: WeightPages, kind: LayerKind, weights: str, kv: KVShape, tp: int) -> tuple[Work, ...]:
    """Return what one of `tp` ranks does for a layer in a variant.

    Matrices that all ranks have whole, shares of matrices, experts, and attention.
    """
    config = pages.layout.decoder.config
    cuts = pages.cut(kind, tp).plan.cuts.keys() if tp > 1 else ()
    bytes_of = _stored_bytes(kind, weights, pages.target)
    smaller = weights != FULL and isinstance(variant_config(weights), Structured)
    read, met = dict.fromkeys(_GROUPS, 0.0), dict.fromkeys(_GROUPS, 0.0)
    experts = expert_shapes(kind.parameters)
    for name, slot in kind.slots.items():
        parameter = slot.parameter
        group = "experts" if name in experts else "cut" if name in cuts else "whole"
        read[group] += bytes_of[name]
        if parameter.ndim > 1:
            met[group] += bytes_of[name] / parameter.element_size() if smaller else parameter.numel()
    chosen = chosen_share(config, kind.layers[0], experts.values())
    shared = [
        Work(read["cut"], 2 * met["cut"]),
        Work(read["experts"], 2 * chosen * met["experts"], least_met=chosen),
        Work(
            pair_flops=4.0 * pages.layout.heads[kind.layers[0]].queries * kv.dim,
            kv_bytes=float(kv.token_bytes),
            window=window_of(config, kind),
        ),
    ]
    parts = [Work(read["whole"], 2 * met["whole"]), *(work.shared(tp, kv_shards(tp, kv.heads)) for work in shared)]
    return tuple(work for work in parts if work.weight_bytes or work.kv_bytes)


def chosen_share(config: Any, layer: int, shapes: Iterable[Sequence[int]]) -> float:
    """Return the share of the experts of a layer, by its number, that a token is sent to; 1.0 where it has none.

    shapes: of the layer's experts, [experts, ..., ...].
    """
    experts = max((shape[0] for shape in shapes), default=0)
    return min(1.0, _chosen(config, layer) / experts) if experts else 1.0


def window_of(config: Any, kind: LayerKind) -> int | None:
    """Return the most tokens that a token sees in a layer; None: all before it."""
    return next((group.window for group in layer_groups(config) if kind.layers[0] in group.layers), None)


def rest_work(layout: ModelLayout) -> Work:
    """Return what is done around the layers: the head, for the last token of each chunk."""
    head = layout.model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None:
        return Work()
    return Work(float(weight.nbytes), chunk_flops=2.0 * weight.numel())


def activation_bytes(layout: ModelLayout, step_tokens: int, running: int, context: int) -> int:
    """Bound the bytes that one batch takes while it is computed, but for the keys and values that decode steps copy.

    step_tokens: new tokens of the batch; running: its requests; context: the longest of them. What is alive at the same
    time: hidden states, and one of attention, a feed-forward network, and logits.
    """
    config: Any = layout.decoder.config
    itemsize, hidden = layout.dtype.itemsize, config.hidden_size
    heads = max(each.queries for each in layout.heads)
    kv = layout.kv_shape(FULL)
    seen = context * 4 * kv.heads * kv.dim * itemsize  # of a prompt behind a prefix: as read, and with the new ones
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    sinks = any(name.rpartition(".")[2] == "sinks" for kind in layout.kinds for name in kind.slots)
    made = _MADE_SCORE_BYTES * heads if capped or sinks else 0  # of scores that the engine makes itself
    scores = step_tokens * context * (_SCORE_BYTES + made)
    attention = step_tokens * (4 * heads + 6 * kv.heads) * kv.dim * itemsize + seen + scores
    shapes, chosen = [], 1
    for kind in layout.kinds:
        experts = expert_shapes(kind.parameters)
        shapes += [experts.get(name, slot.parameter.shape) for name, slot in kind.slots.items()]
        chosen = max(chosen, _chosen(config, kind.layers[0]) if experts else 1)
    inner = max(max(shape[-2:]) for shape in shapes if len(shape) > 1)
    network = step_tokens * chosen * (4 * inner + 2 * hidden) * itemsize
    logits = running * config.vocab_size * (itemsize + 4 * _LOGIT_COPIES)
    return int(step_tokens * 8 * hidden * max(4, itemsize) + max(attention, network, logits))


def copies_blocks(layout: ModelLayout, device: str) -> bool:
    """Return whether decode steps copy what they attend to, on a type of device: "cpu" or "cuda"."""
    return attention_library(layout.dtype, layout.kv_shape(FULL).dim, device) is None


def copied_share(layers: int, read_bytes: int) -> float:
    """Return the share of a rank's room for keys and values that decode steps copy: of one layer, to twice its size.

    Requests of alike lengths are read together, all as long as the longest, which is twice the shortest at most.
    `read_bytes`: how many a byte of the cache takes while it is read; more than one where it is kept in 8 bits.
    """
    return 2 * read_bytes / (layers + 2 * read_bytes)


def copied_bytes(layout: ModelLayout, seen: int, form: str, device: str) -> int:
    """Bound what decode steps copy of one layer on a type of device, whose requests have so many tokens in all."""
    if not copies_blocks(layout, device):
        return 0
    return 2 * read_bytes(form, layout.dtype.itemsize) * seen * layout.kv_shape(form).token_bytes


def read_bytes(form: str, itemsize: int) -> int:
    """Return what a byte of a cache takes while it is read for attention in elements of `itemsize` bytes.

    Of 8 bits: itself, and its value.
    """
    return 1 if form == FULL else 1 + itemsize


def _stored_bytes(kind: LayerKind, weights: str, target: KernelTarget) -> dict[str, int]:
    """Return the bytes of each parameter of a layer in a variant."""
    stored: LayerLayout = kind.full
    if weights != FULL:
        stored = packed_layout(kind.parameters, kind.full, variant_config(weights), target)
    nbytes = dict.fromkeys(kind.slots, 0)
    for name, entry in stored.parameters.items():
        nbytes[name if name in nbytes else name.rpartition("/")[0]] += entry.nbytes
    return nbytes


def _chosen(config: Any, layer: int) -> int:
    """Return how many experts a token is sent to in a layer that has some."""
    own = layer_configs(config)[layer]
    told = (getattr(each, name, None) for each in (own, getattr(own, "ffn_config", None)) for name in _CHOSEN)
    return next((count for count in told if isinstance(count, int)), 1)
