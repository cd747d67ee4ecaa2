"""The parameters of a model that can live in pages, and the tensors that stay ordinary ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from torch import nn

from elastic.memory.weight_layout import ParameterLayout
from elastic.weights.decoder import Decoder
from elastic.weights.parameter_slot import ParameterSlot


def layer_slots(
    model: nn.Module, decoder: Decoder, wanted: Callable[[torch.Tensor], bool] = lambda parameter: True
) -> list[dict[str, ParameterSlot]]:
    """Return for each decoder layer the `wanted` parameters, of any shape, that live in pages, by their names in it.

    Not those that anything outside the layer uses too (tied or shared, also by memory), adapters (what lies beside a
    `base_layer`), kinds of parameters that are not plain, and those on another device than the layer's first.
    """
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                homes.setdefault(id(parameter), []).append((module, name))
    refused = _overlapping(model) | _adapters(model)
    uses = Counter(id(module) for layer in set(decoder.layers) for module in layer.modules())
    layers = []
    for layer in decoder.layers:
        inner = {id(module) for module in layer.modules() if uses[id(module)] == 1}
        slots: dict[str, ParameterSlot] = {}
        for name, parameter in layer.named_parameters():
            places = homes[id(parameter)]
            private = decoder.layers.count(layer) == 1 and all(id(module) in inner for module, _ in places)
            first = next(iter(slots.values())).parameter if slots else parameter
            if not private or id(parameter) in refused or not wanted(parameter) or not _plain(parameter):
                continue
            if parameter.device == first.device:
                slots[name] = ParameterSlot(parameter, tuple(places))
        layers.append(slots)
    return layers


def head_slot(model: nn.Module) -> ParameterSlot | None:
    """Return the matrix that logits are computed with, [vocabulary, hidden].

    None where a model has none, and where something else uses it too, as embeddings do that are tied to it.
    """
    output_embeddings = getattr(model, "get_output_embeddings", None)
    weight = getattr(output_embeddings(), "weight", None) if output_embeddings else None
    if not isinstance(weight, nn.Parameter) or not _plain(weight) or id(weight) in _overlapping(model):
        return None
    homes = [(module, name) for module in model.modules() for name, p in module._parameters.items() if p is weight]
    return ParameterSlot(weight, tuple(homes)) if len(homes) == 1 else None


def held_outside(
    model: nn.Module, decoder: Decoder, slots: Sequence[Mapping[str, ParameterSlot]]
) -> dict[str, Counter[str]]:
    """Return the bytes of ordinary tensors, by device and `fixed:name`: embeddings, head, buffers, adapters."""
    paged = {id(slot.parameter) for by_name in slots for slot in by_name.values()}
    held: dict[str, Counter[str]] = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if id(tensor) not in paged:
            layer = next((prefix for prefix in decoder.layer_names if name.startswith(prefix + ".")), None)
            owner = f"fixed:{layer or name.rsplit('.', 1)[0]}"
            held.setdefault(str(tensor.device), Counter())[owner] += tensor.nbytes
    return held


def _overlapping(model: nn.Module) -> set[int]:
    """Return the parameters (ids) whose bytes another parameter or buffer has too; on the meta device none has any."""
    tensors = (tensor for tensor in chain(model.parameters(), model.buffers()) if tensor.device.type != "meta")
    extents = sorted((str(t.device), t.data_ptr(), t.data_ptr() + t.nbytes, id(t)) for t in tensors)
    overlapping: set[int] = set()
    farthest = ("", 0, 0, 0)  # of those so far, the one that reaches farthest
    for extent in extents:
        if extent[0] == farthest[0] and extent[1] < farthest[2]:
            overlapping |= {farthest[3], extent[3]}
        farthest = max(farthest, extent, key=lambda e: (e[0], e[2]))
    return overlapping


def _adapters(model: nn.Module) -> set[int]:
    """Return the parameters (ids) that lie beside a `base_layer`, as PEFT's do."""
    adapters: set[int] = set()
    for module in model.modules():
        base = module._modules.get("base_layer")
        if base is not None:
            adapters |= {id(p) for p in module.parameters()} - {id(p) for p in base.parameters()}
    return adapters


def _plain(parameter: nn.Parameter) -> bool:
    """Return whether this is an ordinary parameter, dense in its memory."""
    if type(parameter) is not nn.Parameter or not parameter.numel() or parameter.layout is not torch.strided:
        return False
    if parameter.is_inference():  # it tells nobody when it is written
        return False
    dense = ParameterLayout.like(parameter).strides
    return all(a == b for a, b, size in zip(dense, parameter.stride(), parameter.shape, strict=True) if size > 1)
