"""`elastic generate`: text from a wrapped model."""

from __future__ import annotations

from argparse import Namespace

import elastic
from elastic.cli.inputs.checks import parse_place
from elastic.cli.inputs.model_loading import load, write


def generate(options: Namespace) -> int:
    """Stream the continuation of a prompt to standard output."""
    from transformers import TextStreamer

    place = parse_place(options.place)
    loaded = load(options, place.device)
    elastic.wrap(loaded.model, places=[place], prepack=options.prepack)
    try:
        print(options.prompt, end="", flush=True)
        write(loaded, options, streamer=TextStreamer(loaded.tokenizer, skip_prompt=True, skip_special_tokens=True))
    finally:
        elastic.unwrap(loaded.model)
    return 0
