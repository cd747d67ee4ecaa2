"""A program that captures CUDA graphs beside a wrapped model: what cannot be captured is refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from elastic import StateError
from elastic.kvcache.decode_table import DecodeKernelTable
from elastic.kvcache.decode_timing import DEFAULT, DecodeShape, processor
from elastic.memory.pages.background import janitor
from support.architectures import build, prompt

pytestmark = pytest.mark.cuda
DEVICE = torch.device("cuda:0")


def captured(work: Callable[[], Any]) -> Any:
    """Capture an addition, and do some work meanwhile; the capture must come to its end.

    Pages that are made beside it would end it, as docs/limits.md says: those that are on their way are waited for.
    """
    tensor = torch.zeros(1, device=DEVICE)
    janitor.finish()
    janitor.start()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        tensor.add_(1)
        return work()


@pytest.mark.parametrize("verb", ["forward", "release", "resize"])
def test_what_is_refused_changes_nothing_and_leaves_the_capture_valid(verb: str, wrapped: Any) -> None:
    model, inputs = build("llama-gqa", device=DEVICE), prompt(2, device=DEVICE)
    expected = model(**inputs).logits
    rt = wrapped(model).elastic
    refused: dict[str, Callable[[], Any]] = {
        "forward": lambda: model(**inputs),
        "release": lambda: rt.release([0]),
        "resize": lambda: rt.kv.resize(64 << 20),
    }

    def work() -> None:
        with pytest.raises(StateError, match="CUDA graph"):
            refused[verb]()

    captured(work)
    assert rt.form() == ("float32",) * 3
    assert torch.equal(model(**inputs).logits, expected)


def test_a_kernel_of_attention_that_is_not_known_yet_is_not_measured_in_a_capture() -> None:
    table, shape = DecodeKernelTable(), DecodeShape(processor(DEVICE), torch.float32, 2, 8, 8, "token_major")
    assert captured(lambda: table.choose(shape, 5, DEVICE, 2)) == DEFAULT
    assert not table._entries
    table.choose(shape, 5, DEVICE, 2)
    assert table._entries
