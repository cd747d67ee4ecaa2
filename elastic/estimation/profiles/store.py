"""The configuration map: what fingerprints of models were measured to take, kept for the next deployment. (iServe, 4.2)

A file for each model and kind of device, beside the checkpoint, or in a directory for caches where that cannot be
written. It is of use only where what it was measured with is the same: the model, the device, torch and Elastic.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from elastic.directories import CACHE, cache_directory, replacing
from elastic.errors import ConfigError, require_path
from elastic.estimation.profile import CostProfile
from elastic.memory.backends.cuda import require_cuda
from elastic.planning.estimate.layer_cost import LayerCost
from elastic.planning.estimate.performance import Handovers
from elastic.planning.measured_cost import LinearLatency
from elastic.planning.pipeline.chunk_cost import ChunkCost

logger = logging.getLogger(__name__)
FILE_FORMAT = "elastic configuration map 4"


@dataclass(frozen=True)
class ProfileKey:
    """What a measurement is true of."""

    model: str
    """A digest of the config, and of the names, shapes and types of all weights."""
    device: str
    """The name that the device's maker gives it."""
    torch: str
    elastic: str

    @classmethod
    def here(cls, model: str | Path, device: str) -> ProfileKey:
        """Return the key of a model directory on a type of device of this machine: "cpu" or "cuda".

        Raises `ConfigError` where there is no model.
        """
        try:
            version = importlib.metadata.version("elastic-llm")
        except importlib.metadata.PackageNotFoundError:  # a source tree that is not installed
            version = "unknown"
        return cls(model_digest(model), device_name(device), torch.__version__, version)


class ProfileStore:
    """The maps of one directory for caches; `beside`: a model's is beside its checkpoint where that can be written."""

    def __init__(self, directory: str | Path | None = None, *, beside: bool = True) -> None:
        """Without a directory it is that of `ELASTIC_CACHE`, else the user's."""
        chosen = cache_directory() if directory is None else require_path(directory, "directory")
        self._directory, self._beside = chosen, beside

    def load(self, model: str | Path, device: str, forms: Sequence[str] = ()) -> CostProfile | None:
        """Return what was measured of a model; None: not all of `forms` were, or with another device or version.

        A damaged file is as none. Raises `ConfigError` where there is no model.
        """
        key = ProfileKey.here(model, device)
        # what could not be written beside the checkpoint adds to what is there
        maps = [_read(path, key, device) for path in reversed(self._paths(model, key))]
        there = [profile for profile in maps if profile is not None]
        profile = reduce(merged, there) if there else None
        return profile if profile is not None and profile.around.keys() >= set(forms) else None

    def save(self, model: str | Path, profile: CostProfile) -> Path:
        """Add what was measured to what is known of a model; return the file. Raises `ConfigError` if none can be
        written."""
        key = ProfileKey.here(model, profile.device)
        earlier = self.load(model, profile.device)
        both = merged(earlier, profile) if earlier is not None else profile
        for path in self._paths(model, key):
            with contextlib.suppress(OSError):
                _write(path, key, both)
                return path
        raise ConfigError(f"the configuration map of {model} can be written nowhere; set {CACHE} to a directory")

    def _paths(self, model: str | Path, key: ProfileKey) -> list[Path]:
        name = f"elastic-{hashlib.sha256(key.device.encode()).hexdigest()[:12]}.json"
        beside = [Path(model) / name] if self._beside else []
        return [*beside, self._directory / key.model / name]


def merged(earlier: CostProfile, measured: CostProfile) -> CostProfile:
    """Return two measurements of one model as one; of what both have the second counts."""
    fields = ("layers", "around", "activations", "scratch_bytes", "r_squared")
    both: dict[str, Any] = {name: {**getattr(earlier, name), **getattr(measured, name)} for name in fields}
    return replace(earlier, **both).with_links(measured if measured.link is not None else earlier)


def model_digest(model: str | Path) -> str:
    """Return what tells a model from others that take other seconds: its config and the heads of its weight files.

    Values of weights are not read: seconds do not depend on them. Raises `ConfigError` where there is no model.
    """
    directory = Path(model)
    try:
        text = hashlib.sha256((directory / "config.json").read_bytes())
    except OSError as error:
        raise ConfigError(f"{model}: no model there (a directory with config.json is needed)") from error
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            head = file.read(min(int.from_bytes(file.read(8), "little"), 1 << 28))
        text.update(head)
    return text.hexdigest()[:32]


def device_name(device: str) -> str:
    """Return the name of a device of this machine, by its type."""
    if device == "cuda":
        require_cuda(torch.device(device))
        return torch.cuda.get_device_name()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.machine()


def _chunk_cost(fields: Mapping[str, Any]) -> ChunkCost:
    cost = ChunkCost(**{name: float(value) for name, value in fields.items()})
    if not all(math.isfinite(each) and each >= 0 for each in astuple(cost)):
        raise ValueError(f"coefficients {astuple(cost)} are no seconds")
    return cost


_FIGURES = ("activations", "scratch_bytes")
_COSTS: Mapping[str, Callable[[Mapping[str, Any]], LayerCost | ChunkCost]] = {
    "layer": LayerCost.of,
    "chunk": _chunk_cost,
}


def to_json(profile: CostProfile) -> dict[str, Any]:
    """Return a profile as what JSON can hold."""
    link = profile.link
    return {
        "device": profile.device,
        "layers": [[*key, *_told(cost)] for key, cost in profile.layers.items()],
        "around": {weights: _told(cost) for weights, cost in profile.around.items()},
        "link": None if link is None else asdict(link),
        "r_squared": [[*key, value] for key, value in profile.r_squared.items()],
        "contention": profile.contention,
        "handovers": asdict(profile.handovers),
        **{name: dict(getattr(profile, name)) for name in _FIGURES},
    }


def from_json(content: Mapping[str, Any]) -> CostProfile:
    """Return the profile that `to_json` gave. Raises `ValueError`, `KeyError` or `TypeError` for what is none."""
    layers = {(str(kind), str(weights)): _COSTS[form](fields) for kind, weights, form, fields in content["layers"]}
    around = {str(weights): _COSTS[form](fields) for weights, (form, fields) in content["around"].items()}
    link = content["link"]
    return CostProfile(
        str(content["device"]),
        layers,
        around,
        None if link is None else LinearLatency(**{name: float(value) for name, value in link.items()}),
        {str(weights): float(share) for weights, share in content["activations"].items()},
        {str(weights): int(nbytes) for weights, nbytes in content["scratch_bytes"].items()},
        {(str(kind), str(weights)): float(value) for kind, weights, value in content["r_squared"]},
        float(content.get("contention", 0.0)),
        Handovers(**{name: float(value) for name, value in content.get("handovers", {}).items()}),
    )


def _told(cost: LayerCost | ChunkCost) -> tuple[str, dict[str, Any]]:
    return "layer" if isinstance(cost, LayerCost) else "chunk", asdict(cost)


def _read(path: Path, key: ProfileKey, device: str) -> CostProfile | None:
    try:
        content = json.loads(path.read_text())
        if content["format"] != FILE_FORMAT or content["key"] != asdict(key):
            return None
        profile = from_json(content["profile"])
    except OSError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("%s is no configuration map, and is not used: %s", path, error)
        return None
    return profile if profile.device == device else None


def _write(path: Path, key: ProfileKey, profile: CostProfile) -> None:
    """Replace a file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": FILE_FORMAT, "key": asdict(key), "profile": to_json(profile)}
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n")
