"""A computation as the operators that it called, recorded once and called again over the same memory.

On a CPU, what a CUDA graph is on a GPU: Python, and operators that only make views, are gone through once. The same
operators are called with tensors of the same shapes and strides, so every bit is as it would be without the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from elastic.engines.executor.graphs.graph_memory import GraphMemory, assign_buffers, storage_of
from elastic.engines.executor.kernels.elementwise import ElementwiseProgram, Instruction, elementwise_library, translate
from elastic.quant.kernels.compiled.integer_matmul import FIXED
from elastic.quant.kernels.compiled.integer_matmul import recorder as products

T = TypeVar("T")

_aten = torch.ops.aten
_UNFILLED = {_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided}
"""What they return has no contents yet."""
_READERS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__}
"""They read a tensor into Python, and are no operators."""
_MASKS = (torch.bool, torch.uint8)
_REFUSED = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class CaptureRefused(Exception):
    """A computation that would not be the same again: it draws random numbers, or looks at what is in its tensors."""


class Operator(NamedTuple):
    """A call of a function."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[torch.Tensor, ...] = ()
    """What it returns is copied to; empty: it writes into its arguments."""


class OperatorGraph:
    """A computation, captured once. It holds all tensors that it works on. For one thread."""

    def __init__(self) -> None:
        self._operators: list[Operator] = []
        self._output: Any = None
        self._recorder: _OperatorRecorder | None = None  # in a capture

    def capture(self, run: Callable[[], T], memory: GraphMemory) -> T:
        """Run a computation and record it; return what it returned. What replays compute lies in buffers of `memory`.

        Raises `CaptureRefused` where a replay would not be the same computation.
        """
        recorder = self._recorder = _OperatorRecorder()
        products.active = True
        try:
            with _RefuseReading(recorder), recorder:
                output = run()
        finally:
            products.active, self._recorder = False, None
        kept = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        calls = [_tensors(each.args, *each.kwargs.values(), each.results) for each in recorder.operators]
        move = assign_buffers(calls, kept, recorder.created, memory)
        moved = [
            Operator(
                each.function,
                _moved(each.args, move),
                {name: _moved(value, move) for name, value in each.kwargs.items()},
                _moved(each.results, move),
            )
            for each in recorder.operators
        ]
        self._operators = [_at_fixed_addresses(each) for each in _with_programs(moved)]
        self._output = tree_map_only(torch.Tensor, move, output)
        return output

    def call(self, function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        """In a capture: call a function that replays call as it is, with the same arguments; return its result.

        Arguments and result have any shapes, the same each time.
        """
        recorder = self._recorder
        assert recorder is not None
        recorder.paused = True
        try:
            result = function(*args).contiguous()
        finally:
            recorder.paused = False
        recorder.operators.append(Operator(function, args, {}, (result,)))
        recorder.created.append(result)
        return result

    def replay(self) -> Any:
        """Compute again, with what is in the captured inputs now; return what `run` did, in tensors of replays."""
        for function, args, kwargs, results in self._operators:
            returned = function(*args, **kwargs)
            if results:
                for result, value in zip(results, _tensors(returned), strict=True):
                    result.copy_(value)
        return self._output


class _OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators that fill memory, as they are called: views of it stay good."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []
        self.created: list[torch.Tensor] = []
        """In memory of their own, by operators."""
        self.paused = False

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        tensors = _tensors(args, *kwargs.values())
        # indexing tells its shape from contents only where it is by masks
        by_number = func is _aten.index.Tensor and not any(index.dtype in _MASKS for index in tensors[1:])
        if not _REFUSED.isdisjoint(func.tags) and not by_number:
            raise CaptureRefused(f"it calls {func}")
        if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in tensors):
            raise CaptureRefused(f"it calls {func} with tensors of a class of their own")
        output = func(*args, **kwargs)
        if func._schema.is_mutable:
            self.operators.append(Operator(func, args, kwargs))
            return output
        given = {storage_of(tensor) for tensor in tensors}
        new = tuple(tensor for tensor in _tensors(output) if storage_of(tensor) not in given)
        if any(tensor.layout is not torch.strided for tensor in new):
            raise CaptureRefused(f"{func} returns a tensor without strides")
        self.created.extend(new)
        if new and func.overloadpacket not in _UNFILLED:
            self.operators.append(_filling(func, args, kwargs, new))
        return output


class _RefuseReading(TorchFunctionMode):
    """Refuses functions that read a tensor without an operator."""

    def __init__(self, recorder: _OperatorRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READERS and not self._recorder.paused:
            raise CaptureRefused(f"it calls {func}")
        return func(*args, **(kwargs or {}))


def _with_programs(operators: list[Operator]) -> list[Operator]:
    """Return operators with those on elements, as many as follow one another, as one program each."""
    library = elementwise_library()
    if library is None:
        return operators
    joined: list[Operator] = []
    instructions: list[Instruction] = []
    tensors: list[torch.Tensor] = []
    for operator in [*operators, None]:
        translated = None if operator is None else translate(*operator)
        if operator is not None and translated is not None:
            instructions += translated
            tensors += _tensors(operator.args, *operator.kwargs.values(), operator.results)
            continue
        if instructions:
            joined.append(Operator(ElementwiseProgram(library, instructions, tensors), (), {}))
            instructions, tensors = [], []
        if operator is not None:
            joined.append(operator)
    return joined


def _at_fixed_addresses(operator: Operator) -> Operator:
    """Return a product with integers as a call that looks no address up again; it keeps its arguments, which live."""
    fixed = FIXED.get(operator.function)
    return operator if fixed is None else operator._replace(function=fixed(*operator.args, **operator.kwargs))


def _filling(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], new: tuple[torch.Tensor, ...]) -> Operator:
    """Return the call that computes what an operator returned, where it lies: by its out= form if it has one."""
    overload, written = _out_form(func) if len(new) == 1 else (None, "")
    return (
        Operator(func, args, kwargs, new) if overload is None else Operator(overload, args, {**kwargs, written: new[0]})
    )


@functools.cache
def _out_form(func: Any) -> tuple[Any, str]:
    """Return the overload of an operator that writes its one result into an argument, and which; None: it has none."""
    given = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        written = [argument.name for argument in overload._schema.arguments if argument.is_out]
        others = [(argument.name, str(argument.type)) for argument in overload._schema.arguments if not argument.is_out]
        if len(written) == 1 and others == given:
            return overload, written[0]
    return None, ""


def _tensors(*values: Any) -> list[torch.Tensor]:
    """List the tensors among values, and in lists and tuples of them."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors.extend(_tensors(*value))
    return tensors


def _moved(value: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with other tensors in the places of those that `_tensors` lists."""
    if isinstance(value, torch.Tensor):
        return move(value)
    return type(value)(_moved(each, move) for each in value) if isinstance(value, list | tuple) else value
