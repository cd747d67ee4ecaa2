"""Loading what the commands work on, with one clear line for what is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic.errors import ConfigError
from elastic.memory.cuda import require_cuda


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, its tokenizer, and the prompt as token ids, [1, tokens]."""

    model: Any
    tokenizer: Any
    inputs: Any


def load(path: str, prompt: str, max_new_tokens: int, device: torch.device) -> Loaded:
    """Load a model directory for inference on a device. Raises `ConfigError` naming what is missing or wrong."""
    if not prompt.strip():
        raise ConfigError(f"--prompt {prompt!r} is empty; give some text to continue")
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {max_new_tokens} must be at least 1")
    model, tokenizer = load_model(path, device, option="--model")
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    _check_length(model.config, inputs["input_ids"].shape[1], max_new_tokens)
    return Loaded(model.to(device), tokenizer, inputs.to(device))


def load_model(path: str, device: torch.device, *, option: str) -> tuple[Any, Any]:
    """A model in evaluation mode, for this device but not on it yet, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if device.type == "cuda":
        require_cuda(device)
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{option} {path}: no model there (a directory with config.json and weights is needed)")
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=_dtype(device))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{option} {path} cannot be loaded: {str(error).splitlines()[0]}") from error
    return model.eval().requires_grad_(False), tokenizer


def _dtype(device: torch.device) -> torch.dtype | str:
    """The checkpoint's own on CUDA; float32 on CPUs, where half precision is often slow."""
    return torch.float32 if device.type == "cpu" else "auto"


def _check_length(config: Any, prompt_tokens: int, new_tokens: int) -> None:
    most = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most and prompt_tokens + new_tokens > most:
        raise ConfigError(
            f"the prompt has {prompt_tokens} tokens; with --max-new-tokens {new_tokens} that is more than the "
            f"{most} that the model was made for"
        )
