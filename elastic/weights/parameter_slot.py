"""A parameter and the places in the modules where it sits; what it shows can be flipped."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from elastic.weights.proxy.tensor import WeightProxy, WeightSource

Content = nn.Parameter | WeightProxy
"""What can sit in a slot."""


class ParameterSlot:
    """One parameter. Its identity is kept through flips wherever torch allows it, so references follow."""

    def __init__(self, parameter: nn.Parameter, homes: tuple[tuple[nn.Module, str], ...]) -> None:
        self.parameter: nn.Parameter | WeightProxy = parameter
        self.homes = homes
        self.strides, self.device = parameter.stride(), parameter.device
        """As the user's model had them."""
        self.address: int | None = parameter.data_ptr()
        """Of the bytes that Elastic put in the slot; None for a `WeightProxy`, which has none."""
        self._outside: weakref.ref[nn.Parameter] | None = None
        """The user's parameter object, while another one has to be in its place."""

    def plain(self, data: torch.Tensor) -> nn.Parameter:
        """A parameter over `data`, for `show`: made beside forward passes, so that the flip is short."""
        with torch.inference_mode(False):
            return nn.Parameter(data, requires_grad=self.parameter.requires_grad)

    def weight(self, source: WeightSource) -> WeightProxy:
        """A weight without bytes, for `hide`: made beside forward passes."""
        return WeightProxy(self.parameter, source)

    def put(self, content: Content) -> None:
        """Have a parameter or a weight in the slot."""
        if isinstance(content, WeightProxy):
            self.set_proxy(content)
        else:
            self.set_parameter(content)

    def set_parameter(self, plain: nn.Parameter) -> None:
        """Have a plain parameter with this one's data in the slot."""
        self.address = plain.data_ptr()
        outside = self._outside() if self._outside else None
        if outside is not None:
            outside.data = plain.data
            self._put(outside)
            self._outside = None  # while there is one, torch refuses to exchange
        elif isinstance(self.parameter, WeightProxy):
            self._exchange(plain)
        else:
            self.parameter.data = plain.data

    def set_proxy(self, weight: WeightProxy) -> None:
        """Have a weight without bytes in the slot; what it showed until now is let go of."""
        self.address = None
        before = self.parameter
        self._exchange(weight)
        if self.parameter is not before and not isinstance(before, WeightProxy):
            self._outside = weakref.ref(before)

    def in_place(self) -> bool:
        """Whether the parameter has the bytes that Elastic gave it."""
        return self.address is None or self.parameter.data_ptr() == self.address

    def intact(self) -> bool:
        """Whether the modules have the parameter that Elastic put there, with its bytes."""
        return self.in_place() and all(m._parameters.get(name) is self.parameter for m, name in self.homes)

    def _exchange(self, other: nn.Parameter | WeightProxy) -> None:
        """Put `other` in place of the parameter: under the same Python object, or else as another object."""
        try:
            torch.utils.swap_tensors(self.parameter, other)  # type: ignore[no-untyped-call]
        except RuntimeError:  # somebody has a weak reference, or a graph has the tensor
            self._put(other)

    def _put(self, parameter: nn.Parameter | WeightProxy) -> None:
        for module, name in self.homes:
            module._parameters[name] = parameter  # type: ignore[assignment]
        self.parameter = parameter
