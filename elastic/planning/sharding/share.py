"""What one of several ranks has of a model that they begin to serve together: a part of the layers of a stage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.errors import ConfigError, is_integer, is_list, require
from elastic.planning.sharding.bounds import is_degree
from elastic.planning.sharding.numbers import of_layers


@dataclass(frozen=True)
class Share:
    """One of `parts` equal parts of each layer of a stage; both count from 0."""

    stage: int = 0
    stages: int | tuple[int, ...] = 1
    """How many there are, of about as many layers each; or the layers of each."""
    part: int = 0
    parts: int = 1

    @property
    def ranks(self) -> int:
        """How many ranks have the model together."""
        return self.parts * (self.stages if isinstance(self.stages, int) else len(self.stages))

    def layers_of(self, layers: int) -> range:
        """Return the layers of the stage, of so many. Raises `ConfigError` for stages that do not fit."""
        if isinstance(self.stages, int):
            if self.stages > layers:
                raise ConfigError(f"pp={self.stages}: the model has {layers} layers; give at most so many stages")
            return even_stages(layers, self.stages)[self.stage]
        bounds = [0, *itertools.accumulate(self.stages)]
        if min(self.stages) < 1 or bounds[-1] != layers:
            raise ConfigError(f"pp={self.stages}: the layers of the stages are not {layers}, as many as the model has")
        return range(bounds[self.stage], bounds[self.stage + 1])

    def shards_of(self, layers: int, shards: int) -> frozenset[int]:
        """Return what a rank has of so many layers that are cut in so many shards each, by number.

        Raises `ConfigError` for layers that are not cut so.
        """
        if shards % self.parts:
            raise ConfigError(f"tp={self.parts}: layers are cut in {shards} shards; give shards={self.parts}, or more")
        size = shards // self.parts
        own = range(self.part * size, (self.part + 1) * size)
        return frozenset(shard for shard in of_layers(self.layers_of(layers), shards) if shard % shards in own)


def shares(tp: int, pp: int | Sequence[int]) -> tuple[Share, ...]:
    """Return the shares of ranks that have a model together, those of one stage after another.

    Raises `ConfigError` for degrees that are none.
    """
    if type(tp) is not int or not is_degree(tp):
        raise ConfigError(f"tp={tp!r} cannot be; it must be a power of two")
    given = [pp] if isinstance(pp, int) else pp
    good = is_list(given, lambda number: is_integer(number) and number >= 1) and len(given) > 0
    require(good, "pp", pp, "a number of stages, or the layers of each, at least 1")
    pp = pp if isinstance(pp, int) else tuple(pp)
    stages = pp if isinstance(pp, int) else len(pp)
    return tuple(Share(stage, pp, part, tp) for stage in range(stages) for part in range(tp))


def even_stages(layers: int, stages: int) -> tuple[range, ...]:
    """Cut layers into consecutive stages that differ by one layer at most, the longer ones first."""
    each, more = divmod(layers, stages)
    bounds = [0, *itertools.accumulate(each + (stage < more) for stage in range(stages))]
    return tuple(range(first, last) for first, last in itertools.pairwise(bounds))
