"""A recorded pass through a model, from which any of its layers can be run again alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from elastic.errors import ConfigError

Forward = Callable[..., Any]


class LayerTrace:
    """One batch on its way through a model: the calls of its layers, so that any layer can be run again alone.

    The model is run once, in the constructor. ids: [sequences, tokens], int64 token ids, without padding.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], ids: torch.Tensor) -> None:
        self._model = model
        self._layers = layers
        self.ids = ids
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
        inputs: list[torch.Tensor] = [args[0] if args else kwargs["hidden_states"] for args, kwargs in self._calls]
        self.states = [*inputs, first(self._results[-1])]
        """The hidden states that each layer was given, and the last one's: [sequences, tokens, hidden]."""
        self.outputs = [first(result) for result in self._results]
        """The hidden states that each layer returned, [sequences, tokens, hidden]."""

    def run(self, index: int, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Run a layer, or another in its place, on hidden: [sequences, tokens, hidden]; returns the same shape."""
        args, kwargs = self._calls[index]
        if args:
            return first(layer(hidden, *args[1:], **kwargs))
        return first(layer(**{**kwargs, "hidden_states": hidden}))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the model with no layer, on the last layer's output, hidden: [sequences, tokens, hidden].

        Returns its logits, [sequences, tokens, vocabulary].
        """
        skipped: list[Forward] = [lambda *args, result=r, **kw: result for r in self._results[:-1]]
        result = self._results[-1]
        last = (hidden, *result[1:]) if isinstance(result, tuple) else hidden
        with replaced_forwards(dict(zip(self._layers, [*skipped, lambda *args, **kw: last], strict=True))):
            return self._forward()

    def whole(self, changed: Mapping[int, nn.Module]) -> torch.Tensor:
        """Run the whole model with other layers in some places; returns logits, [sequences, tokens, vocabulary]."""
        with replaced_forwards({self._layers[i]: layer.forward for i, layer in changed.items()}):
            return self._forward()

    def shared_state_of(self, zeroth: nn.Module, one_by_one: torch.Tensor) -> str | None:
        """Return None, or in words why layers cannot be run one by one: they share more than hidden states.

        With layer 0 replaced by `zeroth`, layers run one by one made these logits, [sequences, tokens, vocabulary],
        which must be those of a plain pass. Then each layer alone, the last first, is given its recorded input again:
        what others left behind since must not matter.
        """
        plain = self.whole({0: zeroth})
        if _distance(one_by_one, plain) > 0.01 * _distance(plain, self.logits) + _tolerance(plain):
            return "one by one they make other logits than in a plain pass"
        for i in reversed(range(len(self._layers))):
            again = self.run(i, self._layers[i], self.states[i])
            if _distance(again, self.outputs[i]) > _tolerance(again):
                return f"layer {i} alone does not return what it did in a plain pass"
            if not torch.equal(self.outputs[i], self.states[i + 1]):
                return f"what layer {i} returns is not what the next one is given"
        return None

    def _forward(self) -> torch.Tensor:
        logits: torch.Tensor = self._model(self.ids, use_cache=False, return_dict=True).logits
        return logits

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Keep the arguments and the result of each layer's call."""
        with ExitStack() as stack:
            for layer in self._layers:
                before = layer.register_forward_pre_hook(
                    lambda layer, args, kwargs: self._calls.append((args, dict(kwargs))), with_kwargs=True, prepend=True
                )
                stack.callback(before.remove)
                after = layer.register_forward_hook(lambda layer, args, result: self._results.append(result))
                stack.callback(after.remove)
            yield


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Have modules call other functions in place of their `forward`; hooks on them still run."""
    overrides = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, override in overrides.items():
            del module.forward
            if override is not None:
                module.forward = override


def first(result: Any) -> torch.Tensor:
    """Return the hidden states, [sequences, tokens, hidden], among the results of a layer."""
    hidden: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return hidden


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm())


def _tolerance(x: torch.Tensor) -> float:
    """Return how far the same operations on the same numbers may differ on an accelerator."""
    return max(1e-5, torch.finfo(x.dtype).eps) * float(x.double().norm())
