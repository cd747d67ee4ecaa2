"""Experts of a layer, computed by those that are here: each token by the ones it is routed to among them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from elastic.engines.pipeline.tensor_parallel.matrices import Parts, PartTensors
from elastic.errors import ConfigError
from elastic.planning.sharding.cut_plan import FFNCut

COUNT = "num_experts"


@dataclass(frozen=True)
class Experts:
    """A module that holds all experts of a layer, called with tokens, the experts of each, and their weights."""

    parameters: tuple[tuple[str, str], ...]
    """Of each cut parameter, its name in the layer and in the module."""
    rows: tuple[range, ...]
    """Of each part, its experts."""
    _numbers: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, module: nn.Module, ffn: FFNCut) -> Experts:
        """Make it for a module that a cut is of. Raises `ConfigError` for one that does not say how many it has."""
        rows = tuple(part[0] for part in ffn.cuts[0].rows)
        if getattr(module, COUNT, None) != rows[-1].stop:
            raise ConfigError(
                f"{type(module).__name__} has {rows[-1].stop} experts, but no attribute {COUNT!r} that says so; it "
                "cannot be computed by several ranks"
            )
        return cls(tuple((cut.name, cut.name.rpartition(".")[2]) for cut in ffn.cuts), rows)

    def compute(
        self,
        module: nn.Module,
        tensors: PartTensors,
        own: Parts,
        hidden: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Return the sum of what the parts' experts add to each token, [tokens, hidden size].

        hidden: [tokens, hidden size], chosen and weights: [tokens, experts of each].
        """
        output = torch.zeros_like(hidden)
        for experts, parameters in self._runs(tensors, own):
            numbers = self._numbers_of(experts, chosen.device)[chosen]
            tokens, slots = (numbers >= 0).nonzero(as_tuple=True)
            if len(tokens):
                some = _with(module, parameters, len(experts))
                given = hidden[tokens], numbers[tokens, slots][:, None], weights[tokens, slots][:, None]
                output.index_add_(0, tokens, type(module).forward(some, *given).to(output.dtype))
        return output

    def _numbers_of(self, experts: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return the place of each of all experts among these, [experts]; -1: it is not.

        Made once: a copy to a GPU would wait, each time, for all that is queued there.
        """
        key = tuple(experts), device
        if key not in self._numbers:
            numbers = torch.full((self.rows[-1].stop,), -1, dtype=torch.long)
            numbers[list(experts)] = torch.arange(len(experts))
            self._numbers[key] = numbers.to(device)
        return self._numbers[key]

    def _runs(self, tensors: PartTensors, own: Parts) -> Iterator[tuple[list[int], dict[str, torch.Tensor]]]:
        """Yield the parts' experts in runs of which each parameter is one tensor, with these by their names."""
        experts = [expert for part in own for expert in self.rows[part]]
        lengths = [tensor.shape[0] for tensor in tensors[self.parameters[0][0]]]
        for run, length in enumerate(lengths):
            yield experts[:length], {short: tensors[name][run] for name, short in self.parameters}
            experts = experts[length:]


def _with(module: nn.Module, parameters: dict[str, torch.Tensor], count: int) -> nn.Module:
    """Return a copy of the module that has other experts, without hooks of its own. The original is left alone."""
    some = copy.copy(module)
    some.__dict__["_parameters"] = {**module._parameters, **parameters}
    some.__dict__[COUNT] = count
    some.__dict__.pop("forward", None)
    return some
