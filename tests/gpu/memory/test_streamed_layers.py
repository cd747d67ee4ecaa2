"""Released layers on a GPU: prefetch buffers that threads, streams and autograd share."""

from __future__ import annotations

import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import elastic
from support.architectures import build, prompt
from support.child_process import in_child
from support.wrapped_model import assert_same_bits, bits

pytestmark = pytest.mark.cuda
HERE = "cuda:0"

TWO_THREADS = """
    import sys, threading
    import torch
    sys.path[:0] = {paths!r}
    import elastic
    from support.architectures import build, prompt
    from support.wrapped_model import assert_same_bits, bits

    torch.set_num_threads(1)
    model, options = build("llama-gqa", device="cuda:0"), dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    inputs, before = [prompt(2, seed=seed, device="cuda:0") for seed in range(2)], bits(model)
    expected = [model.generate(**each, **options).tolist() for each in inputs]
    rt = elastic.wrap(model, places=["cuda:0=256MiB"]).elastic
    rt.release([0, 1, 2])
    torch.cuda.synchronize()

    found = {{}}

    def generate(which):
        with torch.cuda.stream(torch.cuda.Stream() if which else torch.cuda.default_stream()):
            found[which] = [model.generate(**inputs[which], **options).tolist() for _ in range(3)]

    threads = [threading.Thread(target=generate, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for layer in (1, 0, 1):
        rt.restore([layer])
        rt.release([layer])
    for thread in threads:
        thread.join()
    assert found == {{i: [expected[i]] * 3 for i in range(2)}}
    elastic.unwrap(model)
    assert_same_bits(model, before)
"""


def test_two_threads_generate_on_streams_of_their_own_through_the_same_buffers() -> None:
    in_child(textwrap.dedent(TWO_THREADS).format(paths=[str(Path(__file__).parents[2])]))


def gradient(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the log of the summed exponentials of the logits, with respect to the embeddings."""
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    logits = model(inputs_embeds=embeddings, attention_mask=inputs["attention_mask"]).logits
    logits.logsumexp(-1).sum().backward()
    assert embeddings.grad is not None
    return embeddings.grad


@pytest.mark.parametrize("side", [False, True])
def test_gradients_flow_through_streamed_layers(side: bool, wrapped: Any, simulator: ModuleType) -> None:
    """What autograd keeps of a buffer is not overwritten, and dies on a thread of its own."""
    model, inputs = build("llama-gqa", device=HERE), prompt(2, device=HERE)
    before, expected = bits(model), gradient(model, inputs)
    rt = wrapped(model).elastic
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.default_stream()):
        for released in ([], [1], [0, 1, 2]):
            rt.release(released)
            torch.testing.assert_close(gradient(model, inputs), expected, rtol=1e-4, atol=1e-4)
            rt.restore()
    rt.check()
    elastic.unwrap(model)
    assert_same_bits(model, before)


def test_weights_return_at_a_pace_beside_a_generation(wrapped: Any) -> None:
    model, inputs = build("llama-gqa", device=HERE), prompt(2, device=HERE)
    before, expected = bits(model), model(**inputs).logits
    rt = wrapped(model, variants=["int8"], copy_rate="1GB").elastic
    for change in (lambda: rt.release([0, 1, 2]), lambda: rt.restore([0, 2]), lambda: rt.swap([0], "int8"), rt.restore):
        change()
        logits = model(**inputs).logits
    assert torch.equal(logits, expected)
    assert_same_bits(model, before)
