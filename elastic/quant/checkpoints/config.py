"""The quantization config of a checkpoint, checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.errors import ConfigError
from elastic.quant.formats.integer import Integers

_ADDED_TO_ZEROS = {"gptq": {"gptq": 1, "gptq_v2": 0}, "awq": {"gemm": 0}}
"""Method -> format -> what is added to stored zero points: the first version of GPTQ stores them less one."""
_FORMAT_KEYS = {"gptq": ("checkpoint_format", "format"), "awq": ("checkpoint_format", "format", "version")}
_READ = "GPTQ (gptq, gptq_v2; 8, 4 or 3 bits) and AWQ (gemm; 4 bits) are read; convert it with GPTQModel"


@dataclass(frozen=True)
class QuantizationConfig:
    """The way in which the matrices of a checkpoint are stored."""

    file: Path
    method: str
    """ "gptq" or "awq"."""
    integers: Integers
    added_to_zeros: int
    act_order: bool


def read_declared(directory: Path) -> QuantizationConfig:
    """Read `config.json`, or AutoGPTQ's `quantize_config.json`.

    Raises `ConfigError` for a directory without either, and for formats that are not read.
    """
    file, config = _find(directory)
    method = str(config.get("quant_method", "gptq" if file.name == "quantize_config.json" else None)).lower()
    if method not in _ADDED_TO_ZEROS:
        raise ConfigError(f"{file}: quant_method={config.get('quant_method')!r} is not supported; {_READ}")
    format_ = _format(file, config, method)
    added = _ADDED_TO_ZEROS[method].get(format_)
    integers = _integers(file, config)
    if added is None or (method == "awq" and integers.bits != 4):
        words = f"quant_method={method!r}, format={format_!r}, bits={integers.bits}"
        raise ConfigError(f"{file}: {words} are not supported together; {_READ}")
    return QuantizationConfig(file, method, integers, added, config.get("desc_act") is True)


def _find(directory: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file that has the quantization config, and the config."""
    file = directory / "config.json"
    config = _json(file).get("quantization_config") if file.is_file() else None
    if config is None and (directory / "quantize_config.json").is_file():
        file = directory / "quantize_config.json"
        config = _json(file)
    if not isinstance(config, dict):
        raise ConfigError(
            f"{directory} is no quantized checkpoint: it needs a config.json with a quantization_config, "
            "or a quantize_config.json"
        )
    return file, config


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is damaged: it holds {type(content).__name__}, not an object")
    return content


def _format(file: Path, config: dict[str, Any], method: str) -> str:
    """Return the name of the format, which any of several keys may give. Raises `ConfigError` where they differ."""
    named = {str(config[key]).lower() for key in _FORMAT_KEYS[method] if config.get(key) is not None}
    named |= {"marlin"} if config.get("is_marlin_format") else set()
    named |= {"llm-awq"} if config.get("backend") == "llm-awq" else set()
    if len(named) > 1:
        raise ConfigError(f"{file} names several formats: {', '.join(sorted(named))}; correct it to one")
    return named.pop() if named else {"gptq": "gptq", "awq": "gemm"}[method]


def _integers(file: Path, config: dict[str, Any]) -> Integers:
    bits, group_size = config.get("bits"), config.get("group_size", 128)
    if type(bits) is not int or type(group_size) is not int:
        raise ConfigError(f"{file}: bits={bits!r} and group_size={group_size!r} have to be whole numbers")
    if config.get("pack_dtype", "int32") != "int32":
        raise ConfigError(f"{file}: pack_dtype={config['pack_dtype']!r} is not supported; pack into int32")
    symmetric = config.get("sym") is True or config.get("zero_point") is False
    try:
        return Integers(bits, group_size, symmetric)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}; {_READ}") from error
