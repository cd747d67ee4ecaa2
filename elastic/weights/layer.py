"""The weights of one decoder layer at one place: their pages, precision and host copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from elastic.errors import StateError
from elastic.memory.checkpoint_file import Checkpoint
from elastic.memory.checksum import digest
from elastic.memory.copy_engine import synchronize
from elastic.memory.host_store import HostTensor, host
from elastic.memory.page_pool import PagePool
from elastic.memory.rate_limit import RateLimiter
from elastic.memory.weight_buffer import WeightBuffer
from elastic.memory.weight_layout import LayerLayout
from elastic.weights.parameter_slot import Content, ParameterSlot, UnpagedTensors, is_under
from elastic.weights.precision import LayerPrecision, LayerVariant, UnitPrecisions
from elastic.weights.proxy.remote_source import RemoteSource
from elastic.weights.proxy.tensor import WeightProxy
from elastic.weights.proxy.transfer_cache import TransferCache
from elastic.weights.proxy.weight_home import StagedTensors


@dataclass(frozen=True)
class DecoderLayer:
    """A decoder layer of the model, common to all its units."""

    index: int
    name: str
    unpaged: UnpagedTensors
    checkpoint: Checkpoint | None = None
    """Where released weights are read from, if it has them."""


class WeightUnit:
    """Parameters of one decoder layer at one place: in a block there in some precision, or absent.

    While absent they are in the host store, and in a prefetch buffer while the layer is called.
    """

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
        self.absent = False
        """Read by the layer's hooks: whether a call must be staged."""
        self.staged = StagedTensors()
        self.blocks: dict[object, WeightBuffer] = {}
        """By the key of a precision; all but that of the present one are reclaimable."""
        self.host_copies: dict[str, HostTensor] = {}
        """Full parameters in the host store, by name."""
        self._lock_pages = device.type == "cuda"
        self.writes = 0
        """How often a parameter was written that is not plain."""

    @property
    def variant(self) -> str:
        """The name of its present precision: its dtype, a variant, or several where parts are in different ones."""
        return self.precisions.name_of(self.precision)

    @property
    def held_pages(self) -> int:
        """Pages that it has at its place."""
        return 0 if self.absent else self.pages_in(self.precision)

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
        plain = (slot.parameter for slot in self.slots.values() if not isinstance(slot.parameter, WeightProxy))
        return self.writes + sum(parameter._version for parameter in plain)

    # -- the bytes

    def block_for(self, precision: LayerPrecision) -> WeightBuffer:
        """Return the block of a precision, addresses stable as long as no tensor outside keeps an earlier one."""
        block = self.blocks.get(precision.key)
        if block is not None and block.pages != self.pages_in(precision):
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
            parameter: torch.Tensor = slot.parameter
            if isinstance(parameter, WeightProxy) and isinstance(parameter.source, RemoteSource):
                parameter = parameter.source.at_place
            if isinstance(parameter, WeightProxy):
                continue  # packed: written through us only
            kept, fingerprint = self.host_copies.get(name), digest(parameter)
            if kept is None or kept.digest != fingerprint:
                checkpoint = self.layer.checkpoint
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
        fresh = self.host_copies[name].tensor.clone()
        fresh.copy_(value)
        self.host_copies[name] = host.keep(fresh, digest(fresh), lock=self._lock_pages)
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
                pairs.append((tensors[name], self.host_copies[name].tensor))
        return pairs

    # -- the switches, at a safe point

    def show(self, contents: Mapping[str, Content], precision: LayerPrecision | None = None) -> None:
        """Be resident in a precision (None: full) from now on."""
        self._fill_slots(contents)
        self.precision, self.absent = precision or self.full, False
        if not self.part:
            self.layer.unpaged.move_to(self.pool.backend.device)

    def hide(self, contents: Mapping[str, Content]) -> None:
        """Be absent from now on; the host store must have the bytes."""
        self.absent = True
        self._fill_slots(contents)
        self.precision = self.full

    def _fill_slots(self, contents: Mapping[str, Content]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for name, slot in self.slots.items():
                slot.put(contents[name])

    def drop_host_copies(self) -> None:
        """Hold no bytes in the host store any more, nor packed ones."""
        self.host_copies.clear()
        self.variants.clear()
        self.precisions.made = {self.full.key: self.full}
        self.precision = self.full
