"""Frames as they come: whole, or the end of the stream."""

from __future__ import annotations

import socket

import pytest
import torch

from elastic.cluster.peers import frames
from elastic.cluster.peers.frames import EndOfStream, Frame, OrderlyEnd
from elastic.engines.pipeline.transport import Key, StepFailure


def read_back(*parts: bytes | memoryview) -> Frame:
    ours, theirs = socket.socketpair()
    with theirs, ours:
        theirs.sendall(b"".join(parts))
        theirs.shutdown(socket.SHUT_WR)
        return frames.read(ours)


def test_a_frame_is_read_as_it_was_written() -> None:
    hidden = torch.arange(6, dtype=torch.float32)
    frame = read_back(*frames.encode(Key(3, 4, 5), hidden))
    assert frame.key == Key(3, 4, 5)
    assert isinstance(frame.what, torch.Tensor)
    assert torch.equal(frame.what.view(torch.float32), hidden)
    failure = StepFailure("it fell over", "r1")
    assert read_back(*frames.encode_failure(7, failure)) == Frame(Key(7, 0), failure)


@pytest.mark.parametrize("text", [b"", b"{x}", b"[]", b"5", b'{"reason": "x", "other": 1}', b"\xff"])
def test_a_failure_that_is_none_is_the_end_of_the_stream(text: bytes) -> None:
    head, _ = frames.encode_failure(7, StepFailure("x"))
    beginning = bytes(head)[:-8]
    with pytest.raises(EndOfStream) as ended:
        read_back(beginning, (-1 - len(text)).to_bytes(8, "little", signed=True), text)
    assert not isinstance(ended.value, OrderlyEnd)


@pytest.mark.parametrize("nbytes", [frames.MOST_BYTES + 1, -frames.MOST_BYTES - 1])
def test_a_length_that_cannot_be_is_the_end_of_the_stream(nbytes: int) -> None:
    head, _ = frames.encode(Key(1, 2), torch.zeros(1))
    with pytest.raises(EndOfStream):
        read_back(bytes(head)[:-8], nbytes.to_bytes(8, "little", signed=True), b"more")
