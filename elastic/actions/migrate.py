"""The action that has a layer, or modules of it, at another place (CoCoServe, section 3.3).

Bytes are copied from page to page while the layer serves; the safe point only switches the slots, and then the pages
that it leaves are free. So a migrated layer is the same bits, in the variant that it was in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic.actions.base import ActionHandler
from elastic.actions.deferred import (
    DeferredActions,
    require_no_gradients,
    require_unwritten,
    resize_prefetch_buffers,
)
from elastic.actions.pages.allocation import WeightPageAllocator, find_pool
from elastic.actions.pages.copy_plan import copy_plan
from elastic.errors import ConfigError, StateError
from elastic.hooks.device_transfer import TransferRouter
from elastic.memory.copy_engine import CopyBatch, CopyHandle
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.rate_limit import RateLimiter
from elastic.types import Change, Migrate, PlanStep
from elastic.weights.layer import Absence, WeightUnit
from elastic.weights.model import ModelWeights
from elastic.weights.module_groups import merge_units, remainder
from elastic.weights.parameter_slot import Content
from elastic.weights.proxy.dropped_source import dropped_error
from elastic.weights.slot_contents import reinstate, resident_contents


@dataclass
class LayerMove:
    """A pending move of one decoder layer: the units of which it consists before and after."""

    before: tuple[WeightUnit, ...]
    after: tuple[WeightUnit, ...]
    arriving: WeightUnit
    """The unit of `after` at the new place."""
    remains: Mapping[WeightUnit, WeightUnit | None]
    """The rest of each unit that loses parameters; None: nothing."""
    version: int
    """Number of writes to its parameters when their bytes were copied."""
    contents: Mapping[str, Content] = field(default_factory=dict)


@dataclass
class PreparedMigration:
    """A migration in preparation."""

    action: Migrate
    moves: list[LayerMove] = field(default_factory=list)
    committed: bool = False


class MigrateHandler(ActionHandler):
    """`Migrate`: check, prepare, commit, roll back, finish."""

    def __init__(
        self,
        weights: ModelWeights,
        router: TransferRouter,
        allocator: WeightPageAllocator,
        deferred: DeferredActions,
        copy_rate: RateLimiter,
    ) -> None:
        self._weights = weights
        self._router = router
        self._allocator = allocator
        self._deferred = deferred
        self._copy_rate = copy_rate

    def dry_run(self, action: Migrate) -> PlanStep:
        """Return what the action would do now. Raises `CapacityError` if the place has no room for it."""
        moves = self._check(action)
        pages = sum(move.arriving.held_pages for move in moves)
        self._allocator.require_room(action.place, pages)
        losses = [pair for move in moves for pair in move.remains.items()]
        gained = sum(unit.held_pages - (rest.held_pages if rest else 0) for unit, rest in losses) - pages
        moved = sum(move.arriving.precision.nbytes for move in moves)
        return PlanStep(action, "applied", moved, gained, pages, 0.0)

    def prepare(self, action: Migrate) -> PreparedMigration:
        """Take pages at the new place, and copy the bytes into them."""
        prepared, copies = PreparedMigration(action), CopyBatch()
        try:
            for move in self._check(action):
                self._allocator.take(move.arriving, self._copy_rate)
                prepared.moves.append(move)
                copies.handles.append(self._fill(move))
            copies.finish()
        except BaseException:
            copies.discard()
            self.rollback(prepared)
            raise
        return prepared

    def commit(self, prepared: PreparedMigration) -> None:
        """Switch the parameters to their new pages."""
        for move in prepared.moves:
            require_unwritten(move.before, move.version)
        prepared.committed = True
        for move in prepared.moves:
            self._weights.set_units(move.arriving.index, move.after)
            move.arriving.show(move.contents, move.arriving.precision)
        self._router.update()

    def rollback(self, prepared: PreparedMigration) -> None:
        """Switch back, and give the new pages back."""
        for move in reversed(prepared.moves):
            if prepared.committed:
                for unit in move.remains:  # the old bytes are still there
                    reinstate(unit, unit.precision, unit.absent, unit.shards_here)
                self._weights.set_units(move.arriving.index, move.before)
                self._router.update()
            move.contents = {}
            self._allocator.give_to_cache(move.arriving, self._allocator.give_up(move.arriving))
        prepared.moves.clear()

    def finish(self, prepared: PreparedMigration) -> Change:
        """Give the pages that the layers left to the KV cache, but for those that tensors outside still show."""
        released = retained = moved = 0
        for move in prepared.moves:
            move.contents = {}
            moved += move.arriving.precision.nbytes
            self._allocator.shares[move.arriving.pool.name].record_resident(move.arriving.pages)
            released -= move.arriving.held_pages * move.arriving.pool.page_bytes
            for unit, rest in move.remains.items():
                leaving = unit.held_pages - (rest.held_pages if rest else 0)
                pages = self._leave(unit, rest)
                self._allocator.give_to_cache(unit, pages)
                self._allocator.shares[unit.pool.name].record_resident((rest.pages if rest else 0) - unit.pages)
                released += pages * unit.pool.page_bytes
                retained += max(0, leaving - pages) * unit.pool.page_bytes
        done = tuple(move.arriving.index for move in prepared.moves)
        return Change("applied", done, (), moved, released, retained)

    def _check(self, action: Migrate) -> list[LayerMove]:
        """Return the moves to be done: none for a layer that is there already."""
        pool = find_pool(self._allocator.pools, action.place)
        moves = [self._plan(index, action.parts, pool) for index in self._weights.layer_indices(action.layers)]
        return [move for move in moves if move is not None]

    def _plan(self, index: int, parts: tuple[str, ...], pool: PagePool) -> LayerMove | None:
        """Plan the move of one layer, or of modules of it. None: it is there already."""
        units = self._weights.units(index)
        names = self._weights.parameters_under(index, parts)
        if not names:
            raise ConfigError(f"{units[0].name} has no weights of its own: others use them too")
        whole = len(names) == sum(len(unit.slots) for unit in units) or pool is units[0].pool
        whole = whole or _leaves_nothing(units, names, pool)
        arrived = all(unit.pool is pool and not unit.absent for unit in units if unit.slots.keys() & names)
        if arrived and (not whole or len(units) == 1):
            return None
        self._require_movable(units, pool, whole)
        if whole:
            names = {name for unit in units for name in unit.slots}
        own = not units[0].slots.keys() - names
        arriving = merge_units(units, names, pool, "" if own else "+".join(parts))
        losing = [unit for unit in units if unit.slots.keys() & names]
        remains = {unit: remainder(unit, names) if unit.slots.keys() - names else None for unit in losing}
        staying = tuple(unit for unit in (remains.get(u, u) for u in units) if unit is not None)
        after = (arriving, *staying) if own else (*staying, arriving)
        return LayerMove(units, after, arriving, remains, version=sum(unit.version() for unit in units))

    def _require_movable(self, units: tuple[WeightUnit, ...], pool: PagePool, whole: bool) -> None:
        """Raise `StateError` or `ConfigError` for a layer that cannot go to a place, or not in part, as it is now."""
        name = units[0].name
        self._weights.require_alone(units[0].index)
        self._weights.require_not_in_parts(units[0].index)
        self._deferred.require_settled(units, "migrate")
        if units[0].absent is Absence.DROPPED:
            raise dropped_error(name, units[0].index)
        if units[0].absent and not whole:
            raise StateError(f"{name} is in host memory; restore it before modules of it are migrated")
        for unit in units:
            require_no_gradients(unit)
        shared, device = units[0].layer.unpaged.parameters(), pool.backend.device
        if whole and shared and any(unit.pool.backend.device != device for unit in units):
            raise ConfigError(
                f"{name} has parameters that are quantized, used elsewhere too, or adapters ({shared[0]}): it cannot "
                f"go to another device ({device})"
            )

    def _fill(self, move: LayerMove) -> CopyHandle:
        """Begin to copy, and make the slots' contents meanwhile."""
        unit = move.arriving
        copy = self._weights.streamer(unit).copier.copy_async(copy_plan(unit, move.remains), self._copy_rate)
        move.contents = resident_contents(unit, unit.precision)
        return copy

    def _leave(self, unit: WeightUnit, rest: WeightUnit | None) -> int:
        """Give up the pages of what a unit has lost; return those that are free now."""
        if unit.absent:
            self._weights.streamer(unit).forget(unit)
            return resize_prefetch_buffers(self._weights, unit.pool.name)
        return self._allocator.shrink(unit, rest) if rest else self._allocator.give_up(unit)


def _leaves_nothing(units: tuple[WeightUnit, ...], names: set[str], pool: PagePool) -> bool:
    """Return whether only vectors would stay when these parameters go to another device: they go too, so that hidden
    states are copied to the layer once."""
    if pool.backend.device == units[0].pool.backend.device or units[0].layer.unpaged.parameters():
        return False
    staying = {name: slot for unit in units if unit.pool is not pool for name, slot in unit.slots.items()}
    matrices = [name for name, slot in staying.items() if name not in names and slot.parameter.ndim > 1]
    return not matrices or not units[0].slots.keys() - names
