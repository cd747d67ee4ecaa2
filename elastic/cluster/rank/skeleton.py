"""A model of which the decoder layers have no data yet: a rank reads those of their weights that it is to have."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic.errors import ConfigError
from elastic.memory.backends.cuda import require_cuda
from elastic.memory.checkpoint_file import Checkpoint
from elastic.model_files import chosen_dtype, quiet, read_config, reading, require_full_weights
from elastic.weights.decoder import Decoder, find_decoder
from elastic.weights.shards.stored import StoredParameter, find_stored
from elastic.weights.shards.stored_names import blocks_of


def load_skeleton(path: str, device: torch.device, dtype: str = "auto") -> tuple[Any, Checkpoint]:
    """Make the model of a directory on a device, with everything but the parameters of its decoder layers, and return
    it with its files; those parameters are on the meta device. `dtype` is one of `DTYPES`.

    Raises `ConfigError` as `load_weights` does, and for files in which they are not found one by one.
    """
    from transformers import AutoModelForCausalLM

    if device.type == "cuda":
        require_cuda(device)
    config = read_config(path, option="model")
    require_full_weights(config, f"model {path}", "of which a rank can read no part; load all of it")
    own = getattr(config, "dtype", None) or torch.bfloat16
    files = Checkpoint(path)
    with quiet(), reading(f"model {path}", "see that its config.json is whole"), _without_data():
        model = AutoModelForCausalLM.from_config(config, dtype=chosen_dtype(dtype, device) or own)
    _compute_buffers(model)
    model.tie_weights()
    files.blocks.update(blocks_of(model, files))
    _read_fixed(model, find_decoder(model), files, device, f"model {path}")
    _read_generation(model, path)
    return model.eval().requires_grad_(False), files


@contextmanager
def _without_data() -> Iterator[None]:
    """Have parameters that this thread makes be on the meta device; buffers are as ever."""
    register, thread = nn.Module.register_parameter, threading.get_ident()

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and threading.get_ident() == thread:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@torch.no_grad()
def _compute_buffers(model: Any) -> None:
    """Compute buffers that no file has as `from_pretrained` does: in float32, and not in the dtype of the weights."""
    from transformers import PreTrainedModel

    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    makers = {module: inside for inside in models for module in inside.modules()}  # the innermost comes last
    for module, maker in makers.items():
        if module._non_persistent_buffers_set:
            maker._init_weights(module)


def _read_fixed(model: Any, decoder: Decoder, files: Checkpoint, device: torch.device, what: str) -> None:
    """Read what is in no decoder layer, and see that the files have the rest. Tied parameters stay tied."""
    inside = {id(p) for layer in decoder.layers for p in layer.parameters()}
    homes: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                homes.setdefault(id(parameter), []).append((module, name, f"{prefix}.{name}".lstrip(".")))
    for key, places in homes.items():
        parameter = places[0][0]._parameters[places[0][1]]
        assert parameter is not None, "it has just been found"
        stored = _required(files, [full for _, _, full in places], parameter, what)
        if key not in inside:
            data = torch.empty(stored.shape, dtype=stored.dtype, device=device)
            stored.read(data)
            for module, name, _ in places:
                module._parameters[name] = nn.Parameter(data, requires_grad=False)
    for name, buffer in model.named_buffers():
        source = find_stored(files, name, buffer.shape, buffer.dtype)
        if source is not None:
            source.read(buffer)
    for module in model.modules():
        module._buffers.update({n: b.to(device) for n, b in module._buffers.items() if b is not None})


def _required(files: Checkpoint, names: list[str], like: torch.Tensor, what: str) -> StoredParameter:
    """Return a parameter of the files, which may have it by any of its names. Raises `ConfigError`."""
    for name in names:
        stored = find_stored(files, name, like.shape, like.dtype)
        if stored is not None:
            return stored
    raise ConfigError(
        f"{what}: its files have no {names[0]} of shape {list(like.shape)}, in {like.dtype} or what that holds "
        "exactly, that a rank could read a part of; give another dtype, copy the checkpoint again, or save it anew "
        "with save_pretrained"
    )


def _read_generation(model: Any, path: str) -> None:
    """Have a model generate as its directory says."""
    from transformers import GenerationConfig

    if (Path(path) / "generation_config.json").is_file():
        with reading(f"model {path}", "see that its generation_config.json is whole"):
            model.generation_config = GenerationConfig.from_pretrained(path)
