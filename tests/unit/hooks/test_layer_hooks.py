"""Layer hooks that do nothing while all layers are plain, and their work as soon as one is not."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from support.architectures import build, prompt


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**prompt(1), use_cache=False).logits


def plain_during(model: Any) -> list[bool]:
    """Return what the model's hooks say of their pass, as seen by each layer in one pass."""
    thread, seen = model.elastic.gate.thread, []
    hooks = [layer.register_forward_pre_hook(lambda *_: seen.append(thread.plain)) for layer in model.model.layers]
    logits(model)
    for hook in hooks:
        hook.remove()
    assert not thread.plain
    return seen


def test_a_pass_is_plain_until_a_commit_changes_a_layer(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    layers = len(model.model.layers)
    assert plain_during(model) == [True] * layers
    model.elastic.release([1])
    assert plain_during(model) == [False] * layers
    model.elastic.restore([1])
    assert plain_during(model) == [True] * layers


def test_a_layer_released_while_its_pass_is_suspended_is_streamed(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    expected, rt = logits(model), model.elastic

    def wait_for_others(*_: Any) -> None:
        with rt.gate.suspended():
            thread = threading.Thread(target=rt.release, args=([1],))
            thread.start()
            thread.join()

    first, second = model.model.layers[:2]
    unit, streamed = rt.weights.layers[1], []
    hooks = [
        first.register_forward_hook(wait_for_others),
        second.mlp.register_forward_hook(lambda *_: streamed.append(unit.prefetched.tensors is not None)),
    ]
    torch.testing.assert_close(logits(model), expected)
    for hook in hooks:
        hook.remove()
    assert rt.form()[1] == "absent"
    assert streamed == [True]


def test_a_plain_layer_called_by_itself_keeps_commits_out(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    logits(model)
    gate, inside = model.elastic.gate, []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: inside.append((gate.inside, gate.thread.plain)))
    hidden = torch.randn(1, 3, model.config.hidden_size)
    embeddings = model.model.rotary_emb(hidden, torch.arange(3)[None])
    with torch.no_grad():
        model.model.layers[0](hidden, position_embeddings=embeddings)
    assert inside == [(True, False)]
    assert not gate.inside


def test_a_buffer_that_a_pass_was_interrupted_in_is_left_also_when_all_layers_are_back(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    expected, rt = logits(model), model.elastic
    (streamer,) = rt.weights.streamers.values()
    rt.release([1])

    def interrupt(*_: Any) -> None:  # Ctrl-C: torch calls no hook behind it
        raise KeyboardInterrupt

    hook = model.model.layers[1].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits(model)
    hook.remove()
    assert [len(buffer.users) for buffer in streamer.buffers if buffer.layer is rt.weights.layers[1]] == [1]
    restored = rt.restore([1], wait=False)  # it waits for that pass, which the next one ends
    torch.testing.assert_close(logits(model), expected)
    assert [change.status for change in restored.result()] == ["applied"]
    assert torch.equal(logits(model), expected)
    assert not any(buffer.users for buffer in streamer.buffers)
    assert plain_during(model) == [True] * len(model.model.layers)
