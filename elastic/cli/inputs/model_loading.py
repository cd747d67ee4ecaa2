"""Loading of models, tokenizers and prompts, with one clear line for what is wrong."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, _ArgumentGroup
from dataclasses import dataclass
from typing import Any

import torch

from elastic.cli.inputs.checks import require_at_least, require_characters
from elastic.errors import ConfigError
from elastic.model_files import DTYPES, load_model
from elastic.weights.decoder import context_length

SEEDS = range(-(2**63), 2**64)
"""Those that torch takes."""


def add_dtype(command: ArgumentParser | _ArgumentGroup) -> None:
    """Add the option of what a model is loaded in."""
    command.add_argument("--dtype", choices=DTYPES, help="to load the model in (auto: float32 on CPUs, else its own)")


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, its tokenizer, and the prompt as token ids, [1, tokens]."""

    model: Any
    tokenizer: Any
    inputs: Any


def load(options: Namespace, device: torch.device) -> Loaded:
    """Load `--model` and `--prompt` to a device; check `--max-new-tokens` and `--seed`.

    Raises `ConfigError` naming what is missing or wrong.
    """
    require_characters(options.prompt, "--prompt")
    require_at_least(1, options.max_new_tokens, "--max-new-tokens")
    if options.seed not in SEEDS:
        raise ConfigError(f"--seed {options.seed} is out of range; use {SEEDS.start} to {SEEDS.stop - 1}")
    model, tokenizer = load_model(options.model, device, options.dtype or "auto", option="--model")
    inputs = tokenizer(options.prompt, return_tensors="pt", return_token_type_ids=False)
    _check_length(model.config, inputs["input_ids"].shape[1], options.max_new_tokens)
    return Loaded(model.to(device), tokenizer, inputs.to(device))


def write(loaded: Loaded, options: Namespace, **more: Any) -> torch.Tensor:
    """Go on with the prompt, alike for each seed; returns token ids, [1, tokens]."""
    torch.manual_seed(options.seed)
    tokens: torch.Tensor = loaded.model.generate(
        **loaded.inputs, max_new_tokens=options.max_new_tokens, do_sample=True, temperature=0.7, **more
    )
    return tokens


def _check_length(config: Any, prompt_tokens: int, new_tokens: int) -> None:
    """Raise `ConfigError` for more tokens than the model's context holds."""
    most = context_length(config.get_text_config(decoder=True))
    if most and prompt_tokens + new_tokens > most:
        raise ConfigError(
            f"the prompt has {prompt_tokens} tokens; with --max-new-tokens {new_tokens} that is more than the "
            f"{most} that the model was made for"
        )
