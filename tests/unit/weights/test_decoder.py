"""The decoder's layers are found in a model of several towers, and not those of another tower."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    BartConfig,
    BartForCausalLM,
    CLIPVisionConfig,
    InstructBlipConfig,
    InstructBlipForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from elastic.errors import ConfigError
from elastic.weights.decoder import batch_context_length, context_length, find_decoder, layer_configs

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


def test_a_decoder_of_a_pair_has_its_own_number_of_layers() -> None:
    sizes: dict[str, Any] = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 96}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = BartConfig(**sizes, **heads, encoder_layers=4, decoder_layers=2, is_decoder=True, is_encoder_decoder=False)
    decoder = find_decoder(BartForCausalLM(config))
    assert len(decoder.layers) == len(layer_configs(decoder.config)) == 2


def test_an_encoder_with_a_decoder_inside_another_model_is_refused() -> None:
    """InstructBLIP's own config does not say what its language model is."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    t5 = {"model_type": "t5", "vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    queries = {**TEXT, "num_hidden_layers": 1, "encoder_hidden_size": 32}
    sizes = {**vision, "image_size": 28, "patch_size": 14}
    model = InstructBlipForConditionalGeneration(
        InstructBlipConfig(vision_config=sizes, qformer_config=queries, text_config=t5)
    )
    with pytest.raises(ConfigError, match="a decoder-only model; this one has an encoder"):
        find_decoder(model)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_batch_of_any_texts_ends_with_the_original_context_of_longrope(layers: int) -> None:
    """Of some types of layers, too: what is behind it in one of a batch is other in all of them."""
    rope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0], "rope_theta": 1e4}
    long = {**rope, "original_max_position_embeddings": 64}
    kinds = {"full_attention": long, "sliding_attention": {"rope_type": "default"}}
    config = PretrainedConfig(max_position_embeddings=512)
    assert (batch_context_length(PretrainedConfig()), batch_context_length(config)) == (None, 512)
    config.rope_parameters = long if layers == 1 else kinds
    assert (batch_context_length(config), context_length(config)) == (64, 512)
