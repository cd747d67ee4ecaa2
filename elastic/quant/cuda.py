"""Matrices in integers on CUDA."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.quant.codes import Integers
from elastic.quant.cpu_parts import pack, unpack
from elastic.quant.formats import Matrix, Parts, Path, Target

__all__ = ["pack", "paths", "unpack"]


def paths(config: Integers, parts: Parts, matrix: Matrix, target: Target) -> Mapping[str, Path]:
    return {}
