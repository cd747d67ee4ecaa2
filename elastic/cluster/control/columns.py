"""The outputs of a step as columns: they are sent after every step, and most of them are one token and nothing else."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from elastic.engines.base import Output


class Columns(NamedTuple):
    """Outputs in a form that is pickled soon."""

    at_s: float
    weights: int
    requests: tuple[str, ...]
    """Of outputs that are one token at that time by those weights, and nothing else; the others are in `rest`."""
    numbers: bytes
    """Their tokens, then their answers' indices, 64 bits each."""
    rest: tuple[tuple[int, Output], ...]
    """With their positions among all."""


def to_columns(outputs: Sequence[Output]) -> Columns:
    """Return the columns of outputs."""
    at_s, weights = (outputs[0].at_s, outputs[0].weights) if outputs else (0.0, 0)
    requests, tokens, indices, rest = [], array("q"), array("q"), []
    for position, output in enumerate(outputs):
        if (  # one by one: it is a fifth of the time of a comparison of dictionaries
            output.finish is None
            and output.cached_tokens is None
            and output.scheduled_s is None
            and output.waited_for_kv_s is None
            and output.prompt_logprobs is None
            and output.error is None
            and not output.logprobs
            and output.at_s == at_s
            and output.weights == weights
            and len(output.tokens) == 1
        ):
            requests.append(output.request)
            tokens.append(output.tokens[0])
            indices.append(output.index)
        else:
            rest.append((position, output))
    return Columns(at_s, weights, tuple(requests), (tokens + indices).tobytes(), tuple(rest))


def from_columns(columns: Columns) -> tuple[Output, ...]:
    """Return the outputs of columns."""
    at_s, weights, requests, numbers, rest = columns
    values = array("q", numbers)
    plain = vars(Output("", (), at_s=at_s, weights=weights))
    outputs = []
    for request, token, index in zip(requests, values, values[len(requests) :], strict=False):
        output = object.__new__(Output)  # as pickle makes it: a third of the time of its constructor
        output.__dict__.update(plain, request=request, tokens=(token,), index=index)
        outputs.append(output)
    for position, other in rest:
        outputs.insert(position, other)
    return tuple(outputs)
