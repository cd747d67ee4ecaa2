"""`elastic generate`: text from a wrapped model."""

from __future__ import annotations

from argparse import Namespace

import torch

import elastic
from elastic.cli.inputs.checks import parse_place
from elastic.cli.inputs.model_loading import load


def generate(options: Namespace) -> int:
    """Stream the continuation of a prompt to standard output."""
    from transformers import TextStreamer

    place = parse_place(options.place)
    loaded = load(options, place.device)
    elastic.wrap(loaded.model, places=[place], prepack=options.prepack)
    try:
        torch.manual_seed(options.seed)
        print(options.prompt, end="", flush=True)
        loaded.model.generate(
            **loaded.inputs,
            max_new_tokens=options.max_new_tokens,
            do_sample=True,
            temperature=0.7,
            streamer=TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
    finally:
        elastic.unwrap(loaded.model)
    return 0
