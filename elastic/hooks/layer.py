"""The weights of one decoder layer: where they are, and the flips between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import nn

from elastic.errors import StateError
from elastic.hooks.slots import Slot
from elastic.memory.block import Block
from elastic.memory.checkpoint import Checkpoint
from elastic.memory.copying import digest
from elastic.memory.host import HostTensor, host
from elastic.memory.layout import LayerLayout
from elastic.memory.pool import PagePool
from elastic.weights import FORWARD_FUNCTIONS, Weight, on_values, register


class HostSource:
    """A weight that is in host memory; while its layer is called, also in a stage on the device."""

    def __init__(self, layer: LayerWeights, name: str) -> None:
        self._layer = layer
        self._name = name

    def value(self) -> torch.Tensor:
        staged = self._layer.staged
        if staged is not None and self._layer.entered:
            return staged[self._name]
        return self.copy().to(self._layer.pool.backend.device)

    def copy(self) -> torch.Tensor:
        return self._layer.host_tensor(self._name).clone()

    def stored(self) -> torch.Tensor:
        return self._layer.host_tensor(self._name)

    def write(self, value: torch.Tensor) -> None:
        self._layer.write(self._name, value)

    def where(self) -> str:
        return f"of {self._layer.name}, which is in host memory"


register(HostSource, FORWARD_FUNCTIONS, on_values)


class LayerWeights:
    """One decoder layer's weights: in a block of its place (resident), or in the host store (absent)."""

    def __init__(
        self,
        index: int,
        name: str,
        pool: PagePool,
        slots: Mapping[str, Slot],
        layout: LayerLayout,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.index = index
        self.name = name
        self.pool = pool
        self.slots = dict(slots)
        self.layout = layout
        self.owner = f"layer:{index}"
        self.absent = False
        """Read by the layer's hooks: whether a call must be staged."""
        self.staged: Mapping[str, torch.Tensor] | None = None
        """While absent: the parameters in a stage, for forwards of this layer to read."""
        self.block: Block | None = None
        self.on_written: Callable[[], object] = lambda: None
        """Told when the host store has other bytes than a stage."""
        self._checkpoint = checkpoint
        self._host: dict[str, HostTensor] = {}
        self._writes = 0
        self._threads_inside = threading.local()

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters, padding and alignment included."""
        return self.layout.nbytes

    @property
    def pages(self) -> int:
        """Pages that it needs at its place."""
        return self.pool.pages_for(self.nbytes)

    @property
    def reordered(self) -> bool:
        """Whether a parameter is stored in another order than the user's model had it."""
        return any(self.layout.parameters[name].strides != slot.strides for name, slot in self.slots.items())

    @cached_property
    def variant(self) -> str:
        """The name of its first matrix's dtype, such as `float16`."""
        dtypes = [p.dtype for p in self.layout.parameters.values()]
        return str(dtypes[0]).removeprefix("torch.") if dtypes else "none"

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

    # -- the bytes

    def new_block(self) -> Block:
        """The layer's own block, addresses stable as long as no tensor outside keeps an earlier one."""
        if self.block is None:
            self.block = Block(self.pool, self.nbytes)
        return self.block

    def keep(self) -> int:
        """Have the bytes of a resident layer in the host store; returns how many had to be copied."""
        copied = 0
        for name, slot in self.slots.items():
            known, fingerprint = self._host.get(name), digest(slot.parameter)
            if known is None or known.digest != fingerprint:
                file = self._checkpoint.find(f"{self.name}.{name}") if self._checkpoint else None
                self._host[name] = host.keep(slot.parameter, fingerprint, file=file, lock=self._lock_pages)
                copied += slot.parameter.nbytes
        return copied

    def host_tensor(self, name: str) -> torch.Tensor:
        """A parameter in the host store, in the checkpoint's shape. Not to be written."""
        return self._host[name].tensor

    def drop_host_copies(self) -> None:
        """The host store need not have the bytes for this layer any more."""
        self._host.clear()

    def version(self) -> int:
        """Rises when a parameter is written: by torch while the layer is resident, by `write` while it is absent."""
        return self._writes if self.absent else sum(slot.parameter._version for slot in self.slots.values())

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
        self._writes += 1
        self.on_written()

    def sources(self, targets: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(target, host tensor) for each parameter."""
        return [(target, self.host_tensor(name)) for name, target in targets.items()]

    # -- the flips, at a safe point

    def plain(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, nn.Parameter]:
        """Parameters over these tensors, for `show`."""
        return {name: slot.plain(tensors[name]) for name, slot in self.slots.items()}

    def weights(self) -> dict[str, Weight]:
        """Weights that stand for what the host store has, for `hide`."""
        return {name: slot.weight(HostSource(self, name)) for name, slot in self.slots.items()}

    def show(self, plain: Mapping[str, nn.Parameter]) -> None:
        """Resident from now on."""
        with torch.inference_mode(False), torch.no_grad():
            for name, slot in self.slots.items():
                slot.show(plain[name])
        self.absent = False

    def hide(self, weights: Mapping[str, Weight]) -> None:
        """Absent from now on; the host store must have the bytes."""
        self.absent = True
        with torch.inference_mode(False), torch.no_grad():
            for name, slot in self.slots.items():
                slot.hide(weights[name])
