"""The modules of decoder layers that compute a part of themselves where a thread's plan says so."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from elastic.engines.pipeline.tensor_parallel.exchange import StepExchange
from elastic.engines.pipeline.tensor_parallel.experts import Experts
from elastic.engines.pipeline.tensor_parallel.matrices import InnerMatrix, OuterMatrix
from elastic.errors import ConfigError
from elastic.hooks.base import copy_as_usual, copy_plainly
from elastic.hooks.forward_override import dispatches, install_override, own_forward, remove_override
from elastic.planning.sharding.cut_plan import FFNCut
from elastic.weights.model import ModelWeights


@dataclass(frozen=True)
class _CutModule:
    """A module of a layer."""

    layer: int
    role: InnerMatrix | OuterMatrix | Experts
    summed: bool
    """Whether what it returns is added up over the ranks."""
    once: str
    """The name in the module of what is added after that; "": nothing."""


class CutModules:
    """All modules of a model's feed-forward networks that are cut. From its making to `close` they ask the plan."""

    def __init__(self, layers: Sequence[nn.Module], weights: ModelWeights) -> None:
        """Raises `ConfigError` where another library has replaced the forward method of one of them."""
        self.weights = weights
        self._modules: dict[nn.Module, _CutModule] = {}
        self._installed: list[nn.Module] = []
        for index, layer in enumerate(layers):
            plan = weights.cut_plan(index)
            for ffn in plan.ffns if plan is not None else ():
                self._modules |= _modules_of(index, layer, ffn)
        try:
            self._install()
        except BaseException:
            self.close()
            raise

    def call(self, module: nn.Module, exchange: StepExchange, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a module of the present layer returns, computed with the other ranks of the layer."""
        cut, own = self._modules.get(module), exchange.part
        if cut is None or own.whole:
            return own_forward(module, *args, **kwargs)
        if kwargs:
            args = inspect.signature(type(module).forward).bind(module, *args, **kwargs).args[1:]
        output = cut.role.compute(module, self.weights.part_tensors(cut.layer, own.own), own.own, *args)
        if not cut.summed:
            return output
        output = exchange.summed(output)  # no weights are held meanwhile: an action may come between
        return output + getattr(module, cut.once) if cut.once else output

    def close(self) -> None:
        """Leave the modules as they were. Can be called twice."""
        while self._installed:
            module = self._installed.pop()
            remove_override(module)
            copy_as_usual(module)

    def _install(self) -> None:
        for module in self._modules:
            if install_override(module):
                self._installed.append(module)
                copy_plainly(module)
            elif not dispatches(module):
                raise ConfigError(
                    f"another library has replaced the forward method of a {type(module).__name__} in a feed-forward "
                    "network; it cannot be computed in parts"
                )


def _modules_of(index: int, layer: nn.Module, ffn: FFNCut) -> dict[nn.Module, _CutModule]:
    """Return the modules of one network."""
    if ffn.kind == "experts":
        experts = layer.get_submodule(ffn.module)
        return {experts: _CutModule(index, Experts.of(experts, ffn), summed=True, once="")}
    names = {cut.name for cut in ffn.cuts}
    modules = {}
    for cut in ffn.cuts:
        name, _, parameter = cut.name.rpartition(".")
        if parameter == "weight":
            last, bias = name == ffn.summed, f"{name}.bias"
            role = OuterMatrix(cut) if last else InnerMatrix(cut, bias if bias in names else "")
            once = "bias" if last and bias in ffn.once else ""
            modules[layer.get_submodule(name)] = _CutModule(index, role, last, once)
    return modules
