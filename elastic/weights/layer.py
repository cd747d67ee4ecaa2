"""The weights of one decoder layer: where they are and in what form, and the flips between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from elastic.errors import ConfigError, StateError
from elastic.memory.checkpoint_file import Checkpoint
from elastic.memory.checksum import digest
from elastic.memory.host_store import HostTensor, host
from elastic.memory.page_pool import PagePool
from elastic.memory.rate_limit import RateLimiter
from elastic.memory.weight_buffer import WeightBuffer
from elastic.memory.weight_layout import LayerLayout
from elastic.weights.parameter_slot import Content, ParameterSlot
from elastic.weights.precision import LayerPrecision, LayerVariant, make_precision
from elastic.weights.proxy.host_source import HostSource, PackedFallbackSource
from elastic.weights.proxy.remote_source import RemoteSource
from elastic.weights.proxy.tensor import WeightProxy
from elastic.weights.proxy.transfer_cache import TransferCache

Shown = Mapping[str, torch.Tensor]
"""What a block shows, by the names in a layout."""


class WeightUnit:
    """One decoder layer's weights: in a block of its place (resident, in one of its forms), or in the host store."""

    def __init__(
        self,
        index: int,
        name: str,
        pool: PagePool,
        slots: Mapping[str, ParameterSlot],
        layout: LayerLayout,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.index = index
        self.name = name
        self.pool = pool
        self.slots = dict(slots)
        self.layout = layout
        self.owner = f"layer:{index}"
        self.full = LayerPrecision({}, {}, layout)
        self.form = self.full
        """While resident: how it lies in its block. Full while absent."""
        self._forms: dict[frozenset[tuple[str, str]], LayerPrecision] = {frozenset(): self.full}
        self._named: tuple[LayerPrecision | None, str] = (None, "")
        self.variants: Mapping[str, LayerVariant] = {}
        self.absent = False
        """Read by the layer's hooks: whether a call must be staged."""
        self.staged: Shown | None = None
        """While absent: the parameters in a stage, for forwards of this layer to read."""
        self.blocks: dict[object, WeightBuffer] = {}
        """By the key of a form; all but that of the present form are at rest."""
        self.on_written: Callable[[], object] = lambda: None
        """Told when the host store has other bytes than a stage."""
        self.part = ""
        """The name inside the layer of the modules that these are the weights of; empty: of the layer itself."""
        self.unpaged_tensors: tuple[tuple[dict[str, Any], str], ...] = ()
        """Where the layer's tensors are that do not lie in pages: a module's buffers or parameters, and a name."""
        self.accelerate_hooks: tuple[Any, ...] = ()
        """accelerate's hooks in a model that it dispatched: they have inputs on their `execution_device`."""
        self.compute_device = pool.backend.device
        """Where the layer computes: on another device than these weights, if they are those of modules elsewhere."""
        self.arrivals = TransferCache(pool.backend.device)
        """What they are multiplied with then."""
        self._checkpoint = checkpoint
        self._host: dict[str, HostTensor] = {}
        self._writes = 0
        self._threads_inside = threading.local()

    @property
    def nbytes(self) -> int:
        """Bytes of its full parameters, padding and alignment included."""
        return self.layout.nbytes

    @property
    def pages(self) -> int:
        """Pages that it needs at its place, full."""
        return self.pages_in(self.full)

    @property
    def held_pages(self) -> int:
        """Pages that it has at its place."""
        return 0 if self.absent else self.pages_in(self.form)

    def pages_in(self, form: LayerPrecision) -> int:
        """Pages that it needs at its place in this form."""
        return form.layout.page_count(self.pool.page_bytes)

    @property
    def reordered(self) -> bool:
        """Whether a parameter is stored in another order than the user's model had it."""
        return any(self.layout.parameters[name].strides != slot.strides for name, slot in self.slots.items())

    @cached_property
    def dtype(self) -> str:
        """The name of its first matrix's dtype, such as `float16`."""
        dtypes = [p.dtype for p in self.layout.parameters.values()]
        return str(dtypes[0]).removeprefix("torch.") if dtypes else "none"

    @property
    def variant(self) -> str:
        """The name of its variant; of several, where parts of it are in different ones."""
        form, (named, name) = self.form, self._named
        if form is not named:
            name = self._name(form)
            self._named = form, name
        return name

    def _name(self, form: LayerPrecision) -> str:
        if form.full:
            return self.dtype
        offered = {name: variant.packings.keys() & self.slots.keys() for name, variant in self.variants.items()}
        whole = [name for name, packed in offered.items() if form.variants.keys() == packed]
        used = set(form.variants.values())
        return next((name for name in whole if used == {name}), "+".join([self.dtype, *sorted(used)]))

    @property
    def entered(self) -> bool:
        """Whether this thread is in a forward of the layer."""
        return getattr(self._threads_inside, "depth", 0) > 0

    def enter(self) -> None:
        self._threads_inside.depth = getattr(self._threads_inside, "depth", 0) + 1

    def leave(self) -> None:
        self._threads_inside.depth -= 1

    def intact(self) -> bool:
        """Whether nobody else replaced a parameter."""
        return all(slot.intact() for slot in self.slots.values())

    # -- the forms

    def with_variant(self, variant: str | None, parts: tuple[str, ...] = ()) -> LayerPrecision:
        """The present form, but with the parameters under `parts` (none: all) in a variant; None: full.

        Raises `ConfigError` for a variant that the layer has not, and for parts that do not make sense alone.
        """
        names = [name for name in self.slots if not parts or any(_under(name, part) for part in parts)]
        chosen = {name: v for name, v in self.form.variants.items() if name not in names}
        if variant is not None:
            offered = self._variant(variant)
            if parts and offered.together:
                raise ConfigError(
                    f"variant {variant!r} of {self.name} has norms rescaled for its matrices: swap the whole layer"
                )
            chosen |= {name: variant for name in names if name in offered.packings}
        return self._form_of(chosen)

    def has_part(self, part: str) -> bool:
        """Whether any of its parameters lies under this name."""
        return any(_under(name, part) for name in self.slots)

    @staticmethod
    def is_under(name: str, parts: Iterable[str]) -> bool:
        """Whether a parameter lies under one of these names."""
        return any(_under(name, part) for part in parts)

    def _form_of(self, chosen: Mapping[str, str]) -> LayerPrecision:
        key = frozenset(chosen.items())
        if key not in self._forms:
            device = self.pool.backend.device
            packings = {
                name: self._variant(variant).packings[name].for_device(device) for name, variant in chosen.items()
            }
            self._forms[key] = make_precision(self.layout, chosen, packings)
        return self._forms[key]

    def _variant(self, name: str) -> LayerVariant:
        if name not in self.variants:
            known = ", ".join(map(repr, self.variants)) or 'none: wrap(model, variants=("int4",)) makes them'
            raise ConfigError(f"{self.name} has no variant {name!r}; there are {known}")
        return self.variants[name]

    def outdated(self, form: LayerPrecision) -> bool:
        """Whether a packing stands for other bytes than the host store has. `keep` first."""
        return any(packing.source_digest != self._host[name].digest for name, packing in form.packings.items())

    def renew(self, form: LayerPrecision) -> LayerPrecision:
        """The form with every outdated packing made anew. Raises `StateError` where that cannot be had."""
        for name, variant in form.variants.items():
            kept, packings = self._host[name], self._variant(variant).packings
            if packings[name].source_digest != kept.digest:
                packings[name] = packings[name].renewed(kept.tensor, kept.digest)
        if self.outdated(form):
            self._forms = {frozenset(): self.full}
        return self._form_of(form.variants)

    # -- of what it consists

    @classmethod
    def of(cls, units: Sequence[WeightUnit], names: Collection[str], pool: PagePool, part: str = "") -> WeightUnit:
        """Some of the parameters that units of one layer have, in the forms that they have, for a place.

        With a `part`, of the layer that computes where the first unit is; else the layer is there.

        Nothing is there yet: its block is to be filled and shown.
        """
        owners = {name: unit for unit in units for name in unit.slots if name in names}
        first, layouts = units[0], {name: unit.layout.parameters[name] for name, unit in owners.items()}
        slots = {name: unit.slots[name] for name, unit in owners.items()}
        made = cls(first.index, first.name, pool, slots, LayerLayout.pack(layouts), first._checkpoint)
        made.part, made.variants = part, first.variants
        near = (unit.arrivals for unit in units if unit.pool.backend.device == pool.backend.device)
        made.arrivals = next(near, made.arrivals)
        if part:
            made.compute_device = first.compute_device
        else:
            made.unpaged_tensors, made.accelerate_hooks = first.unpaged_tensors, first.accelerate_hooks
        made._host = {name: unit._host[name] for name, unit in owners.items() if name in unit._host}
        chosen = {name: u.form.variants[name] for name, u in owners.items() if name in u.form.variants}
        made.form = made._form_of(chosen)
        return made

    def without(self, names: Collection[str]) -> WeightUnit:
        """What is left when some parameters go elsewhere: in the same block, where they lie now."""
        slots = {name: slot for name, slot in self.slots.items() if name not in names}
        left = WeightUnit(
            self.index, self.name, self.pool, slots, self.layout.without(names), checkpoint=self._checkpoint
        )
        left.part, left.variants, left.unpaged_tensors, left.accelerate_hooks = (
            self.part,
            self.variants,
            self.unpaged_tensors,
            self.accelerate_hooks,
        )
        left.compute_device, left.arrivals = self.compute_device, self.arrivals
        left._writes = self._writes
        left._host = {name: kept for name, kept in self._host.items() if name not in names}
        left.form = left.full if self.form.full else self.form.without(names)
        left._forms[frozenset(left.form.variants.items())] = left.form
        left.blocks = {left.form.key: self.blocks[self.form.key]}
        return left

    # -- the bytes

    def block_for(self, form: LayerPrecision) -> WeightBuffer:
        """The block of a form, addresses stable as long as no tensor outside keeps an earlier one."""
        block = self.blocks.get(form.key)
        if block is not None and block.pages != self.pages_in(form):
            block.close()
            block = None
        if block is None:
            slots = form.layout.pages(self.pool.page_bytes)
            block = self.blocks[form.key] = WeightBuffer(self.pool, form.nbytes, slots=slots)
        return block

    @property
    def block(self) -> WeightBuffer | None:
        """The block of the present form."""
        return self.blocks.get(self.form.key)

    def keep(self, pace: RateLimiter | None = None) -> int:
        """Have the full bytes of a resident layer in the host store; returns how many had to be copied."""
        copied = 0
        for name, slot in self.slots.items():
            parameter = _in_pages(slot.parameter)
            if isinstance(parameter, WeightProxy):
                continue  # written through us only
            known, fingerprint = self._host.get(name), digest(parameter)
            if known is None or known.digest != fingerprint:
                file = self._checkpoint.find(f"{self.name}.{name}") if self._checkpoint else None
                self._host[name] = host.keep(parameter, fingerprint, file=file, lock=self._lock_pages)
                copied += parameter.nbytes
            if pace is not None:
                pace.acquire(parameter.nbytes)
        return copied

    def host_tensor(self, name: str) -> torch.Tensor:
        """A full parameter in the host store, in the checkpoint's shape. Not to be written."""
        return self._host[name].tensor

    def drop_host_copies(self) -> None:
        """The host store need not have the bytes for this layer any more."""
        self._host.clear()
        self.variants, self._forms = {}, {frozenset(): self.full}
        self.form = self.full

    def version(self) -> int:
        """Rises when a parameter is written: by torch where it is plain, else by `write`."""
        plain = (slot.parameter for slot in self.slots.values() if not isinstance(slot.parameter, WeightProxy))
        return self._writes + sum(parameter._version for parameter in plain)

    @property
    def _lock_pages(self) -> bool:
        return self.pool.backend.device.type == "cuda"

    def write(self, name: str, value: torch.Tensor) -> None:
        """Replace a parameter of an absent layer."""
        if not self.absent:
            raise StateError(f"{self.name} came back meanwhile; write again")
        fresh = self.host_tensor(name).clone()
        fresh.copy_(value)
        self._host[name] = host.keep(fresh, digest(fresh), lock=self._lock_pages)
        self.wrote()
        self.on_written()

    def wrote(self) -> None:
        """A parameter was written that is not plain."""
        self._writes += 1

    def sources(self, shown: Shown, form: LayerPrecision | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(target, host tensor) for each part of a form (None: full), to fill what a block shows of it."""
        form, pairs = form or self.full, []
        for name in self.slots:
            if name in form.packings:
                there = form.tensors_of(name, shown)
                pairs += [(there[part], tensor) for part, tensor in form.packings[name].parts.items()]
            else:
                pairs.append((shown[name], self.host_tensor(name)))
        return pairs

    # -- the flips, at a safe point

    def contents(self, form: LayerPrecision, shown: Shown) -> dict[str, Content]:
        """What sits in the slots when a block shows the layer in this form: made beside forward passes."""
        found: dict[str, Content] = {}
        for name, slot in self.slots.items():
            if name in form.packings:
                packing, full = form.packings[name], PackedFallbackSource(self, name, form.variants[name])
                found[name] = packing.content(slot.parameter, form.tensors_of(name, shown), full)
            else:
                found[name] = slot.plain(shown[name])
        return found if self.compute_device == self.pool.backend.device else self._for_caller(found)

    def _for_caller(self, contents: Mapping[str, Content]) -> dict[str, Content]:
        """What sits in the slots of a layer that computes on another device."""
        return {name: slot.weight(RemoteSource(self, contents[name])) for name, slot in self.slots.items()}

    def absent_contents(self) -> dict[str, Content]:
        """Weights that stand for what the host store has."""
        return {name: slot.weight(HostSource(self, name)) for name, slot in self.slots.items()}

    def show(self, contents: Mapping[str, Content], form: LayerPrecision | None = None) -> None:
        """Resident in a form (None: full) from now on."""
        self._put(contents)
        self.form = form or self.full
        self.absent = False
        self.bring_others(self.pool.backend.device)

    def hide(self, contents: Mapping[str, Content]) -> None:
        """Absent from now on; the host store must have the bytes."""
        self.absent = True
        self._put(contents)
        self.form = self.full

    def shared(self) -> list[str]:
        """Parameters that do not lie in pages: others use them too, or they are adapters."""
        return [name for tensors, name in self.unpaged_tensors if isinstance(tensors[name], nn.Parameter)]

    def bring_others(self, device: torch.device) -> None:
        """Have the layer's buffers on a device, and inputs sent there."""
        for aligner in self.accelerate_hooks:
            if torch.device(aligner.execution_device) != device:
                aligner.execution_device = device
        for tensors, name in self.unpaged_tensors:
            if tensors[name].device != device and not isinstance(tensors[name], nn.Parameter):
                tensors[name] = tensors[name].to(device)

    def _put(self, contents: Mapping[str, Content]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for name, slot in self.slots.items():
                slot.put(contents[name])


def _in_pages(content: Content) -> torch.Tensor:
    """A parameter as it is at its place, whichever device its layer computes on."""
    source = content.source if isinstance(content, WeightProxy) else None
    return source.there if isinstance(source, RemoteSource) else content


def _under(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")
