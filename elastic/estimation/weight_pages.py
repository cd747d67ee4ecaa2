"""Pages of a model's weights at a rank: in each variant, and in shares of a layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from elastic.errors import ConfigError
from elastic.estimation.model_layout import LayerKind, ModelLayout
from elastic.memory.weight_layout import LayerLayout, ParameterLayout
from elastic.planning.estimate.configuration import FULL
from elastic.quant.formats.base import KernelTarget
from elastic.quant.variants.packed_layout import packed_layout
from elastic.quant.variants.variant import NAMED, config_of
from elastic.runtime.cutting import cut_decoder_layer
from elastic.weights.shards.layer_cut import LayerCut


class WeightPages:
    """Counts pages of one size, for one kind of hardware. Nothing is loaded."""

    def __init__(self, layout: ModelLayout, page_bytes: int, target: KernelTarget) -> None:
        self.layout = layout
        self.page_bytes = page_bytes
        self.target = target
        self.of_kind = cache(self._of_kind)
        self.cut: Callable[[LayerKind, int], LayerCut] = cache(
            lambda kind, tp: cut_decoder_layer(layout.decoder, kind.layers[0], kind.slots, page_bytes, tp)
        )
        """Cuts a layer for so many ranks. Raises `ConfigError` where its feed-forward network cannot be cut so."""
        self.fixed = sum(-(-nbytes // page_bytes) for nbytes in layout.fixed.values())
        """Pages that embedding, head, norms and buffers are charged with, at every rank."""

    def layers(self, layers: range, weights: str, tp: int) -> int:
        """Count the pages of some layers in a variant, at the fullest of the ranks that share them."""
        return sum(self.of_kind(self.layout.kind_of[layer], weights, tp) for layer in layers)

    def staging(self, weights: str, buffers: int) -> int:
        """Count the pages that `wrap` keeps back: of the largest packed layer, and of buffers for released layers."""
        packed = 0 if weights == FULL else max(self.of_kind(kind, weights, 1) for kind in self.layout.kinds)
        largest = max(kind.full.nbytes for kind in self.layout.kinds)
        return packed + buffers * -(-largest // self.page_bytes)

    def cut_share(self, kind: LayerKind, tp: int) -> float:
        """Return the share of a layer's weights that its ranks divide."""
        if tp == 1:
            return 0.0
        plan = self.cut(kind, tp).plan
        shared = sum(cut.elements(part) for cut in plan.cuts.values() for part in range(tp))
        return shared / plan.elements

    def _of_kind(self, kind: LayerKind, weights: str, tp: int) -> int:
        """Count the pages of one layer of a kind. Raises `ConfigError` where it cannot be packed or cut so."""
        if weights == FULL:
            return kind.full.page_count(self.page_bytes) if tp == 1 else self._full_share(kind, tp)
        config = variant_config(weights)
        if tp == 1:
            return packed_layout(kind.parameters, kind.full, config, self.target).page_count(self.page_bytes)
        return max(self._packed_share(kind, config, tp, part) for part in range(tp))

    def _full_share(self, kind: LayerKind, tp: int) -> int:
        """Count the pages of a share of a layer, as `wrap(shards=tp)` lays it out. (AMOEBA, section 3.2)"""
        cut = self.cut(kind, tp)
        layouts = {name: cut.stored(name, like, self.page_bytes) for name, like in kind.full.parameters.items()}
        layout = LayerLayout.pack({name: layouts[name] for name in sorted(layouts, key=cut.parted.__contains__)})
        pages = cut.pages(layout, self.page_bytes)
        return max(pages.pages((part,)) for part in range(tp))

    def _packed_share(self, kind: LayerKind, config: Any, tp: int, part: int) -> int:
        """Count the pages of a share of a layer in a variant: packed after it was cut."""
        tensors = self._part(kind, tp, part)
        full = LayerLayout.pack({name: ParameterLayout.like(tensor) for name, tensor in tensors.items()})
        return packed_layout(kind.having(tensors), full, config, self.target).page_count(self.page_bytes)

    def _part(self, kind: LayerKind, tp: int, part: int) -> dict[str, torch.Tensor]:
        """Return a layer's parameters as a rank with this part has them, on the meta device."""
        cuts = self.cut(kind, tp).plan.cuts
        tensors = {}
        for name, slot in kind.slots.items():
            shape = list(slot.parameter.shape)
            if name in cuts:
                shape[cuts[name].dim] = sum(map(len, cuts[name].rows[part]))
            tensors[name] = torch.empty(shape, dtype=slot.parameter.dtype, device="meta")
        return tensors


def variant_config(weights: str) -> Any:
    """Return the config of a variant's name. Raises `ConfigError` for an unknown one."""
    config = config_of(weights)
    if config is None:
        raise ConfigError(f"weights={weights!r} is not known; use {FULL!r} or one of {NAMED}")
    return config
