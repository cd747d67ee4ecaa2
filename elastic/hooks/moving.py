"""Which parameters of a model can live in pages, and moving them in (wrap) and out (unwrap)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elastic.errors import CapacityError
from elastic.hooks.layer import LayerWeights
from elastic.hooks.slots import Slot
from elastic.hooks.structure import Decoder
from elastic.memory.checkpoint import Checkpoint
from elastic.memory.layout import LayerLayout, ParameterLayout
from elastic.memory.places import give_back_freed
from elastic.memory.pool import PagePool

KV_SHARE = 0.1
"""The share of a budget too small for all weights that is left to the KV cache."""
Arrange = Callable[[str, torch.Tensor], ParameterLayout]


def layer_slots(model: nn.Module, decoder: Decoder) -> list[dict[str, Slot]]:
    """For each decoder layer the parameters that live in pages, by their names in the layer.

    Not those that anything outside the layer uses too (tied or shared, also by memory), adapters (what lies beside a
    `base_layer`), kinds of parameters that are not plain, and those on another device than the layer's first.
    """
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                homes.setdefault(id(parameter), []).append((module, name))
    refused = _overlapping(model) | _adapters(model)
    seen = Counter(id(module) for layer in set(decoder.layers) for module in layer.modules())
    found = []
    for layer in decoder.layers:
        own = {id(module) for module in layer.modules() if seen[id(module)] == 1}
        slots: dict[str, Slot] = {}
        for name, parameter in layer.named_parameters():
            places = homes[id(parameter)]
            private = decoder.layers.count(layer) == 1 and all(id(module) in own for module, _ in places)
            first = next(iter(slots.values())).parameter if slots else parameter
            if private and id(parameter) not in refused and _plain(parameter) and parameter.device == first.device:
                slots[name] = Slot(parameter, tuple(places))
        found.append(slots)
    return found


def make_layers(
    decoder: Decoder,
    slots: Sequence[Mapping[str, Slot]],
    pools: Sequence[PagePool],
    checkpoint: Checkpoint | None,
    arrange: Arrange | None = None,
) -> list[LayerWeights]:
    """The layers, before anything is moved; `pools` are those of their places.

    `arrange` chooses another layout than the present one for a parameter.
    """
    made = []
    for index, (name, here) in enumerate(zip(decoder.layer_names, slots, strict=True)):
        choose = arrange or _as_it_lies
        layout = LayerLayout.pack({n: choose(f"{name}.{n}", slot.parameter) for n, slot in here.items()})
        layer = LayerWeights(index, name, pools[index], here, layout, checkpoint)
        layer.others, layer.aligners = _others(decoder.layers[index], here), _aligners(decoder.layers[index])
        made.append(layer)
    return made


def _others(layer: nn.Module, slots: Mapping[str, Slot]) -> tuple[tuple[dict[str, Any], str], ...]:
    """Where a layer's tensors are that do not lie in pages."""
    in_pages = {id(slot.parameter) for slot in slots.values()}
    dicts: list[dict[str, Any]] = [d for m in layer.modules() for d in (m._parameters, m._buffers)]
    return tuple((d, n) for d in dicts for n, tensor in d.items() if tensor is not None and id(tensor) not in in_pages)


def _aligners(layer: nn.Module) -> tuple[Any, ...]:
    """accelerate's hooks on a layer and in it that know a device."""
    hooks = [getattr(module, "_hf_hook", None) for module in layer.modules()]
    each = [one for hook in hooks for one in (getattr(hook, "hooks", None) or [hook])]
    return tuple(hook for hook in each if getattr(hook, "execution_device", None) is not None)


def held_outside(model: nn.Module, decoder: Decoder, slots: Sequence[Mapping[str, Slot]]) -> dict[str, Counter[str]]:
    """Bytes that stay ordinary tensors, by device and then by `fixed:name`: embeddings, head, buffers, adapters."""
    in_pages = {id(slot.parameter) for here in slots for slot in here.values()}
    held: dict[str, Counter[str]] = {}
    for name, tensor in _tensors(model):
        if id(tensor) not in in_pages:
            layer = next((prefix for prefix in decoder.layer_names if name.startswith(prefix + ".")), None)
            owner = f"fixed:{layer or name.rsplit('.', 1)[0]}"
            held.setdefault(str(tensor.device), Counter())[owner] += tensor.nbytes
    return held


def _as_it_lies(name: str, parameter: torch.Tensor) -> ParameterLayout:
    return ParameterLayout.like(parameter)


def spread(sizes: Sequence[int], pools: Sequence[PagePool]) -> list[PagePool]:
    """A place for each layer, by its bytes: in the order of the places, as many layers as leave room for a KV cache.

    Layers that fit nowhere go to the first place, which streams them.
    """
    room = [int((1 - KV_SHARE) * pool.free_pages) for pool in pools]
    chosen, at = [], 0
    for size in sizes:
        while at < len(pools) and pools[at].pages_for(size) > room[at]:
            at += 1
        if at < len(pools):
            room[at] -= pools[at].pages_for(size)
        chosen.append(pools[at] if at < len(pools) else pools[0])
    return chosen


def choose_absent(
    layers: Sequence[LayerWeights], free_pages: int, stage_pages: int, *, least_stages: int = 1
) -> tuple[int, list[LayerWeights]]:
    """The stages for a place with `free_pages`, and the layers that find no room there, evenly spread.

    `least_stages`: where all layers find room.

    Raises `CapacityError` if not even one layer at a time fits.
    """
    needed = sum(layer.pages for layer in layers)
    if needed + stage_pages <= free_pages:
        return min(least_stages, len(layers)), []
    if needed <= free_pages:
        return 0, []
    for count in range(1, len(layers) + 1):
        absent = [layers[i * len(layers) // count] for i in range(count)]
        stages = min(2, count)
        left = free_pages - stages * stage_pages - needed + sum(layer.pages for layer in absent)
        if left >= KV_SHARE * free_pages:
            return stages, absent
    pool = layers[0].pool
    raise CapacityError(
        f"place {pool.name} is too small for this model, even with its layers in host memory: give it a larger budget",
        requested_bytes=(min(2, len(layers)) * stage_pages + int(KV_SHARE * free_pages)) * pool.page_bytes,
        free_bytes=free_pages * pool.page_bytes,
        total_bytes=pool.budget_pages * pool.page_bytes,
    )


def move_in(layer: LayerWeights, absent: bool) -> None:
    """Have a layer's parameters in pages of its place, or in the host store; what they were before is let go of."""
    if absent:
        layer.keep()
        layer.hide(layer.absent_contents())
    else:
        block = layer.block_for(layer.full)
        block.fill(layer.owner)
        tensors = block.show(layer.layout)
        with torch.no_grad():
            for name, slot in layer.slots.items():
                tensors[name].copy_(slot.parameter)
        layer.show(layer.contents(layer.full, tensors))
    give_back_freed(layer.pool.backend.device)


def move_out(layer: LayerWeights) -> None:
    """Have a layer's tensors in ordinary memory, strided and where they were before; give its pages back."""
    for name, slot in layer.slots.items():
        if not slot.intact():  # somebody else's by now
            continue
        plainly_there = not layer.absent and name not in layer.form.packings
        source = slot.parameter.detach() if plainly_there else layer.host_tensor(name)
        with torch.inference_mode(False), torch.no_grad():
            plain = torch.empty_strided(source.shape, slot.strides, dtype=source.dtype, device=slot.device)
            plain.copy_(source)
        slot.show(slot.plain(plain))
        del source
    layer.bring_others(next((slot.device for slot in layer.slots.values()), layer.pool.backend.device))
    layer.absent = False
    layer.drop_host_copies()
    give_back(layer)


def give_back(layer: LayerWeights) -> None:
    """Close the layer's blocks: their pages go back to the system."""
    if layer.blocks:
        if layer.pool.backend.device.type == "cuda":
            torch.cuda.synchronize(layer.pool.backend.device)
        while layer.blocks:
            layer.blocks.popitem()[1].close()
        layer.pool.trim()


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _overlapping(model: nn.Module) -> set[int]:
    """Parameters (ids) whose bytes another parameter or buffer has too."""
    extents = sorted((str(t.device), t.data_ptr(), t.data_ptr() + t.nbytes, id(t)) for _, t in _tensors(model))
    found: set[int] = set()
    longest = ("", 0, 0, 0)  # of those so far, the one that reaches farthest
    for extent in extents:
        if extent[0] == longest[0] and extent[1] < longest[2]:
            found |= {longest[3], extent[3]}
        longest = max(longest, extent, key=lambda e: (e[0], e[2]))
    return found


def _adapters(model: nn.Module) -> set[int]:
    """Parameters (ids) that lie beside a `base_layer`, as PEFT's do."""
    found: set[int] = set()
    for module in model.modules():
        base = module._modules.get("base_layer")
        if base is not None:
            found |= {id(p) for p in module.parameters()} - {id(p) for p in base.parameters()}
    return found


def _plain(parameter: nn.Parameter) -> bool:
    """Whether it is an ordinary parameter, dense in its memory."""
    if type(parameter) is not nn.Parameter or not parameter.numel() or parameter.layout is not torch.strided:
        return False
    if parameter.is_inference():  # it tells nobody when it is written
        return False
    dense = ParameterLayout.like(parameter).strides
    return all(a == b for a, b, size in zip(dense, parameter.stride(), parameter.shape, strict=True) if size > 1)
