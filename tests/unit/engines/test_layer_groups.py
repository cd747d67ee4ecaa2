from __future__ import annotations

from transformers import MistralConfig

from elastic.engines.executor.layer_groups import LayerGroup, layer_groups
from support.architectures import GQA


def test_layers_with_windows_of_their_own_are_groups_of_their_own() -> None:
    """A config may have other values for some layers, and then refuses to be asked for one of all."""
    config = MistralConfig(**GQA, sliding_window=16, per_layer_config={1: {"sliding_window": 8}})
    assert layer_groups(config) == (LayerGroup((0, 2), 16), LayerGroup((1,), 8))
    assert layer_groups(MistralConfig(**GQA, sliding_window=None)) == (LayerGroup((0, 1, 2), None),)
