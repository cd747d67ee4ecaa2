"""Running the layers of a model one at a time, and what comes after them as the model itself does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from elastic.errors import ConfigError

Forward = Callable[..., Any]


class LayerTrace:
    """One batch on its way through a model: what each layer was called with, so that any layer can be run again alone.

    The model is run once, here. `ids` are token ids, int64 [sequences, tokens], without padding.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], ids: torch.Tensor) -> None:
        self._model = model
        self._layers = layers
        self._ids = ids
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._results: list[Any] = []
        with self._recording():
            self.logits: torch.Tensor = self._forward()
        """[sequences, tokens, vocabulary], in the dtype of the model."""
        if len(self._calls) != len(layers):
            raise ConfigError(
                f"{type(model).__name__} called its {len(layers)} decoder layers {len(self._calls)} times in one pass; "
                "only models that call each once can be profiled"
            )
        self.states = [_hidden(*call) for call in self._calls] + [first(self._results[-1])]
        """The hidden states that each layer was given, and what the last one returned: [sequences, tokens, hidden]."""
        self.outputs = [first(result) for result in self._results]
        """What each layer returned."""

    @property
    def ids(self) -> torch.Tensor:
        return self._ids

    def run(self, index: int, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """What a layer, or another in its place, returns for these hidden states."""
        args, kwargs = self._calls[index]
        if args:
            return first(layer(hidden, *args[1:], **kwargs))
        return first(layer(**{**kwargs, "hidden_states": hidden}))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits that the model makes of what the last layer returned: its own forward, with no layer run."""
        skipped: list[Forward] = [lambda *args, result=r, **kw: result for r in self._results[:-1]]
        last = _with_first(self._results[-1], hidden)
        with replaced_forwards(dict(zip(self._layers, [*skipped, lambda *args, **kw: last], strict=True))):
            return self._forward()

    def whole(self, changed: Mapping[int, nn.Module]) -> torch.Tensor:
        """The logits of a plain pass of the model, with other layers in some places."""
        with replaced_forwards({self._layers[i]: layer.forward for i, layer in changed.items()}):
            return self._forward()

    def why_not_alone(self, zeroth: nn.Module, one_by_one: torch.Tensor) -> str | None:
        """None, or in words why layers cannot be run one by one: they share more than hidden states.

        With layer 0 replaced by `zeroth`, layers run one by one made logits that must be those of a plain pass. Then
        each layer alone, the last first, is given what it was given at the outset: what others left behind since must
        not matter.
        """
        plain = self.whole({0: zeroth})
        if _apart(one_by_one, plain) > 0.01 * _apart(plain, self.logits) + _tolerance(plain):
            return "one by one they make other logits than in a plain pass"
        for i in reversed(range(len(self._layers))):
            again = self.run(i, self._layers[i], self.states[i])
            if _apart(again, self.outputs[i]) > _tolerance(again):
                return f"layer {i} alone does not return what it did in a plain pass"
            if not torch.equal(self.outputs[i], self.states[i + 1]):
                return f"what layer {i} returns is not what the next one is given"
        return None

    def _forward(self) -> torch.Tensor:
        logits: torch.Tensor = self._model(self._ids, use_cache=False, return_dict=True).logits
        return logits

    @contextmanager
    def _recording(self) -> Iterator[None]:
        with ExitStack() as stack:
            for layer in self._layers:
                before = layer.register_forward_pre_hook(self._on_call, with_kwargs=True, prepend=True)
                stack.callback(before.remove)
                stack.callback(layer.register_forward_hook(self._on_return).remove)
            yield

    def _on_call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.append((args, dict(kwargs)))

    def _on_return(self, layer: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        self._results.append(result)


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Have modules call other functions in place of their `forward`; hooks on them still run."""
    with ExitStack() as stack:
        for module, forward in forwards.items():
            own = module.__dict__.get("forward")
            stack.callback(_reset_forward, module, own)
            module.forward = forward
        yield


@contextmanager
def as_for_inference(model: nn.Module) -> Iterator[None]:
    """No gradients, and evaluation mode; each module's mode is put back."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm())


def _tolerance(x: torch.Tensor) -> float:
    """For what the same operations on the same numbers may differ by on an accelerator."""
    return max(1e-5, torch.finfo(x.dtype).eps) * float(x.double().norm())


def _reset_forward(module: nn.Module, own: Forward | None) -> None:
    del module.forward
    if own is not None:
        module.forward = own


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def first(result: Any) -> torch.Tensor:
    """The hidden states among what a layer returned."""
    hidden: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return hidden


def _with_first(result: Any, hidden: torch.Tensor) -> Any:
    return (hidden, *result[1:]) if isinstance(result, tuple) else hidden
