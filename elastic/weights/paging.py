"""Which parameters of a model can live in pages, and moving them in (wrap) and out (unwrap)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elastic.memory.checkpoint_file import Checkpoint
from elastic.memory.page_pool import PagePool
from elastic.memory.places import give_back_freed
from elastic.memory.weight_layout import LayerLayout, ParameterLayout
from elastic.weights.decoder import Decoder
from elastic.weights.layer import WeightUnit
from elastic.weights.parameter_slot import ParameterSlot

Arrange = Callable[[str, torch.Tensor], ParameterLayout]


def make_layers(
    decoder: Decoder,
    slots: Sequence[Mapping[str, ParameterSlot]],
    pools: Sequence[PagePool],
    checkpoint: Checkpoint | None,
    arrange: Arrange | None = None,
) -> list[WeightUnit]:
    """The layers, before anything is moved; `pools` are those of their places.

    `arrange` chooses another layout than the present one for a parameter.
    """
    made = []
    for index, (name, here) in enumerate(zip(decoder.layer_names, slots, strict=True)):
        choose = arrange or _as_it_lies
        layout = LayerLayout.pack({n: choose(f"{name}.{n}", slot.parameter) for n, slot in here.items()})
        layer = WeightUnit(index, name, pools[index], here, layout, checkpoint)
        layer.unpaged_tensors, layer.accelerate_hooks = (
            _others(decoder.layers[index], here),
            _aligners(decoder.layers[index]),
        )
        made.append(layer)
    return made


def _others(layer: nn.Module, slots: Mapping[str, ParameterSlot]) -> tuple[tuple[dict[str, Any], str], ...]:
    """Where a layer's tensors are that do not lie in pages."""
    in_pages = {id(slot.parameter) for slot in slots.values()}
    dicts: list[dict[str, Any]] = [d for m in layer.modules() for d in (m._parameters, m._buffers)]
    return tuple((d, n) for d in dicts for n, tensor in d.items() if tensor is not None and id(tensor) not in in_pages)


def _aligners(layer: nn.Module) -> tuple[Any, ...]:
    """accelerate's hooks on a layer and in it that know a device."""
    hooks = [getattr(module, "_hf_hook", None) for module in layer.modules()]
    each = [one for hook in hooks for one in (getattr(hook, "hooks", None) or [hook])]
    return tuple(hook for hook in each if getattr(hook, "execution_device", None) is not None)


def _as_it_lies(name: str, parameter: torch.Tensor) -> ParameterLayout:
    return ParameterLayout.like(parameter)


def move_in(layer: WeightUnit, absent: bool) -> None:
    """Have a layer's parameters in pages of its place, or in the host store; what they were before is let go of."""
    if absent:
        layer.keep()
        layer.hide(layer.absent_contents())
    else:
        block = layer.block_for(layer.full)
        block.allocate(layer.owner)
        tensors = block.show(layer.layout)
        with torch.no_grad():
            for name, slot in layer.slots.items():
                tensors[name].copy_(slot.parameter)
        layer.show(layer.contents(layer.full, tensors))
    give_back_freed(layer.pool.backend.device)


def move_out(layer: WeightUnit) -> None:
    """Have a layer's tensors in ordinary memory, strided and where they were before; give its pages back."""
    for name, slot in layer.slots.items():
        if not slot.intact():  # somebody else's by now
            continue
        plainly_there = not layer.absent and name not in layer.form.packings
        source = slot.parameter.detach() if plainly_there else layer.host_tensor(name)
        with torch.inference_mode(False), torch.no_grad():
            plain = torch.empty_strided(source.shape, slot.strides, dtype=source.dtype, device=slot.device)
            plain.copy_(source)
        slot.set_parameter(slot.plain(plain))
        del source
    layer.bring_others(next((slot.device for slot in layer.slots.values()), layer.pool.backend.device))
    layer.absent = False
    layer.drop_host_copies()
    give_back(layer)


def give_back(layer: WeightUnit) -> None:
    """Close the layer's blocks: their pages go back to the system."""
    if layer.blocks:
        if layer.pool.backend.device.type == "cuda":
            torch.cuda.synchronize(layer.pool.backend.device)
        while layer.blocks:
            layer.blocks.popitem()[1].close()
        layer.pool.trim()
