"""The weights of one decoder layer at one place: their pages, precision and host copies."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from hashlib import blake2b

import torch

from elastic.errors import StateError
from elastic.memory.backends.streams import synchronize
from elastic.memory.checkpoint_file import Checkpoint
from elastic.memory.checksum import digest
from elastic.memory.host_store import HostTensor, host
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.rate_limit import RateLimiter
from elastic.memory.weight_buffer import WeightBuffer
from elastic.memory.weight_layout import LayerLayout
from elastic.planning.sharding.cut_plan import ParameterCut
from elastic.planning.sharding.shard_pages import ShardPages
from elastic.types import DROPPED, HOST, LayerPages
from elastic.weights.parameter_slot import Content, ParameterSlot, UnpagedTensors, is_under
from elastic.weights.precision import LayerPrecision, LayerVariant, UnitPrecisions
from elastic.weights.prepacked.source import ResidentSource
from elastic.weights.proxy.dropped_source import missing_error
from elastic.weights.proxy.remote_source import RemoteSource
from elastic.weights.proxy.tensor import WeightProxy
from elastic.weights.proxy.transfer_cache import TransferCache
from elastic.weights.proxy.weight_home import PrefetchedTensors
from elastic.weights.shards.layer_cut import LayerCut, Piece, whole_pages
from elastic.weights.shards.part_views import Views, make_views
from elastic.weights.shards.stored import StoredParameter, find_stored


@dataclass(frozen=True)
class DecoderLayer:
    """A decoder layer of the model, common to all its units."""

    index: int
    name: str
    unpaged: UnpagedTensors
    checkpoint: Checkpoint | None = None
    """Where released weights are read from, if it has them."""
    cut: LayerCut | None = None
    """Its parts that can be here or not by themselves; None: it is here as a whole, or not."""

    def parts_in(self, shards: Collection[int]) -> frozenset[int]:
        """Return the parts of it, from 0, among shards of the model; without any, all parts."""
        of = 1 if self.cut is None else self.cut.plan.parts
        return (
            frozenset(shard % of for shard in shards if shard // of == self.index) if shards else frozenset(range(of))
        )


class Absence(Enum):
    """What it means that weights are not in pages of their place."""

    HOST = HOST
    """They are in the host store, and in a prefetch buffer while the layer is called."""
    DROPPED = DROPPED
    """They, or some of the layer's parts, are nowhere that the process would have to keep; it cannot be called."""


class WeightUnit:
    """Parameters of one decoder layer at one place: in a block there in some precision, or absent."""

    def __init__(
        self,
        layer: DecoderLayer,
        pool: PagePool,
        slots: Mapping[str, ParameterSlot],
        layout: LayerLayout,
        *,
        part: str = "",
        compute_device: torch.device | None = None,
        transfers: TransferCache | None = None,
        variants: Mapping[str, LayerVariant] | None = None,
    ) -> None:
        device = pool.backend.device
        self.layer, self.index, self.name = layer, layer.index, layer.name
        self.pool = pool
        self.slots = dict(slots)
        self.layout = layout
        self.nbytes, self.pages = layout.nbytes, layout.page_count(pool.page_bytes)
        """Of its full parameters: bytes, padding and alignment included, and pages of the place."""
        self.part = part
        """The name inside the layer of the modules that these are the weights of; empty: of the layer itself."""
        self.compute_device = compute_device or device
        """Where the layer computes: on another device than these weights, if they are those of modules elsewhere."""
        self.transfers = transfers or TransferCache(device)
        """What they are multiplied with then, brought here."""
        self.owner = f"layer:{layer.index}"
        self.precisions = UnitPrecisions(layer.name, layout, device, variants or {})
        self.dtype, self.variants = self.precisions.dtype, self.precisions.variants
        """The name of its first parameter's dtype, and what it can be swapped to, by name."""
        self.full = self.precision = self.precisions.full
        """`precision` is the one in which it lies in its block while resident, and full while absent."""
        self.precision_changes = 0
        """How often it got another one."""
        self.absent: Absence | None = None
        """None while resident. Read by the layer's hooks: whether a call must be streamed, or refused."""
        self.cut = layer.cut if layer.cut is not None and not part and set(layer.cut.parted) <= slots.keys() else None
        """Its parts; None: it has one, itself."""
        self.every = frozenset(range(1 if self.cut is None else self.cut.plan.parts))
        """All its parts."""
        self._parted = () if self.cut is None else self.cut.parted
        """The parameters that come and go part by part."""
        self.shards_here = self.every
        """The parts that are at its place; none while it is in the host store."""
        self._views: dict[tuple[int, ...], Views] = {}  # of parts, each made once, until the layer is switched
        self.prefetched = PrefetchedTensors()
        self.blocks: dict[object, WeightBuffer] = {}
        """By the key of a precision; all but that of the present one are reclaimable."""
        self.host_copies: dict[str, HostTensor] = {}
        """Full parameters in the host store, by name."""
        self.digests: dict[str, int] = {}
        """Of the full parameters that were never written, by name, once `measure` was called: they come back by it."""
        self._lock_pages = device.type == "cuda"
        self.writes = 0
        """How often a parameter was written that is not plain."""
        self.was_written = False
        """Whether a parameter was written before its slot got what it has now."""
        self._version_shown = self.version()

    @property
    def variant(self) -> str:
        """The name of its present precision: its dtype, a variant, or several where parts are in different ones."""
        return self.precisions.name_of(self.precision)

    @property
    def held_pages(self) -> int:
        """Pages that it has at its place."""
        return self.shard_pages.pages(self.shards_here) if self.absent else self.pages_in(self.precision)

    @cached_property
    def shard_pages(self) -> ShardPages:
        """The pages of its place that its full parameters need, by the parts that are here."""
        size = self.pool.page_bytes
        return whole_pages(self.layout, size) if self.cut is None else self.cut.pages(self.layout, size)

    def pages_in(self, precision: LayerPrecision) -> int:
        """Return the pages that it needs at its place in a precision."""
        return precision.layout.page_count(self.pool.page_bytes)

    def with_variant(self, variant: str | None, parts: tuple[str, ...] = ()) -> LayerPrecision:
        """Return the present precision, but with the parameters under `parts` (none: all) in a variant; None: full.

        Raises `ConfigError` for a variant that the layer has not, and for parts that do not make sense alone.
        """
        names = [name for name in self.slots if not parts or is_under(name, parts)]
        return self.precisions.changed(self.precision, names, variant, whole=not parts)

    def version(self) -> int:
        """Return a number that rises when a parameter is written: by torch where it is plain, else by `writes`."""
        plain = [slot.parameter._version for slot in self.slots.values() if slot.address is not None]
        return self.writes + sum(plain)

    @property
    def written(self) -> bool:
        """Whether a parameter was written since the model was wrapped, in a way that torch or Elastic counts."""
        return self.was_written or self.version() != self._version_shown

    # -- the bytes

    def measure(self) -> dict[str, int]:
        """Return the digests of the full parameters, by name, of those that come and go part by part piece by piece.

        They are computed once, as long as nobody writes them. Those of a dropped unit are what they were; empty: nobody
        asked before.
        """
        if self.absent is Absence.DROPPED or (self.digests and not self.written):
            return self.digests
        self.digests = {}
        synchronize(self.pool.backend.device)
        digests = {}
        for name in [each for each in self.slots if each not in self._parted]:
            parameter = self.at_place(name)
            digests[name] = self.host_copies[name].digest if parameter is None else self.slots[name].digest(parameter)
        for piece in (piece for part in self.every for piece in self.pieces(part)):
            parameter = self.at_place(piece.name)
            stored = self.host_copies[piece.name].tensor if parameter is None else parameter
            digests[piece.key] = piece.digest(piece.of(stored))
        if not self.written:
            self.digests = digests
        return digests

    def pages_of_full(self, shards: frozenset[int] | None = None) -> LayerPages:
        """Say where its full parameters lie, these parts of it at least; None: all.

        Raises `StateError` for a unit that has them in no block of its own.
        """
        block = self.blocks.get(self.full.key)
        if not self.shards_here or self.precision is not self.full or block is None or self.part:
            raise StateError(f"{self.name} has no full weights of its own at {self.pool.name} now; restore it first")
        if missing := sorted((self.every if shards is None else shards) - self.shards_here):
            raise missing_error(self.name, self.index, missing, len(self.every))
        digests, parts = combined(self.measure()), tuple(sorted(self.shards_here))
        return LayerPages(self.index, block.page_numbers, self.nbytes, self.layout_checksum, digests, parts)

    @property
    def layout_checksum(self) -> str:
        """Tell by few letters how its full parameters and their parts lie."""
        return self.layout.checksum if self.cut is None else self.cut.checksum(self.layout)

    def pieces(self, part: int) -> Iterator[Piece]:
        """Yield the runs of bytes that come and go with a part."""
        return iter(()) if self.cut is None else self.cut.pieces(self.layout, part)

    def part_digest(self, part: int) -> int:
        """Return a checksum of the full weights of a part and of all that the parts have in common."""
        every = self.measure()
        others = {piece.key for other in self.every - {part} for piece in self.pieces(other)}
        return combined({key: value for key, value in every.items() if key not in others})

    @property
    def recoverable(self) -> bool:
        """Whether host memory or the checkpoint has all of its full parameters."""
        return all(name in self.host_copies or self.in_files(name) is not None for name in self.slots)

    def stored(self, name: str) -> torch.Tensor:
        """Return a full parameter, any shape, as it lies in pages, from host memory or the checkpoint.

        Raises `StateError` where neither has it. Whether the bytes of the checkpoint are those of the parameter is for
        the caller to find out.
        """
        if name in self.host_copies:
            return self.host_copies[name].tensor
        return self.slots[name].in_pages(self.require_in_files(name).whole())

    def require_in_files(self, name: str) -> StoredParameter:
        """Return a full parameter as `in_files` does. Raises `StateError` where it is not there."""
        stored = self.in_files(name)
        if stored is None:
            raise StateError(f"{self.name}.{name} is neither in host memory nor in a checkpoint")
        return stored

    def in_files(self, name: str) -> StoredParameter | None:
        """Return a full parameter as the files of the checkpoint have it, if its dtype holds all values of theirs."""
        like = self.layout.parameters[name]
        return find_stored(self.layer.checkpoint, f"{self.name}.{name}", like.shape, like.dtype)

    def part_tensors(self, parts: tuple[int, ...]) -> Views:
        """Return the tensors of some parts, by parameter; see `ModelWeights.part_tensors`."""
        made = self._views.get(parts)
        if made is None:
            self._require_parts(parts)
            made = self._views[parts] = make_views(self._required_cut().plan, parts, self._view)
        return made

    def _view(self, cut: ParameterCut, rows: range) -> torch.Tensor:
        """View a run of rows of a parameter, any shape, in the checkpoint's orientation."""
        if self.absent and cut.name in self._parted:
            return self.show_piece(self._required_cut().piece(self.layout, cut.name, rows))
        plain: torch.Tensor = self.slots[cut.name].parameter
        return plain.detach().narrow(cut.dim, rows.start, len(rows))

    def show_piece(self, piece: Piece) -> torch.Tensor:
        """View a piece of a layer of which not all parts are here, in the checkpoint's orientation and shape."""
        lies = self.layout.parameters[piece.name]
        shape = [len(piece.rows) if dim == piece.dim else size for dim, size in enumerate(lies.shape)]
        shown = self.blocks[self.full.key].show_part(piece.key, piece.offset, piece.nbytes, lies.dtype)
        return shown.as_strided(shape, lies.strides)

    def _required_cut(self) -> LayerCut:
        if self.cut is None:
            raise StateError(f"{self.name} is not cut, or has modules at another place; wrap the model with shards=2")
        return self.cut

    def _require_parts(self, parts: tuple[int, ...]) -> None:
        """Raise `StateError` unless these parts are here, in full."""
        if self.precision is not self.full or self.absent is Absence.HOST:
            form = "in host memory" if self.absent else f"in variant {self.variant!r}"
            raise StateError(f"{self.name} is {form}; restore it first: rt.restore({self.index})")
        if missing := sorted(set(parts) - self.shards_here):
            raise missing_error(self.name, self.index, missing, len(self.every))

    def block_for(self, precision: LayerPrecision) -> WeightBuffer:
        """Return the block of a precision, addresses stable as long as no tensor outside keeps an earlier one."""
        block = self.blocks.get(precision.key)
        if block is not None and len(block.slots) != self.pages_in(precision):
            block.close()
            block = None
        if block is None:
            slots = precision.layout.pages(self.pool.page_bytes)
            block = self.blocks[precision.key] = WeightBuffer(self.pool, precision.nbytes, slots=slots)
        return block

    def keep(self, pace: RateLimiter | None = None) -> int:
        """Have the full bytes of a resident unit in the host store; returns how many had to be copied."""
        copied = 0
        synchronize(self.pool.backend.device)  # what others wrote, on streams of theirs, before `version` was asked
        for name, slot in self.slots.items():
            parameter = self.at_place(name)
            if parameter is None:
                continue  # packed: written through us only
            kept, fingerprint = self.host_copies.get(name), slot.digest(parameter)
            if kept is None or kept.digest != fingerprint:
                checkpoint = None if slot.prepacked else self.layer.checkpoint
                file = checkpoint.find(f"{self.name}.{name}") if checkpoint else None
                self.host_copies[name] = host.keep(parameter, fingerprint, file=file, lock=self._lock_pages)
                copied += parameter.nbytes
            if pace is not None:
                pace.acquire(parameter.nbytes)
        return copied

    def write(self, name: str, value: torch.Tensor) -> None:
        """Replace a parameter of an absent unit: `value`, any shape, is broadcast and cast to it.

        Raises `StateError` if the unit came back meanwhile.
        """
        if not self.absent:
            raise StateError(f"{self.name} came back meanwhile; write again")
        fresh = torch.empty_like(self.host_copies[name].tensor).copy_(value)
        stored = self.slots[name].in_pages(fresh)
        self.host_copies[name] = host.keep(stored, digest(fresh), lock=self._lock_pages)
        self.writes += 1

    def overwritten(self, name: str) -> None:
        """Note that a parameter was written in the place where it lies: what the host store has of it is old."""
        self.host_copies.pop(name, None)
        self.writes += 1

    def sources(
        self, tensors: Mapping[str, torch.Tensor], precision: LayerPrecision | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (target, host tensor) pairs that fill a block: any shape, but the same shape and dtype in a pair.

        `tensors` are those that the block shows of a precision (None: full), by their names in the layout.
        """
        precision, pairs = precision or self.full, []
        for name in self.slots:
            if name in precision.packings:
                targets = precision.tensors_of(name, tensors)
                pairs += [(targets[part], tensor) for part, tensor in precision.packings[name].parts.items()]
            else:
                pairs.append((tensors[name], self.stored(name)))
        return pairs

    # -- the switches, at a safe point

    def show(self, contents: Mapping[str, Content], precision: LayerPrecision | None = None) -> None:
        """Be resident in a precision (None: full) from now on."""
        self._fill_slots(contents)
        precision = precision or self.full
        self.precision_changes += precision.key != self.precision.key
        self.precision, self.absent, self.shards_here = precision, None, self.every
        if not self.part:
            self.layer.unpaged.move_to(self.pool.backend.device)

    def hide(
        self,
        contents: Mapping[str, Content],
        absence: Absence = Absence.HOST,
        shards: frozenset[int] = frozenset(),
    ) -> None:
        """Be absent from now on, but for some parts of it; unless it is dropped, the host store must have the bytes."""
        self.absent, self.shards_here = absence, shards
        self._fill_slots(contents)
        self.precision_changes += self.precision.key != self.full.key
        self.precision = self.full

    def _fill_slots(self, contents: Mapping[str, Content]) -> None:
        self.was_written = self.written
        self._views.clear()
        with torch.inference_mode(False), torch.no_grad():
            for name, slot in self.slots.items():
                slot.put(contents[name])
        self._version_shown = self.version()

    def at_place(self, name: str) -> torch.Tensor | None:
        """Return a full parameter, any shape, as it lies in pages; None: it is packed, absent, or kept by the host."""
        parameter: torch.Tensor = self.slots[name].parameter
        if isinstance(parameter, WeightProxy) and isinstance(parameter.source, RemoteSource):
            parameter = parameter.source.at_place
        if isinstance(parameter, WeightProxy) and isinstance(parameter.source, ResidentSource):
            return None if name in self.host_copies else parameter.source.packed
        return None if isinstance(parameter, WeightProxy) else self.slots[name].in_pages(parameter)

    def drop_host_copies(self) -> None:
        """Hold no bytes in the host store any more, nor packed ones."""
        self.host_copies.clear()
        self.variants.clear()
        self.precisions.made = {self.full.key: self.full}
        self.precision = self.full


def combined(digests: Mapping[str, int]) -> int:
    """Return one checksum of the digests of a layer's parameters, by name."""
    text = "".join(f"{name} {value}\n" for name, value in sorted(digests.items()))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
