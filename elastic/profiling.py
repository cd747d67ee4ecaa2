"""`profile`: in which order to swap the layers of a model. A composition root, like `elastic.wrap`."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic.errors import (
    ConfigError,
    StateError,
    is_number,
    require,
    require_flag,
    require_path_or_none,
    require_whole,
)
from elastic.quant.formats.integer import Integers
from elastic.quant.formats.pruned import Pruned, name_of
from elastic.quant.sensitivity.fake_quant import dequantized_layer
from elastic.quant.sensitivity.layer_trace import LayerTrace
from elastic.quant.sensitivity.profile_file import Profile, ProfileSettings, fingerprint, read
from elastic.quant.sensitivity.scores import measure
from elastic.quant.variants.calibration import (
    as_for_inference,
    check_ids,
    fingerprint_of_tokens,
    inputs_of,
    most_tokens,
    rows_for,
)
from elastic.quant.variants.eligible import LayerParameters, matrices
from elastic.quant.variants.variant import NAMED, config_of
from elastic.runtime.options import one_or_several
from elastic.runtime.runtime import Runtime
from elastic.weights.decoder import Decoder, find_decoder

CONTEXT = 512
"""Tokens in a sequence of calibration text."""
SEQUENCES_AT_ONCE = 1


def profile(
    model: nn.Module,
    calibration: str | Sequence[str] | torch.Tensor,
    *,
    tokenizer: Any = None,
    variant: str | Integers | Pruned = "int4",
    path: str | Path | None = None,
    alpha1: float = 0.25,
    alpha2: float = 0.25,
    beta: float = 0.5,
    tokens: int = 2048,
    batch: int = SEQUENCES_AT_ONCE,
    lazy: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Find the order in which to swap the decoder layers of a model for quantized ones (MorphServe, section 3.2).

    Greedy by LIS = `alpha1` * LTS + `alpha2` * LRS + `beta` * MDS, the highest first, MDS measured anew for each set of
    layers chosen so far. `variant` is the name of one, such as "int4" or "2:4", or a config; layers are rounded to
    nearest, or pruned, by a criterion that has its samples from the calibration text if it needs any. `calibration` is
    text, for which a `tokenizer` is needed, of which `tokens` tokens are used, in sequences spread evenly over it; or
    token ids, int64 [sequences, tokens], all of which are. `batch` sequences are run at once. `lazy` skips candidates
    that cannot win a round: the order is the same, their scores of that round are not known. `progress` is called with
    the number of candidates done and that of all.

    With a `path` the profile is kept there, after every round: a call with the same arguments goes on where another
    stopped, or returns at once what is complete. Takes the memory of another copy of the decoder layers.

    The model is as it was afterwards, also after an error. Raises `ConfigError` for a model or option that cannot work
    and for a path that holds another profile, `StateError` for a wrapped model.
    """
    decoder, path = _check_model(model), require_path_or_none(path, "path")
    _check_options(batch, lazy, path, progress, alpha1=alpha1, alpha2=alpha2, beta=beta)
    name, config = _variant(variant)
    ids = token_ids(calibration, tokenizer, tokens, sequence_tokens(model))
    check_ids(model, ids)
    setting = _setting(decoder, ids, name, config, alpha1=alpha1, alpha2=alpha2, beta=beta, lazy=lazy)
    begun = _begun(path, setting)
    if begun is not None and begun.complete:
        return begun
    with as_for_inference(model):
        samples = _samples(model, decoder, config, ids)
        on_device = ids.to(next(model.parameters()).device)
        return measure(
            [LayerTrace(model, decoder.layers, part) for part in on_device.chunk(-(-len(ids) // batch))],
            decoder.layers,
            lambda index: dequantized_layer(decoder.layers[index], config, decoder.layer_names[index], samples),
            setting,
            begun=begun,
            progress=progress or (lambda done, total: None),
            save=(lambda profile: profile.save(path)) if path is not None else (lambda profile: None),
        )


def sequence_tokens(model: nn.Module) -> int:
    """Return how many tokens a sequence of calibration text has, for a model that may be made for fewer."""
    return min(CONTEXT, most_tokens(model) or CONTEXT)


def token_ids(
    calibration: str | Sequence[str] | torch.Tensor, tokenizer: Any, tokens: int, length: int = CONTEXT
) -> torch.Tensor:
    """Token ids, int64 [sequences, tokens]: as given, or sequences of up to `length` tokens, spread evenly over a text.

    Raises `ConfigError` where there is no text, or no tokenizer for it.
    """
    if isinstance(calibration, torch.Tensor):
        kind = calibration.dtype
        whole = not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
        if calibration.ndim != 2 or not whole or not calibration.numel():
            raise ConfigError(
                f"calibration is a tensor of {kind} {list(calibration.shape)}; give token ids, integers of shape "
                "[sequences, tokens]"
            )
        return calibration.long()
    if not callable(tokenizer):
        raise ConfigError("calibration is text: give a tokenizer too, or token ids in place of the text")
    require_whole(tokens, "tokens")
    texts = one_or_several(calibration, str, "calibration", "'a text'")
    for text in texts:
        require(isinstance(text, str), "calibration", text, "text, or token ids as a tensor")
    encoded = [i for text in texts for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    if not encoded:
        raise ConfigError("calibration has no text; give some that is like what the model will be used on")
    used = min(tokens, len(encoded))
    length = min(length, used)
    sequences = used // length
    starts = [i * (len(encoded) - length) // max(1, sequences - 1) for i in range(sequences)]
    return torch.tensor([encoded[start : start + length] for start in starts])


def _check_model(model: nn.Module) -> Decoder:
    decoder = find_decoder(model)
    if isinstance(getattr(model, "elastic", None), Runtime):
        raise StateError(f"{type(model).__name__} is wrapped; unwrap it first, profile it, and wrap it again")
    absent = [name for name, p in model.named_parameters() if p.device.type == "meta"]
    if absent:
        raise ConfigError(f"{len(absent)} parameters have no data (such as {absent[0]}); load the whole model")
    for name, layer in zip(decoder.layer_names, decoder.layers, strict=True):
        for key, parameter in layer.named_parameters():
            if parameter.is_floating_point() and not parameter.float().isfinite().all():
                raise ConfigError(f"{name}.{key} holds values that are not finite; load weights without such values")
    return decoder


def _variant(variant: str | Integers | Pruned) -> tuple[str, Integers | Pruned]:
    if isinstance(variant, Integers):
        return f"int{variant.bits}", variant
    if isinstance(variant, Pruned):
        return name_of(variant), variant
    config = config_of(variant) if isinstance(variant, str) else None
    if config is None:
        raise ConfigError(f"variant={variant!r} is not known; use one of {NAMED}")
    return variant, config


def _samples(model: nn.Module, decoder: Decoder, config: Integers | Pruned, ids: torch.Tensor) -> dict[str, Any]:
    """Return samples of the inputs of all matrices, [rows, inputs], by full names, for a criterion that needs them."""
    if not isinstance(config, Pruned) or not config.calibrated:
        return {}
    modules: dict[str, nn.Module] = {}
    for name, layer in zip(decoder.layer_names, decoder.layers, strict=True):
        parameters = LayerParameters.of(layer, name)
        names = [key for key, parameter, _ in matrices(parameters) if parameter.ndim == 2]
        modules |= {f"{name}.{key}": parameters.parameters[key][0] for key in names}
    return inputs_of(model, modules, ids, rows_for(config))


def _check_options(batch: int, lazy: bool, path: Path | None, progress: Any, **weights: float) -> None:
    """Raise `ConfigError` for options that cannot be, before a long search begins."""
    for name, value in weights.items():
        require(is_number(value) and value >= 0, name, value, "a number, at least 0")
    require(sum(weights.values()) < math.inf, " + ".join(weights), math.inf, "finite")
    require_whole(batch, "batch")
    require_flag(lazy, "lazy")
    require(progress is None or callable(progress), "progress", progress, "a function of two counts, or None")
    if path is not None and not os.path.isdir(path.parent):
        raise ConfigError(f"the profile cannot be written to {path}: there is no such directory")


def _setting(
    decoder: Decoder, ids: torch.Tensor, variant: str, config: Integers | Pruned, **options: Any
) -> ProfileSettings:
    return ProfileSettings(
        variant=variant,
        config={"type": type(config).__name__, **dataclasses.asdict(config)},
        dtype=str(next(decoder.layers[0].parameters()).dtype).removeprefix("torch."),
        layers=tuple(fingerprint(layer) for layer in decoder.layers),
        text=fingerprint_of_tokens(ids),
        sequences=ids.shape[0],
        tokens=ids.shape[1],
        **options,
    )


def _begun(path: str | Path | None, setting: ProfileSettings) -> Profile | None:
    """What is at the path already. Raises `ConfigError` unless it is of the same setting."""
    if path is None or not os.path.exists(path):
        return None
    begun = read(Path(path))
    fields = [field.name for field in dataclasses.fields(ProfileSettings)]
    other = [name for name in fields if getattr(begun.setting, name) != getattr(setting, name)]
    if other:
        names = {"layers": "another model", "text": "another text"}
        reasons = [names.get(n) or f"{n}={getattr(begun.setting, n)}, not {getattr(setting, n)}" for n in other]
        raise ConfigError(f"{path} holds another profile ({'; '.join(reasons)}); remove it, or choose another path")
    return begun
