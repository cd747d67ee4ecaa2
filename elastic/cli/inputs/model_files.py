"""Reading a model directory: whatever is wrong with its files is one `ConfigError` that says which, and what to do."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from elastic.errors import ConfigError, ElasticError

logger = logging.getLogger(__name__)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json", INDEX)
_SENTENCE_END = re.compile(r"(?<=\.) (?=[A-Z])")
_LONGEST = 160
_SHOWN = 3


def read_config(path: str, *, option: str) -> Any:
    """The configuration. Raises `ConfigError`."""
    from transformers import AutoConfig

    if not path or not (Path(path) / "config.json").is_file():
        raise ConfigError(f"{option} {path}: no model there (a directory with config.json and weights is needed)")
    for name in _OBJECTS:
        _require_object(Path(path) / name, option)
    with reading(f"{option} {path}", "see that config.json is whole and that this transformers knows the model"):
        return AutoConfig.from_pretrained(path, trust_remote_code=False)


def read_tokenizer(path: str, *, option: str) -> Any:
    """The tokenizer. Raises `ConfigError`."""
    from transformers import AutoTokenizer

    if not path or not Path(path).is_dir():
        raise ConfigError(f"{option} {path}: no tokenizer there (a directory with tokenizer.json is needed)")
    with reading(f"{option} {path}: its tokenizer", "it needs files such as tokenizer.json"):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def read_model(path: str, dtype: torch.dtype | str, *, option: str) -> Any:
    """The model with all of its weights, on the CPU. Raises `ConfigError`, also where some are not in the files."""
    from transformers import AutoModelForCausalLM

    config = read_config(path, option=option)
    _require_weights(Path(path), option)
    with _quiet(), reading(f"{option} {path}", "see that its files are whole, and that config.json is theirs"):
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    _require_all(model, found, f"{option} {path}")
    return model


@contextmanager
def reading(what: str, remedy: str) -> Iterator[None]:
    """Around a reader of somebody else's files: what it raises is a `ConfigError` of one line."""
    try:
        yield
    except ElasticError:
        raise
    except Exception as error:  # files can hold anything, and their readers raise as many kinds of errors
        raise ConfigError(f"{what} cannot be loaded: {one_line(error)}; {remedy}") from error


def one_line(error: BaseException) -> str:
    """The first sentences of an error; with its kind, unless that says no more than that a value or a file is wrong."""
    first, *others = _SENTENCE_END.split(" ".join(str(error).split()))
    for other in others:
        if len(first) + len(other) > _LONGEST:
            break
        first += f" {other}"
    said = first.rstrip(".;: ")[: 2 * _LONGEST]
    return said if said and isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {said}".rstrip(": ")


def _require_object(path: Path, option: str) -> None:
    """A file of names and values, if it is there."""
    if not path.is_file():
        return
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text)
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{option} {path} is no JSON: {one_line(error)}; copy it again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{option} {path} must be a JSON object, as {{...}}; it begins with {text[:20]!r}")


def _require_weights(directory: Path, option: str) -> None:
    """The safetensors files that are to be read are there, and whole. Others (`*.bin`) are left to their reader."""
    from safetensors import SafetensorError, safe_open

    names = [WEIGHTS] if (directory / WEIGHTS).is_file() else _shards(directory / INDEX, option)
    absent = [name for name in names if not (directory / name).is_file()]
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
    if not index.is_file():
        return []
    shards = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise ConfigError(f"{option} {index} has no weight_map from names of weights to files; copy it again")
    return sorted(set(shards.values()))


def _require_all(model: torch.nn.Module, found: dict[str, Any], what: str) -> None:
    """Every weight came from the files, in its shape: transformers draws the others at random."""
    missing, wrong = sorted(found["missing_keys"]), sorted(found["mismatched_keys"])
    if missing:
        raise ConfigError(
            f"{what}: its files lack {len(missing)} of the model's {len(model.state_dict())} weights "
            f"({_some(missing)}); copy the checkpoint again, or correct config.json"
        )
    if wrong:
        name, there, needed = wrong[0]
        raise ConfigError(
            f"{what}: {len(wrong)} of the model's {len(model.state_dict())} weights have another shape in its files "
            f"({name}: {list(there)}, not {list(needed)}); copy the checkpoint again, or correct config.json"
        )
    if found["unexpected_keys"]:
        unused = sorted(found["unexpected_keys"])
        logger.warning("%s: %d weights of its files are not used (%s)", what, len(unused), _some(unused))


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own report of what was loaded, which `_require_all` says in a line."""
    from transformers.utils import logging as theirs

    theirs.disable_progress_bar()
    before = theirs.get_verbosity()
    theirs.set_verbosity_error()
    try:
        yield
    finally:
        theirs.set_verbosity(before)
