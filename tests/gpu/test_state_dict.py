"""Weights that are not in a GPU's pages, as whoever saves or copies the model sees them: on its device, all bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import elastic
from support.architectures import build
from support.wrapped_model import assert_same_bits, bits, small

DEVICE = torch.device("cuda", 0)


@pytest.mark.cuda
def test_released_and_swapped_layers_are_saved_from_the_models_device(wrapped: Any, tmp_path: Path) -> None:
    model = build("llama-gqa", device="cuda:0")
    before = bits(model)
    rt = wrapped(model, [elastic.Place("cuda:0", DEVICE, 1 << 30)], variants=("int8",)).elastic
    rt.release([0])
    rt.swap([1], "int8")
    assert {tensor.device for tensor in model.state_dict().values()} == {DEVICE}
    assert {parameter.detach().device for parameter in model.parameters()} == {DEVICE}
    assert_same_bits(model, before)
    model.save_pretrained(tmp_path)
    saved = type(model).from_pretrained(tmp_path)
    assert_same_bits(saved, {name: tensor.cpu() for name, tensor in before.items()})


@pytest.mark.cuda
def test_a_released_layer_that_moved_to_a_cpu_is_there(wrapped: Any) -> None:
    model = build("llama-gqa", device="cuda:0")
    before = bits(model)
    rt = wrapped(model, [elastic.Place("cuda:0", DEVICE, 1 << 30), small(64 << 20)]).elastic
    rt.release([0])
    rt.migrate(0, "cpu")
    state = model.state_dict()
    assert {state[name].device.type for name in state if name.startswith("model.layers.0.")} == {"cpu"}
    rt.migrate(0, "cuda:0")
    assert_same_bits(model, before)


@pytest.mark.cuda
def test_a_device_without_room_for_a_copy_leaves_it_in_host_memory(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a model which is larger than its device can be saved."""
    model = build("llama-gqa", device="cuda:0")
    before = bits(model)
    rt = wrapped(model, [elastic.Place("cuda:0", DEVICE, 64 << 20)]).elastic
    rt.release([0])
    to = torch.Tensor.to

    def no_room(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args == (DEVICE,):
            raise torch.OutOfMemoryError("injected")
        return to(tensor, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", no_room)
        state = model.state_dict()
    assert {state[name].device.type for name in state if name.startswith("model.layers.0.")} == {"cpu"}
    assert all(torch.equal(state[name].cpu(), tensor.cpu()) for name, tensor in before.items())
