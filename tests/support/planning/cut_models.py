"""The cuts of real decoder layers, and what a layer gives with some of its parameters cut."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from elastic.planning.sharding.cut_plan import CutPlan, FFNCut, ParameterCut, cut_layer
from elastic.planning.sharding.ffn import tp_styles
from elastic.weights.decoder import find_decoder


def plan_of(model: Any, index: int, parts: int, *, planned: bool = True, unit: int = 1) -> CutPlan:
    """Cut one layer of a model, by its own tensor-parallel plan or, not `planned`, by shapes alone."""
    decoder = find_decoder(model)
    layer = decoder.layers[index]
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    styles = tp_styles(decoder.config.base_model_tp_plan if planned else None, decoder.layer_names[index], shapes)
    transposed = {name for name, module in layer.named_modules() if isinstance(module, Conv1D)}
    return cut_layer(shapes, decoder.config.hidden_size, parts, styles=styles, transposed=transposed, unit=unit)


def part_of(parameter: torch.Tensor, cut: ParameterCut, part: int) -> torch.Tensor:
    """The rows of a part; of experts, all rows with zeros instead of those of other parts, which then give zeros."""
    rows = torch.tensor([row for run in cut.rows[part] for row in run])
    return parameter.index_select(cut.dim, rows)


def parameters_of(layer: nn.Module, ffn: FFNCut, part: int) -> dict[str, torch.Tensor]:
    """What one rank computes a network with: its part, and zeros for what another adds."""
    own = dict(layer.named_parameters())
    found = {name: torch.zeros_like(own[name]) for name in ffn.once if part}
    for cut in ffn.cuts:
        kept = part_of(own[cut.name], cut, part)
        if ffn.kind == "experts":
            (rows,) = cut.rows[part]
            kept = torch.zeros_like(own[cut.name]).index_copy_(0, torch.tensor(rows), kept)
        found[cut.name] = kept
    return found


class Outputs:
    """Calls a layer as its model does, and returns what modules of it give."""

    def __init__(self, model: nn.Module, layer: nn.Module, **inputs: Any) -> None:
        self._layer = layer
        self._calls: list[tuple[Any, Any]] = []
        handle = layer.register_forward_pre_hook(
            lambda _, args, kwargs: self._calls.append((args, kwargs)), with_kwargs=True
        )
        try:
            model(**inputs, use_cache=False)
        finally:
            handle.remove()

    def of(self, module: str, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What a module gives when the layer is called with other parameters, those of parts among them."""
        found: list[torch.Tensor] = []
        args, kwargs = self._calls[0]
        watched = self._layer.get_submodule(module)
        handle = watched.register_forward_hook(lambda _, __, output: found.append(output.clone()))
        with ExitStack() as stack:
            stack.callback(handle.remove)
            for name, inner in self._layer.named_modules():
                if isinstance(inner, Conv1D) and f"{name}.weight" in parameters:  # it remembers its outputs
                    stack.enter_context(mock.patch.object(inner, "nf", parameters[f"{name}.weight"].shape[1]))
            torch.func.functional_call(self._layer, dict(parameters), args, kwargs)
        return found[0]
