"""What the actions on layers share: who has pages to lend, what is prepared, who waits."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from elastic.actions.pages.broker import PageBroker
from elastic.errors import CapacityError, StateError
from elastic.types import Release, Restore, Swap
from elastic.weights.layer import WeightUnit
from elastic.weights.model import ModelWeights
from elastic.weights.parameter_slot import Content
from elastic.weights.precision import LayerPrecision
from elastic.weights.slot_contents import reinstate
from elastic.weights.streaming import MOST_STAGES

logger = logging.getLogger(__name__)
Move = Swap | Restore


@dataclass
class SlotSwitch:
    """One layer, and what its slots will have."""

    layer: WeightUnit
    form: LayerPrecision
    contents: dict[str, Content]
    version: int
    """How often its parameters had been written when their bytes were copied."""
    form_before: LayerPrecision = field(init=False)
    absent_before: bool = field(init=False)

    def __post_init__(self) -> None:
        self.form_before, self.absent_before = self.layer.form, self.layer.absent

    def undo(self) -> None:
        """Have the slots as they were; the bytes are still there."""
        reinstate(self.layer, self.form_before, self.absent_before)


@dataclass
class PreparedAction:
    """What an action will flip, and what it holds until then."""

    action: Release | Move
    flips: list[SlotSwitch] = field(default_factory=list)
    deferred: list[WeightUnit] = field(default_factory=list)
    moved_bytes: int = 0
    lent_bytes: int = 0
    """Stages that the layers will not need."""
    committed: bool = False

    @property
    def layers(self) -> list[WeightUnit]:
        return [flip.layer for flip in self.flips]

    def require_unwritten(self) -> None:
        """Raises `StateError` if a layer was written since its bytes were copied: the copies are old."""
        for flip in self.flips:
            if flip.layer.version() != flip.version:
                name = flip.layer.name
                raise StateError(f"the weights of {name} were written while they were on their way; try again")

    def let_go(self) -> None:
        """Where torch exchanged parameters, the contents have what the layers had: hold it no longer."""
        for flip in self.flips:
            flip.contents.clear()


class DeferredActions:
    """The layers whose move is deferred. The KV cache keeps the pages that they need from new caches."""

    def __init__(self, broker: PageBroker) -> None:
        self._broker = broker
        self._moves: dict[WeightUnit, Move] = {}

    def add(self, layers: Iterable[WeightUnit], move: Move) -> None:
        self._set({**self._moves, **dict.fromkeys(layers, move)})

    def drop(self, layers: Iterable[WeightUnit]) -> None:
        gone = set(layers)
        self._set({layer: move for layer, move in self._moves.items() if layer not in gone})

    def moves(self) -> list[Move]:
        """The actions that are waited for, each with the layers that still wait."""
        wanted: dict[Move, list[WeightUnit]] = {}
        for layer, move in self._moves.items():
            wanted.setdefault(of_layers(move, ()), []).append(layer)
        return [of_layers(move, indices(layers)) for move, layers in wanted.items()]

    def has(self, layer: WeightUnit) -> bool:
        """Whether a move of the layer is deferred."""
        return layer in self._moves

    def _set(self, moves: dict[WeightUnit, Move]) -> None:
        places = {layer.pool.name for layer in (*self._moves, *moves)}
        self._moves = moves
        for place in places:
            here = [(layer, move) for layer, move in moves.items() if layer.pool.name == place]
            self._broker.hold_back(place, sum(layer.pages_in(form_after(layer, move)) for layer, move in here))


def of_layers(move: Move, layers: tuple[int, ...]) -> Move:
    """The same move of other layers."""
    return Swap(layers, move.variant, move.parts) if isinstance(move, Swap) else Restore(layers, move.parts)


def form_after(layer: WeightUnit, move: Move) -> LayerPrecision:
    """The form that a move gives a layer. Raises `ConfigError`."""
    return layer.with_variant(move.variant if isinstance(move, Swap) else None, move.parts)


def by_place(layers: Iterable[WeightUnit]) -> dict[str, list[WeightUnit]]:
    places: dict[str, list[WeightUnit]] = {}
    for layer in layers:
        places.setdefault(layer.pool.name, []).append(layer)
    return places


def indices(layers: Iterable[WeightUnit]) -> tuple[int, ...]:
    """Each once."""
    return tuple(dict.fromkeys(layer.index for layer in layers))


def retire(layer: WeightUnit, form: LayerPrecision, broker: PageBroker) -> int:
    """The layer's block for a form is not read any more; returns the pages that are free now."""
    block, place = layer.blocks[form.key], layer.pool.name
    if layer.pool.backend.device.type == "cuda":
        torch.cuda.synchronize(layer.pool.backend.device)
    if block.hide():
        block.make_reclaimable()
        return block.pages
    del layer.blocks[form.key]
    return block.orphan(lambda pages: broker.give_to_cache(place, pages))


def resize_stages(weights: ModelWeights, place: str) -> int:
    """As many stages as the absent layers of a place need; returns the pages that others may have more or fewer."""
    streamer = weights.streamers[place]
    absent = sum(layer.absent for layer in weights.layers if layer.pool.name == place)
    wanted = max(streamer.least, min(MOST_STAGES, absent))
    try:
        return streamer.resize(wanted)
    except CapacityError as error:  # one stage will do, only nothing is fetched ahead
        logger.info("place %s has no room for another stage: %s", place, str(error))
        return 0
