"""What is done between the matrices of a feed-forward network must be done element by element, to be done in parts.

Neither a plan nor shapes say so: it is tried, with columns of the inside that are larger in some parts than in others,
so that whatever is taken over all of them (a mean, a threshold, a norm) is another one in each part.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping

import torch
from torch import nn

from elastic.errors import ConfigError
from elastic.planning.sharding.cut_plan import CutPlan, FFNCut, ParameterCut

_RELATIVE, _ABSOLUTE = 0.02, 1e-5
"""A few roundings of half precision."""


def require_elementwise(layer: nn.Module, plan: CutPlan) -> None:
    """Raise `ConfigError` for a dense network of a layer whose parts do not compute what the whole does.

    No matrix is read. Not tried are networks that are no module of their own, that are called with more than hidden
    states, that are in training mode, where dropout draws, and whose other parameters have no data yet.
    """
    for ffn in plan.ffns:
        if ffn.kind == "dense" and ffn.module:
            tried = _TriedNetwork(layer.get_submodule(ffn.module), ffn)
            if tried.can_be_called:
                tried.compare(plan.parts)


class _TriedNetwork:
    """A dense network whose matrices give what is asked for."""

    def __init__(self, module: nn.Module, ffn: FFNCut) -> None:
        self._module, self._name = module, ffn.module
        cuts = {cut.name.rsplit(".", 2)[-2]: cut for cut in ffn.cuts if cut.name.endswith(".weight")}
        self._last = ffn.summed.rpartition(".")[2]
        self._outer = cuts.pop(self._last)
        self._inner = cuts

    @property
    def can_be_called(self) -> bool:
        """Whether it takes hidden states alone, and all that it has besides the matrices has data and draws nothing."""
        asked = [p for p in inspect.signature(type(self._module).forward).parameters.values() if p.default is p.empty]
        matrices = {*self._inner, self._last}
        others = (p for name, p in self._module.named_parameters() if name.partition(".")[0] not in matrices)
        return len(asked) == 2 and not self._module.training and not any(p.is_meta for p in others)

    @torch.no_grad()
    def compare(self, parts: int) -> None:
        """Raise `ConfigError` where a part's columns of the inside are not what they are among all."""
        columns = {name: _columns(cut) for name, cut in self._inner.items()}
        whole = self._inside(columns)
        for part in range(parts):
            own = self._inside({name: columns[name][..., _rows(cut, part)] for name, cut in self._inner.items()})
            if not torch.allclose(own, whole[..., _rows(self._outer, part)], _RELATIVE, _ABSOLUTE):
                raise ConfigError(
                    f"{self._name} ({type(self._module).__name__}) does not take the {whole.shape[-1]} elements of the "
                    "size inside one by one: what becomes of one depends on the others, so it cannot be computed in "
                    "parts"
                )

    def _inside(self, columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return what the network makes of columns of its inside, both [1, 1, columns]."""
        last = self._module.get_parameter(f"{self._last}.weight")
        like = torch.empty(0, dtype=last.dtype, device="cpu" if last.is_meta else last.device)
        given = {name: _StandIn(lambda _, each=each: each.to(like)) for name, each in columns.items()}  # type: ignore[misc]
        tried = copy.copy(self._module)
        tried._modules = {**self._module._modules, **given, self._last: _StandIn(_end)}
        hidden = like.new_zeros(1, 1, self._outer.shape[1 - self._outer.dim])
        try:
            type(self._module).forward(tried, hidden)
        except _Inside as end:
            inside: torch.Tensor = end.args[0]
            return inside.cpu().float()
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise self._not_by_modules(repr(error)) from error
        raise self._not_by_modules(f"it does not call {self._last}")

    def _not_by_modules(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self._name} ({type(self._module).__name__}) does not call its matrices as modules, so it cannot be "
            f"computed in parts: {why}"
        )


class _StandIn(nn.Module):
    """Stands for a matrix: `compute` is called in its place."""

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.forward = compute


class _Inside(Exception):
    """The end of a network that came to its last matrix, with what that was given: columns, [1, 1, columns]."""


def _end(inside: torch.Tensor) -> torch.Tensor:
    raise _Inside(inside)


def _columns(cut: ParameterCut) -> torch.Tensor:
    """Make the columns that a matrix gives, [1, 1, columns]: of part p from -p - 1 to p + 1."""
    columns = torch.empty(1, 1, cut.shape[cut.dim])
    for part, runs in enumerate(cut.rows):
        for rows in runs:
            columns[..., rows.start : rows.stop] = torch.linspace(-part - 1, part + 1, len(rows))
    return columns


def _rows(cut: ParameterCut, part: int) -> list[int]:
    return [row for rows in cut.rows[part] for row in rows]
