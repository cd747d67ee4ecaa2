"""Streaming: absent layers that are called are copied into stages, the next one while the present one computes.

A stage is a block with room for any layer of its place. While one forward pass is in a staged layer, the stage is not
touched; else the staged layer whose next call is farthest away, in the order of the layers, gives way. (Of two stages
that is the one used longest ago. Of more it is not: layers are called in a circle, and the one used longest ago is the
one that is needed next.)
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from elastic.errors import CapacityError
from elastic.memory.copy_engine import CopyEngine, CopyHandle
from elastic.memory.page_pool import PagePool
from elastic.memory.weight_buffer import WeightBuffer
from elastic.weights.layer import WeightUnit

logger = logging.getLogger(__name__)
OWNER = "staging"
MOST_STAGES = 2
"""One for the layer that computes, one for the next."""


class PrefetchBuffer:
    """A block, the layer whose copy is in it or on its way, and how many threads are inside that layer."""

    def __init__(self) -> None:
        self.block: WeightBuffer | None = None
        self.charged = True
        """Its pages are counted, though not created yet."""
        self.layer: WeightUnit | None = None
        self.tensors: Mapping[str, torch.Tensor] = {}
        self.copy: CopyHandle | None = None
        self.users = 0
        self.stale = False
        """The host store has other bytes by now."""
        self.used: list[torch.cuda.Event] = []
        """CUDA: after these nobody reads what is in it."""


class WeightStreamer:
    """The stages of one place. Thread-safe.

    `layers` are the model's, as they are now. A stage is counted in the ledger as `staging` from the start;
    its pages are created at its first use.
    """

    def __init__(self, pool: PagePool, copier: CopyEngine, stage_bytes: int, layers: Sequence[WeightUnit]) -> None:
        self.pool = pool
        self.stage_bytes = stage_bytes
        """What the largest layer of the model takes: any of them may come here."""
        self.on_spare: Callable[[int], object] = lambda pages: None
        """Hears of pages of a stage that was in use when it became one too many."""
        self.copier = copier
        self._layers = layers
        self._count = len(layers)
        self._stages: list[PrefetchBuffer] = []
        self._wanted = 0
        self.least = 1
        """Stages that are kept while no layer is absent, so that there is one when a layer is released."""
        self._changed = threading.Condition()
        self._mine = threading.local()  # .stages: what this thread is in, outermost first

    @property
    def stage_pages(self) -> int:
        """Pages of one stage."""
        return self.pool.pages_for(self.stage_bytes)

    @property
    def stages(self) -> int:
        return len(self._stages)

    # -- what the hooks do

    def enter(self, layer: WeightUnit) -> None:
        """Have an absent layer staged until `leave`, and the next absent one on its way. Raises `CapacityError`."""
        with self._changed:
            while (stage := self._stage_for(layer)) is None:
                self._changed.wait()
            stage.users += 1
            ticket = stage.copy
        try:
            assert ticket is not None
            ticket.wait()
            with self._changed:
                layer.staged = stage.tensors
                self._prefetch_after(layer)
        except BaseException:
            del ticket  # it knows the error, which knows this frame, and so all the forward's tensors
            self._abort(stage)
            raise
        layer.enter()
        self._entered().append((stage, layer))

    def leave(self, layer: WeightUnit) -> None:
        """The forward of the layer is over, and of what it contains. One that was not entered is ignored."""
        entered = self._entered()
        if not any(inside is layer for _, inside in entered):
            return
        left = None
        while left is not layer:
            stage, left = entered.pop()
            left.leave()
            self._left(stage)

    def leave_all(self) -> None:
        """This thread begins a forward pass: what it is still in was left without its hooks (Ctrl-C)."""
        entered = self._entered()
        if entered:
            self.leave(entered[0][1])

    # -- what actions do

    def resize(self, count: int) -> int:
        """Have `count` stages; returns how many pages others may have more (or fewer).

        A stage in use goes when it is left. Raises `CapacityError` for a new one that the budget has no room for.
        """
        pages = 0
        with self._changed:
            self._wanted = count
            while len(self._stages) < count:
                self.pool.charge(OWNER, self.stage_bytes)
                self._stages.append(PrefetchBuffer())
                pages -= self.stage_pages
            for stage in [s for s in self._stages if not s.users][: len(self._stages) - count]:
                pages += self._close(stage)
            self._changed.notify_all()
        return pages

    def forget(self, layer: WeightUnit) -> None:
        """What a stage holds of this layer is not used again, once the forwards that read it are over."""
        with self._changed:
            for stage in self._stages:
                if stage.layer is layer:
                    stage.stale = True
                    self._tidy(stage)

    def close(self) -> None:
        """Give every stage back. No forward may be in flight."""
        self.resize(0)

    # -- inside, under the lock

    def _entered(self) -> list[tuple[PrefetchBuffer, WeightUnit]]:
        try:
            entered: list[tuple[PrefetchBuffer, WeightUnit]] = self._mine.stages
        except AttributeError:
            entered = self._mine.stages = []
        return entered

    def _stage_for(self, layer: WeightUnit) -> PrefetchBuffer | None:
        """The stage with this layer, or one that it may have; None: wait."""
        assert self._stages, "a place with an absent layer has a stage"
        for stage in self._stages:
            if stage.layer is layer:
                return stage
        free = self._next_to_give_way(layer)
        if free is not None:
            self._load(free, layer)
        return free

    def _next_to_give_way(self, layer: WeightUnit) -> PrefetchBuffer | None:
        candidates = [stage for stage in self._stages if not stage.users]
        return max(candidates, key=lambda stage: self._distance(layer, stage.layer), default=None)

    def _distance(self, here: WeightUnit, other: WeightUnit | None) -> int:
        """How many layers from one to the next call of the other; an empty stage is the farthest."""
        return self._count if other is None else (other.index - here.index) % self._count

    def _prefetch_after(self, layer: WeightUnit) -> None:
        here = [other for other in self._layers if other.pool is self.pool]
        absent = [other for other in here if other.absent and other is not layer]
        following = min(absent, key=lambda other: self._distance(layer, other), default=None)
        if following is None or any(stage.layer is following for stage in self._stages):
            return
        stage = self._next_to_give_way(layer)
        if stage is not None:
            try:
                self._load(stage, following)
            except CapacityError as error:  # raised again for whoever calls that layer, if it lasts
                logger.info("%s was not fetched ahead: %s", following.name, str(error))

    def _load(self, stage: PrefetchBuffer, layer: WeightUnit) -> None:
        self._empty(stage)
        if stage.block is None:
            stage.block = self._new_block(stage)
        stage.tensors = stage.block.show(layer.layout)
        stage.copy = self.copier.start(layer.sources(stage.tensors), after=stage.used)
        stage.used = []
        stage.layer = layer

    def _new_block(self, stage: PrefetchBuffer) -> WeightBuffer:
        block = WeightBuffer(self.pool, self.stage_bytes)
        with self.pool.mapping_lock:  # nobody takes the pages in between
            if stage.charged:
                self.pool.discharge(OWNER, self.stage_bytes)
            try:
                block.allocate(OWNER)
            except BaseException:
                block.close()
                if stage.charged:
                    self.pool.charge(OWNER, self.stage_bytes)
                raise
        stage.charged = False
        return block

    def _empty(self, stage: PrefetchBuffer) -> None:
        """Let go of what is in a stage that nobody uses. A block that is seen outside is given up."""
        if stage.layer is None:
            return
        stage.layer.staged = None
        stage.layer, stage.stale = None, False
        stage.tensors = {}
        if stage.copy is not None:
            stage.copy.discard()
            stage.copy = None
        if stage.block is not None and not stage.block.hide():
            self._settle_device()
            stage.block.orphan(lambda pages: None)
            stage.block = None

    def _close(self, stage: PrefetchBuffer) -> int:
        """Take a stage away; returns the pages it was entitled to."""
        self._empty(stage)
        self._stages.remove(stage)
        if stage.block is not None:
            self._settle_device()
            stage.block.close()
        elif stage.charged:
            self.pool.discharge(OWNER, self.stage_bytes)
        return self.stage_pages

    def _left(self, stage: PrefetchBuffer) -> None:
        device = self.pool.backend.device
        with self._changed:
            stage.users -= 1
            if device.type == "cuda":
                stage.used.append(torch.cuda.current_stream(device).record_event())
            self._tidy(stage)
            self._changed.notify_all()

    def _tidy(self, stage: PrefetchBuffer) -> None:
        if stage.users:
            return
        if len(self._stages) > self._wanted:
            self.on_spare(self._close(stage))
            self.pool.notify()
        elif stage.stale:
            self._empty(stage)

    def _abort(self, stage: PrefetchBuffer) -> None:
        """The copy failed: the next one who needs the layer has it copied again."""
        with self._changed:
            stage.users -= 1
            stage.stale = True
            self._tidy(stage)
            self._changed.notify_all()

    def _settle_device(self) -> None:
        if self.pool.backend.device.type == "cuda":
            torch.cuda.synchronize(self.pool.backend.device)
