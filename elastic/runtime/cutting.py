"""The cuts of a model's decoder layers, made once, before its weights lie in pages. (AMOEBA, section 3.2)

The paper lays bytes between the parts so that each begins on a page. Here there is nothing between them: rows are cut
where whole rows and pages end together, if the parts are about equal then; else they are equal, and a page in which one
part ends and the next begins stays as long as either does. So a parameter that is whole is an ordinary one, of one
product, without padding; the page in between costs a rank no more than the padding would.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from elastic.errors import ConfigError
from elastic.memory.pages.page_pool import PagePool
from elastic.planning.sharding.bounds import aligned_unit, most_parts, row_bounds
from elastic.planning.sharding.cut_plan import CutPlan, cut_layer
from elastic.planning.sharding.ffn import tp_styles
from elastic.weights.decoder import Decoder
from elastic.weights.parameter_slot import ParameterSlot
from elastic.weights.shards.elementwise import require_elementwise
from elastic.weights.shards.layer_cut import LayerCut

MOST_UNEVEN = 0.05
"""The share by which the largest part may exceed an equal one, so that the cuts lie on pages."""


def cut_layers(
    decoder: Decoder, slots: Sequence[Mapping[str, ParameterSlot]], pools: Sequence[PagePool], shards: int
) -> list[LayerCut | None]:
    """Cut every layer into as many parts; `pools` are those of their places. Nothing is cut into one.

    Raises `ConfigError` for a model that has a layer without a feed-forward network that can be cut so.
    """
    if shards == 1:
        return [None] * len(decoder.layers)
    return [cut_decoder_layer(decoder, i, slots[i], pools[i].page_bytes, shards) for i in range(len(decoder.layers))]


def cut_decoder_layer(
    decoder: Decoder, index: int, slots: Mapping[str, ParameterSlot], page_bytes: int, shards: int
) -> LayerCut:
    """Cut one layer into two parts or more, for pages of this size. Raises `ConfigError` as `cut_layers` does."""
    from transformers.pytorch_utils import Conv1D

    layer, name = decoder.layers[index], decoder.layer_names[index]
    sizes = {n: p.element_size() for n, p in layer.named_parameters()}
    shapes = {n: tuple(p.shape) for n, p in layer.named_parameters()}
    styles = tp_styles(getattr(decoder.config, "base_model_tp_plan", None), name, shapes)
    hidden = decoder.config.hidden_size
    transposed = {n for n, m in layer.named_modules() if isinstance(m, Conv1D)}  # its matrix is [inputs, outputs]
    try:
        plan = cut_layer(shapes, hidden, shards, styles=styles, transposed=transposed)
        if unit := _unit(plan, sizes, page_bytes):
            plan = cut_layer(shapes, hidden, shards, styles=styles, transposed=transposed, unit=unit)
        require_elementwise(layer, plan)
    except ConfigError as error:
        raise ConfigError(f"shards={shards}: {name}: {error}") from error
    missing = sorted(plan.cuts.keys() - slots.keys())
    if missing:
        raise ConfigError(
            f"shards={shards}: {name}.{missing[0]} is used elsewhere too, or an adapter's: it cannot be cut; wrap the "
            "model with shards=1"
        )
    parted = [cut for cut in plan.cuts.values() if len(cut.shape) > 1]
    parted = [cut for cut in parted if math.prod(cut.shape) * sizes[cut.name] > page_bytes]
    return LayerCut(plan, tuple(cut.name for cut in parted))


def _unit(plan: CutPlan, sizes: Mapping[str, int], page_bytes: int) -> int:
    """Return the rows of dense networks that end on a page, if about equal parts can be cut there; else 0."""
    units, inside = [1], []
    for ffn in plan.ffns:
        if ffn.kind == "dense":
            matrices = [cut for cut in ffn.cuts if len(cut.shape) > 1]
            units += [aligned_unit(cut.row_elements * sizes[cut.name], page_bytes) for cut in matrices]
            inside.append(matrices[0].rows[-1][0].stop)
    unit, parts = math.lcm(*units), plan.parts
    for rows in inside:
        if most_parts(rows, unit) < parts:
            return 0
        largest = max(stop - start for start, stop in itertools.pairwise(row_bounds(rows, parts, unit)))
        if largest * parts > (1 + MOST_UNEVEN) * rows:
            return 0
    return unit
