"""Copies of a wrapped model are plain, and have all that is the user's own."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch

import elastic
from elastic.engines.pipeline.forward import StageForward
from elastic.engines.pipeline.turn import Turn
from support.architectures import build, prompt


def test_a_table_of_the_users_own_is_copied_as_it_is(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"))
    layer = model.model.layers[0]
    layer.counts = OrderedDict.fromkeys((*layer._forward_hooks, *layer._forward_pre_hooks), "counted")
    copied = copy.deepcopy(model).model.layers[0]
    assert copied.counts == layer.counts
    assert not copied._forward_hooks


class ByName:
    """A model that is copied by how it was made."""

    def __reduce__(self) -> tuple[Any, ...]:
        return build, ("llama-gqa",)


class InAList:
    """A model whose state is no dictionary."""

    def __getstate__(self) -> Any:
        return list(vars(self).items())

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state)


class ByItself:
    """A model that copies what it has."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = other = type(self).__new__(type(self))
        other.__dict__ = copy.deepcopy(vars(self), memo)
        return other


@pytest.mark.parametrize("kind", [ByName, InAList, ByItself])
def test_a_class_may_say_how_it_is_copied(kind: type, wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model(**prompt()).logits
    model.__class__ = type("Theirs", (kind, type(model)), {})
    other = copy.deepcopy(wrapped(model))
    assert torch.equal(other(**prompt()).logits, expected)
    assert getattr(other, "elastic", None) is None
    assert model.elastic.kv.used_bytes == 0


def test_an_adapter_around_a_model_with_an_engine_is_copied(wrapped: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(wrapped(build("llama-gqa")), config).eval().requires_grad_(False)
    expected = model(**prompt()).logits
    with elastic.ContinuousEngine(model):
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in copies:
        assert torch.equal(other(**prompt()).logits, expected)


def test_a_copy_of_a_model_whose_layers_are_cut_is_plain(wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"), shards=2)
    expected = model(**prompt()).logits
    forward = StageForward(model, Turn())
    try:
        other = copy.deepcopy(model)
        assert b"elastic" not in pickle.dumps(model)
    finally:
        forward.close()
    assert not any("forward" in vars(module) for module in other.modules())
    assert not any("__reduce_ex__" in vars(module) for module in model.model.layers[0].mlp.modules())
    assert torch.equal(other(**prompt()).logits, expected)
