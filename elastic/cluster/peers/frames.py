"""Tensors as bytes on a stream: a head of four numbers, then the elements as they are in memory."""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import asdict
from typing import NamedTuple

import torch

from elastic.cluster.control.connection import receive_into
from elastic.cluster.peers.mailbox import What
from elastic.engines.pipeline.transport import Key, StepFailure

_HEAD = struct.Struct("<qqqq")  # step, layer, site, bytes; of a failure -1 - bytes
MOST_BYTES = 1 << 32
"""The bound on one frame."""
_GOODBYE = -(1 << 62)
GOODBYE = _HEAD.pack(0, 0, 0, _GOODBYE)
"""The last frame of an end that was closed: it is not lost."""


class Frame(NamedTuple):
    """What came for a key; a failure is one of the whole step."""

    key: Key
    what: What


class EndOfStream(Exception):
    """The stream is at its end, or what comes on it is no frame."""


class OrderlyEnd(EndOfStream):
    """The other end has said that it ends the stream."""


def encode(key: Key, hidden: torch.Tensor) -> list[memoryview]:
    """Return the parts of a frame, of a tensor of any shape: views of it, if it is contiguous and in host memory."""
    elements = hidden.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return [memoryview(_HEAD.pack(*key, elements.numel())), memoryview(elements.numpy())]  # type: ignore[arg-type]


def encode_failure(step: int, failure: StepFailure) -> list[memoryview]:
    """Return the parts of the frame of a failure."""
    text = json.dumps(asdict(failure)).encode()
    return [memoryview(_HEAD.pack(*Key(step, 0), -1 - len(text))), memoryview(text)]


def read(stream: socket.socket) -> Frame:
    """Return the next frame. Raises `EndOfStream`, also where what comes is none: nothing after it can be trusted."""
    *numbers, nbytes = _HEAD.unpack(_read_bytes(stream, _HEAD.size).numpy().tobytes())
    if nbytes == _GOODBYE:
        raise OrderlyEnd
    if not -MOST_BYTES <= nbytes <= MOST_BYTES:
        raise EndOfStream
    if nbytes < 0:
        text = _read_bytes(stream, -1 - nbytes).numpy().tobytes()
        try:
            return Frame(Key(*numbers), StepFailure(**json.loads(text)))
        except (ValueError, TypeError):
            raise EndOfStream from None
    return Frame(Key(*numbers), _read_bytes(stream, nbytes))


def _read_bytes(stream: socket.socket, count: int) -> torch.Tensor:
    """Return so many bytes, [bytes]; the memory is aligned for elements of any type."""
    elements = torch.empty(count, dtype=torch.uint8)
    try:
        receive_into(stream, memoryview(elements.numpy()))  # type: ignore[arg-type]
    except OSError:
        raise EndOfStream from None
    return elements
