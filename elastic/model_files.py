"""A reader of model directories: any fault of a file is a `ConfigError` that names it, and the remedy."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from elastic.errors import ConfigError, ElasticError
from elastic.memory.backends.cuda import require_cuda

logger = logging.getLogger(__name__)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json", INDEX)
_SENTENCE_END = re.compile(r"(?<=\.) (?=[A-Z])")
_LONGEST = 160
_SHOWN = 3
DTYPES = ("auto", "bfloat16", "float16", "float32")
"""What models are loaded in. `auto` is the checkpoint's own on CUDA, and float32 on CPUs, where half precision is often
slow."""


def load_model(path: str, device: torch.device, dtype: str = "auto", *, option: str) -> tuple[Any, Any]:
    """Load a model in evaluation mode, for this device but not to it yet, and its tokenizer.

    `dtype` is one of `DTYPES`.
    """
    if device.type == "cuda":
        require_cuda(device)
    read_config(path, option=option)
    tokenizer = read_tokenizer(path, option=option)
    return load_weights(path, device, dtype, option=option), tokenizer


def load_weights(path: str, device: torch.device, dtype: str = "auto", *, option: str) -> Any:
    """Load a model as `load_model` does, without its tokenizer."""
    if device.type == "cuda":
        require_cuda(device)
    model = read_model(path, chosen_dtype(dtype, device) or "auto", option=option)
    return model.eval().requires_grad_(False)


def chosen_dtype(dtype: str, device: torch.device) -> torch.dtype | None:
    """Return what one of `DTYPES` is on a device; None: the checkpoint's own."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else None
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen


def read_config(path: str, *, option: str) -> Any:
    """Read the configuration. Raises `ConfigError`."""
    from transformers import AutoConfig

    if not path or not os.path.isfile(Path(path) / "config.json"):  # False, too, for what can be no path
        raise ConfigError(f"{option} {path}: no model there (a directory with config.json is needed)")
    for name in _OBJECTS:
        _require_object(Path(path) / name, option)
    with reading(f"{option} {path}", "see that config.json is whole and that this transformers knows the model"):
        return AutoConfig.from_pretrained(path, trust_remote_code=False)


def require_full_weights(config: Any, what: str, why: str) -> None:
    """Raise `ConfigError` for the config of a model whose weights are quantized."""
    options = getattr(config, "quantization_config", None)
    if options is not None:
        method = options.get("quant_method") if isinstance(options, dict) else options.quant_method
        raise ConfigError(f"{what}: its weights are quantized ({method}), {why}")


def read_tokenizer(path: str, *, option: str) -> Any:
    """Read the tokenizer. Raises `ConfigError`."""
    from transformers import AutoTokenizer

    if not path or not os.path.isdir(path):
        raise ConfigError(f"{option} {path}: no tokenizer there (a directory with tokenizer.json is needed)")
    with reading(f"{option} {path}: its tokenizer", "it needs files such as tokenizer.json"):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def read_model(path: str, dtype: torch.dtype | str, *, option: str) -> Any:
    """Read the model with all of its weights, on the CPU. Raises `ConfigError`, also where the files lack some."""
    from transformers import AutoModelForCausalLM

    config = read_config(path, option=option)
    _require_weights(Path(path), option)
    with quiet(), reading(f"{option} {path}", "see that its files are whole, and that config.json is theirs"):
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    _require_all(model, report, f"{option} {path}")
    return model


@contextmanager
def reading(what: str, remedy: str) -> Iterator[None]:
    """Turn any error of a reader of somebody else's files into a `ConfigError` of one line."""
    try:
        yield
    except ElasticError:
        raise
    except Exception as error:  # files can hold anything, and their readers raise as many kinds of errors
        raise ConfigError(f"{what} cannot be loaded: {one_line(error)}; {remedy}") from error


def one_line(error: BaseException) -> str:
    """Return the first sentences of an error; with its kind, unless that only says that a value or a file is wrong."""
    first, *others = _SENTENCE_END.split(" ".join(str(error).split()))
    for other in others:
        if len(first) + len(other) > _LONGEST:
            break
        first += f" {other}"
    said = first.rstrip(".;: ")[: 2 * _LONGEST]
    return said if said and isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {said}".rstrip(": ")


def _require_object(path: Path, option: str) -> None:
    """Raise `ConfigError` for a file that holds no JSON object; it may be absent."""
    if not path.is_file():
        return
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option} {path} is no JSON: {one_line(error)}; copy it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{option} {path} must be a JSON object, as {{...}}; it begins with {text[:20]!r}")


def _require_weights(directory: Path, option: str) -> None:
    """Raise `ConfigError` unless all safetensors files are there, and whole. `*.bin` are left to their reader."""
    from safetensors import SafetensorError, safe_open

    names = [WEIGHTS] if os.path.isfile(directory / WEIGHTS) else _shards(directory / INDEX, option)
    absent = [name for name in names if not os.path.isfile(directory / name)]  # False, too, for what can be no path
    if absent:
        raise ConfigError(
            f"{option} {directory}: {len(absent)} of its {len(names)} weight files are not there "
            f"({_some(absent)}); copy them too"
        )
    for name in names:
        try:
            safe_open(directory / name, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{option} {directory / name} is no whole safetensors file ({one_line(error)}); copy it again"
            ) from error


def _shards(index: Path, option: str) -> list[str]:
    """Return the files that an index names; none without an index. Raises `ConfigError` for a damaged one."""
    if not index.is_file():
        return []
    shards = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ConfigError(f"{option} {index} has no weight_map from names of weights to files; copy it again")
    return sorted(set(shards.values()))


def _require_all(model: torch.nn.Module, report: dict[str, Any], what: str) -> None:
    """Raise `ConfigError` unless every weight came from the files: transformers draws the others at random."""
    missing, wrong = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if missing:
        raise ConfigError(
            f"{what}: its files lack {len(missing)} of the model's {len(model.state_dict())} weights "
            f"({_some(missing)}); copy the checkpoint again, or correct config.json"
        )
    if wrong:
        name, actual, needed = wrong[0]
        raise ConfigError(
            f"{what}: {len(wrong)} of the model's {len(model.state_dict())} weights have another shape in its files "
            f"({name}: {list(actual)}, not {list(needed)}); copy the checkpoint again, or correct config.json"
        )
    if report["unexpected_keys"]:
        unused = sorted(report["unexpected_keys"])
        logger.warning("%s: %d weights of its files are not used (%s)", what, len(unused), _some(unused))


def _some(names: Sequence[str]) -> str:
    """Return the first names as text."""
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' own report of loading, which `_require_all` gives in a line."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
