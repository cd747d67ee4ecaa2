"""The pages of a simulated rank: weights by shards, its own keys and values, and room for those of other instances."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from elastic.cluster.control.stage_questions import Room
from elastic.engines.pipeline.path import LayerPath
from elastic.errors import CapacityError, IntegrityError, StateError
from elastic.sim.core.pages import SimulatedMemory
from elastic.sim.mechanisms.model import LayeredModel


@dataclass
class Guest:
    """What a rank has of another one's instance."""

    sectors: int
    """For which there is room."""
    shards: set[int] = field(default_factory=set)
    coming: set[int] = field(default_factory=set)
    epoch: int = 0
    """Of the path by which its shards are computed here."""
    ended: bool = False
    """Whether it has gone, and only its keys and values are kept."""
    told: bool = False
    """Whether others may read these."""


@contextmanager
def _restoring(owner: object, name: str) -> Iterator[None]:
    """Have an attribute be as it was where there was no room for what it became."""
    before = getattr(owner, name)
    try:
        yield
    except CapacityError:
        setattr(owner, name, before)
        raise


class RankBooks:
    """Whatever raises `CapacityError` has changed nothing."""

    def __init__(self, name: str, model: LayeredModel, memory: SimulatedMemory) -> None:
        self.name, self.model, self._memory = name, model, memory
        self.path = LayerPath.alone(name, model.layers, model.shards)
        self.every = frozenset(range(model.layers * model.shards))
        self.resident = self.every
        self.packed: frozenset[int] = frozenset()
        """Layers in the variant."""
        self.guests: dict[str, Guest] = {}
        self.coming: set[int] = set()
        """Shards of its own whose keys and values come home."""

    @property
    def homes(self) -> dict[str, Guest]:
        """Those that this rank is a stage of."""
        return {home: guest for home, guest in self.guests.items() if not guest.ended}

    @property
    def own(self) -> set[int]:
        """The shards whose keys and values, of its own instance, have memory here."""
        return set(self.path.shards_of(self.name)) | self.coming

    @property
    def needed(self) -> set[int]:
        """The shards that are computed here."""
        guests = (guest.shards for guest in self.homes.values())
        return set(self.path.shards_of(self.name)).union(*guests)

    @property
    def most_sectors(self) -> int:
        """The sectors that the instance has addresses for: those of one layer that takes all of the memory."""
        pages = self.model.rank.pages.budget - self.model.fixed_pages
        return pages // (self.model.part_pages * self.model.kv_shards)

    def weight_pages(self) -> int:
        """Count the pages of weights that are here."""
        return self.model.weight_pages(self.resident, self.packed)

    def other_pages(self) -> int:
        """Count the pages that are not for keys and values of its own instance."""
        kv_pages = self.model.kv_pages
        guests = sum(guest.sectors * kv_pages(guest.shards | guest.coming) for guest in self.guests.values())
        return self.model.fixed_pages + self.weight_pages() + guests

    def room(self, held_blocks: int) -> Room:
        """Return what the memory could hold, of which so many blocks of the engine are held."""
        model, memory = self.model, self._memory
        pages = model.rank.pages.budget - model.fixed_pages - self.weight_pages()
        parts = (model.part_pages,) * (model.layers * model.kv_shards)
        committed = memory.used_sectors + memory.promised()
        return Room(
            path=self.path,
            pages=pages,
            page_bytes=model.page_bytes,
            sector_pages=parts,
            most_sectors=self.most_sectors,
            committed_sectors=committed,
            held_bytes=(held_blocks * model.kv.block_bytes,) * len(parts),
            weight_pages=(model.layer_pages,) * model.layers,
            resident=frozenset(self.resident),
        )

    def settle(self, *, keeps_promises: bool = True) -> None:
        """Have the engine's memory be what the others leave. Raises `CapacityError` where live requests lack room."""
        sector_pages = max(1, self.model.kv_pages(self.own))
        self._memory.resize(other_pages=self.other_pages(), sector_pages=sector_pages, keeps_promises=keeps_promises)

    def open(self, home: str, sectors: int) -> None:
        """Be a stage of a home."""
        if home in self.homes:
            raise StateError(f"rank {self.name!r} is a stage of {home!r} already")
        self.guests[home] = Guest(sectors)

    def close(self, home: str, kept: int | None = None) -> None:
        """Be none any more; unknown: nothing happens. Of one that has gone so many sectors can be `kept`."""
        guest = self.guests.pop(home, None)
        if guest is None:
            return
        if kept is not None and guest.shards:
            self.guests[home] = Guest(kept, guest.shards, epoch=guest.epoch, ended=True)
        self.settle()

    def kept(self, home: str, epoch: int) -> Guest:
        """Return what is kept of a home that has gone, as it was computed by the path of an epoch: others may read it.

        Raises `StateError` where there is nothing, or the path here was another.
        """
        guest = self.guests.get(home)
        if guest is None or not guest.ended or guest.epoch != epoch:
            raise StateError(f"nothing that was computed for {home!r} by path {epoch} is kept at {self.name!r}")
        guest.told = True
        return guest

    def free_kept(self) -> bool:
        """Give up what is kept and nobody was told of; return whether there was something."""
        before = len(self.guests)
        self.guests = {home: guest for home, guest in self.guests.items() if not guest.ended or guest.told}
        return len(self.guests) < before

    def allot(self, home: str, sectors: int) -> None:
        """Keep room for so many sectors of a home."""
        guest = self.guests[home]
        with _restoring(guest, "sectors"):
            guest.sectors = sectors
            self.settle()

    def prepare(self, home: str, shards: Collection[int]) -> None:
        """Have memory for shards that come."""
        owner = self if home == self.name else self.guests[home]
        with _restoring(owner, "coming"):
            owner.coming = owner.coming.union(shards)
            self.settle()

    def give_up(self, home: str, shards: Collection[int]) -> None:
        """Undo `prepare`."""
        coming = self.coming if home == self.name else self.guests[home].coming
        coming.difference_update(shards)
        self.settle()

    def keep(self, home: str, path: LayerPath) -> None:
        """Have what this rank computes of a home be as the home's new path has it."""
        shards = set(path.shards_of(self.name))
        if home == self.name:
            self.path = path
            self.coming -= shards
        elif home in self.guests:
            guest = self.guests[home]
            guest.shards, guest.epoch = shards, path.epoch
            guest.coming -= shards
        self.settle()

    def drop(self, shards: Collection[int]) -> int:
        """Have weights leave; return the pages that come free."""
        if used := self.needed.intersection(shards):
            raise StateError(f"rank {self.name!r} computes shards {sorted(used)}; their weights cannot be dropped")
        before = self.weight_pages()
        self.resident -= frozenset(shards)
        self.settle()
        return before - self.weight_pages()

    def bring(self, shards: Collection[int]) -> int:
        """Have weights here; return their pages."""
        before = self.weight_pages()
        with _restoring(self, "resident"):
            self.resident |= frozenset(shards)
            self.settle()
        return self.weight_pages() - before

    def pack(self, layers: Collection[int], *, packed: bool) -> int:
        """Have layers be in the variant, or in full; return the pages that come free."""
        before = self.weight_pages()
        with _restoring(self, "packed"):
            self.packed = self.packed.union(layers) if packed else self.packed.difference(layers)
            self.settle()
        return before - self.weight_pages()

    def check(self) -> None:
        """Recount. Raises `IntegrityError`."""
        used = self.other_pages() + self._memory.allocated * self.model.kv_pages(self.own)
        if used > self.model.rank.pages.budget:
            raise IntegrityError(f"rank {self.name!r} has {used} of {self.model.rank.pages.budget} pages")
        if missing := self.needed - self.resident:
            raise IntegrityError(f"rank {self.name!r} computes shards {sorted(missing)} without their weights")
