"""The decoder's layers are found in a model of several towers, and not those of another tower."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from elastic.weights.decoder import find_decoder

TEXT: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
VISION: dict[str, Any] = {"hidden_size": 32, "num_heads": 4, "out_hidden_size": 32, "fullatt_block_indexes": [1]}


def qwen_vl(layers: int) -> Any:
    """A model whose vision tower has as many blocks, which are larger."""
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    text = TEXT | {"num_hidden_layers": layers, "num_key_value_heads": 2, "rope_scaling": rope}
    vision = VISION | {"depth": layers, "intermediate_size": 480}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=94, video_token_id=93)
    )


def llava(layers: int) -> Any:
    """The same of configs that are no dicts, which the model copies."""
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=480,
        num_hidden_layers=layers,
        num_attention_heads=4,
        image_size=32,
        patch_size=16,
    )
    text = LlamaConfig(**TEXT, num_hidden_layers=layers)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_index=95))


@pytest.mark.parametrize("build", [qwen_vl, llava])
def test_layers_are_those_of_the_text_where_a_vision_tower_has_as_many(build: Any) -> None:
    decoder = find_decoder(build(2))
    assert list(decoder.layer_names) == [f"model.language_model.layers.{index}" for index in range(2)]
