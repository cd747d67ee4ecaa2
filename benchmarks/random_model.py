"""Write a Llama with random weights and the small model's tokenizer: for speed at real shapes, where there is no model.

    python benchmarks/random_model.py --shape 100m --out build/models/100m

What it writes is noise; quality means nothing with it. 7b is float16, the others float32.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from elastic.assets import MODEL_DIR

SHAPES = {  # hidden, intermediate, layers, heads, key heads
    "100m": (768, 2048, 12, 12, 4),
    "7b": (4096, 11008, 32, 32, 32),
    "13b": (5120, 13824, 40, 40, 40),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    hidden, intermediate, layers, heads, kv_heads = SHAPES[options.shape]
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        dtype=torch.float32 if options.shape == "100m" else torch.float16,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(config.dtype)
    LlamaForCausalLM(config).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
