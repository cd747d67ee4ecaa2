"""Files of models whose layers lie on devices of several kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.memory.checksum import digest
from elastic.quant.formats.base import KernelTarget
from elastic.quant.formats.integer import Integers
from elastic.quant.variants.eligible import LayerParameters
from elastic.quant.variants.pack_model import build as pack_all
from elastic.quant.variants.variant import MatrixParameter, Variant, pack_parameter
from elastic.quant.variants.variant_file import load, save
from support.architectures import build

HERE, THERE = torch.device("cpu"), torch.device("cpu", 0)


class OnSecondDevice(LayerParameters):
    """A layer on a device whose kernels read another order of bytes."""

    @property
    def device(self) -> torch.device:
        return THERE


def test_each_layer_is_read_as_it_was_packed_for_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {HERE: KernelTarget("cpu", "AVX2"), THERE: KernelTarget("cpu", "DEFAULT")}
    monkeypatch.setattr(KernelTarget, "of", targets.__getitem__)
    kinds, modules = (LayerParameters, OnSecondDevice), build("llama-gqa").model.layers
    layers = [kind.of(module, name) for kind, module, name in zip(kinds, modules, "ab", strict=False)]
    variant, name = Variant("finer", Integers(4, 32)), "mlp.up_proj.weight"

    def pack(layer: LayerParameters) -> dict[str, Any]:
        weight = layer.parameters[name][1]
        return {
            name: MatrixParameter(pack_parameter(weight, variant.config, targets[layer.device], False), digest(weight))
        }

    packed = pack_all(layers, variant, pack)
    save(tmp_path / "file", variant, layers, packed)
    for layer, before, after in zip(layers, packed, load(tmp_path / "file", variant, layers), strict=True):
        (was,), (now,) = before.packings.values(), after.packings.values()
        assert isinstance(was, MatrixParameter)
        assert isinstance(now, MatrixParameter)
        assert now.packed.format.target == targets[layer.device]
        assert torch.equal(now.packed.value(), was.packed.value())
