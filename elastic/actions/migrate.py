"""The action that has a layer, or modules of it, at another place (CoCoServe, section 3.3).

Bytes are copied from page to page while the layer serves; the safe point only flips the slots, and then the pages that
it leaves are free. So a migrated layer is the same bits, in the variant that it was in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from elastic.actions.deferred import DeferredActions, resize_stages
from elastic.actions.pages.allocation import WeightPageAllocator
from elastic.actions.pages.copy_plan import pairs
from elastic.actions.release import require_no_gradients
from elastic.errors import ConfigError, StateError
from elastic.hooks.device_transfer import TransferRouter
from elastic.memory.copy_engine import CopyBatch, CopyHandle
from elastic.memory.page_pool import PagePool
from elastic.memory.rate_limit import RateLimiter
from elastic.types import Change, Migrate, PlanStep
from elastic.weights.layer import WeightUnit
from elastic.weights.model import ModelWeights
from elastic.weights.module_groups import merge_units, remainder
from elastic.weights.parameter_slot import Content
from elastic.weights.slot_contents import reinstate, resident_contents


@dataclass
class LayerMove:
    """One decoder layer: the units that it consists of before and after."""

    before: tuple[WeightUnit, ...]
    after: tuple[WeightUnit, ...]
    arriving: WeightUnit
    """Of `after` the one at the new place."""
    remains: Mapping[WeightUnit, WeightUnit | None]
    """For each unit that loses parameters, what is left of it."""
    version: int
    contents: Mapping[str, Content] = field(default_factory=dict)

    @property
    def index(self) -> int:
        return self.arriving.index

    @property
    def pages(self) -> int:
        """That it takes at the new place."""
        return self.arriving.held_pages

    @property
    def leaving_pages(self) -> Counter[str]:
        """That it needs no longer, by place."""
        pages: Counter[str] = Counter()
        for unit, rest in self.remains.items():
            pages[unit.pool.name] += unit.held_pages - (rest.held_pages if rest else 0)
        return pages

    @property
    def written(self) -> bool:
        """Whether a parameter was written since its bytes were copied."""
        return sum(unit.version() for unit in self.before) != self.version

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(target, source) for all that arrives: from the pages where it is, or from the host store."""
        return pairs(self.arriving, self.remains)

    def flip(self) -> None:
        self.arriving.show(self.contents, self.arriving.precision)

    def undo(self) -> None:
        """Have the slots as they were; the bytes are still there."""
        for unit in self.remains:
            reinstate(unit, unit.precision, unit.absent)


@dataclass
class PreparedMigration:
    action: Migrate
    relocations: list[LayerMove] = field(default_factory=list)
    committed: bool = False


class MigrateHandler:
    """`Migrate`: check, prepare, commit, roll back, finish."""

    def __init__(
        self,
        weights: ModelWeights,
        routes: TransferRouter,
        tenancy: WeightPageAllocator,
        waiting: DeferredActions,
        pace: RateLimiter,
    ) -> None:
        self._weights = weights
        self._routes = routes
        self._tenancy = tenancy
        self._waiting = waiting
        self._pace = pace

    def dry_run(self, action: Migrate) -> PlanStep:
        """What the action would do now. Raises `CapacityError` if the place has no room for it."""
        planned = self._check(action)
        pages = sum(relocation.pages for relocation in planned)
        self._tenancy.require_room(action.place, pages)
        gained = sum(relocation.leaving_pages.total() for relocation in planned) - pages
        moved = sum(relocation.arriving.precision.nbytes for relocation in planned)
        return PlanStep(action, "applied", moved, gained, pages, 0.0)

    def prepare(self, action: Migrate) -> PreparedMigration:
        """Pages at the new place, and the bytes copied into them."""
        prepared, copies = PreparedMigration(action), CopyBatch()
        try:
            for relocation in self._check(action):
                self._tenancy.take(relocation.arriving, self._pace)
                prepared.relocations.append(relocation)
                copies.add(self._fill(relocation))
            copies.finish()
        except BaseException:
            copies.discard()
            self.rollback(prepared)
            raise
        return prepared

    def commit(self, prepared: PreparedMigration) -> None:
        """Flip the parameters to their new pages."""
        for relocation in prepared.relocations:
            if relocation.written:
                name = relocation.arriving.name
                raise StateError(f"the weights of {name} were written while they were on their way; try again")
        prepared.committed = True
        for relocation in prepared.relocations:
            self._weights.set_units(relocation.index, relocation.after)
            relocation.flip()
        self._routes.update()

    def rollback(self, prepared: PreparedMigration) -> None:
        """Flip back, and give the new pages back."""
        for relocation in reversed(prepared.relocations):
            if prepared.committed:
                relocation.undo()
                self._weights.set_units(relocation.index, relocation.before)
                self._routes.update()
            relocation.contents = {}
            self._tenancy.lend(relocation.arriving, self._tenancy.give_up(relocation.arriving))
        prepared.relocations.clear()

    def finish(self, prepared: PreparedMigration) -> Change:
        """What the layers left behind is KV capacity there, but for pages that tensors outside still show."""
        released = retained = moved = 0
        for relocation in prepared.relocations:
            relocation.contents = {}
            moved += relocation.arriving.precision.nbytes
            self._tenancy.settle(relocation.arriving.pool.name, relocation.arriving.pages)
            released -= relocation.pages * relocation.arriving.pool.page_bytes
            for unit, rest in relocation.remains.items():
                left = (unit.held_pages - (rest.held_pages if rest else 0)) * unit.pool.page_bytes
                pages = self._leave(unit, rest, relocation)
                self._tenancy.lend(unit, pages)
                self._tenancy.settle(unit.pool.name, (rest.pages if rest else 0) - unit.pages)
                released += pages * unit.pool.page_bytes
                retained += max(0, left - pages * unit.pool.page_bytes)
        done = tuple(relocation.index for relocation in prepared.relocations)
        return Change("applied", done, (), moved, released, retained)

    def deferred(self) -> tuple[Migrate, ...]:
        """A migration is never deferred: without pages it is refused."""
        return ()

    def _check(self, action: Migrate) -> list[LayerMove]:
        """What is to be moved: nothing of a layer that is there already."""
        pool = self._tenancy.pool(action.place)
        planned = [self._plan(index, action.parts, pool) for index in self._weights.layer_indices(action.layers)]
        return [relocation for relocation in planned if relocation is not None]

    def _plan(self, index: int, parts: tuple[str, ...], pool: PagePool) -> LayerMove | None:
        units = self._weights.units(index)
        names = self._names(units, parts)
        whole = len(names) == sum(len(unit.slots) for unit in units) or pool is units[0].pool
        whole = whole or _leaves_nothing(units, names, pool)
        there = all(unit.pool is pool and not unit.absent for unit in units if unit.slots.keys() & names)
        if there and (not whole or len(units) == 1):
            return None
        self._require_movable(units, whole)
        self._require_device(units, pool, whole)
        if whole:
            names = {name for unit in units for name in unit.slots}
        own = not units[0].slots.keys() - names
        arriving = merge_units(units, names, pool, "" if own else "+".join(parts))
        remains = {unit: _rest(unit, names) for unit in units if unit.slots.keys() & names}
        staying = tuple(unit for unit in (remains.get(u, u) for u in units) if unit is not None)
        after = (arriving, *staying) if own else (*staying, arriving)
        return LayerMove(units, after, arriving, remains, sum(unit.version() for unit in units))

    def _names(self, units: tuple[WeightUnit, ...], parts: tuple[str, ...]) -> set[str]:
        names = self._weights.parameters_under(units[0].index, parts)
        if not names:
            raise ConfigError(f"{units[0].name} has no weights of its own: others use them too")
        return names

    def _require_movable(self, units: tuple[WeightUnit, ...], whole: bool) -> None:
        name = units[0].name
        self._weights.require_alone(units[0].index)
        if any(self._waiting.has(unit) for unit in units):
            raise StateError(f"{name} waits for pages to be swapped or restored; migrate it when that is done")
        if units[0].absent and not whole:
            raise StateError(f"{name} is in host memory; restore it before modules of it are migrated")
        for unit in units:
            require_no_gradients(unit)

    def _require_device(self, units: tuple[WeightUnit, ...], pool: PagePool, whole: bool) -> None:
        """To another device go layers that share no parameter, and modules."""
        shared, device = units[0].layer.unpaged.parameters(), pool.backend.device
        if whole and shared and any(unit.pool.backend.device != device for unit in units):
            raise ConfigError(
                f"{units[0].name} has parameters that are used elsewhere too, or adapters ({shared[0]}): it cannot go "
                f"to another device ({device})"
            )

    def _fill(self, relocation: LayerMove) -> CopyHandle:
        """Begin to copy; meanwhile what sits in the slots is made."""
        unit = relocation.arriving
        copy = self._weights.streamer(unit).copier.copy_async(relocation.pairs(), self._pace)
        relocation.contents = resident_contents(unit, unit.precision)
        return copy

    def _leave(self, unit: WeightUnit, rest: WeightUnit | None, relocation: LayerMove) -> int:
        """Give up what a unit has lost; returns the pages that are free now."""
        if unit.absent:
            self._weights.streamer(unit).forget(unit)
            return resize_stages(self._weights, unit.pool.name)
        return self._tenancy.narrow(unit, rest) if rest else self._tenancy.give_up(unit)


def _leaves_nothing(units: tuple[WeightUnit, ...], names: set[str], pool: PagePool) -> bool:
    """Whether only vectors would stay behind when these parameters go to another device: they go too, so that hidden
    states travel to the layer once."""
    if pool.backend.device == units[0].pool.backend.device or units[0].layer.unpaged.parameters():
        return False
    staying = {name: slot for unit in units if unit.pool is not pool for name, slot in unit.slots.items()}
    matrices = [name for name, slot in staying.items() if name not in names and slot.parameter.ndim > 1]
    return not matrices or not units[0].slots.keys() - names


def _rest(unit: WeightUnit, names: set[str]) -> WeightUnit | None:
    return remainder(unit, names) if unit.slots.keys() - names else None
