"""Elastic's runtime over the decoder layers that one worker of vLLM has."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic.actions.base import ActionHandler
from elastic.actions.deferred import DeferredActions
from elastic.config import SLO, Place
from elastic.engines.vllm.agreement import RankAgreement, at_place
from elastic.engines.vllm.client.settings import EngineSettings
from elastic.engines.vllm.kv.sectors import ONE_CONNECTOR
from elastic.engines.vllm.kv.worker_channel import WorkerChannel
from elastic.engines.vllm.model.decoder import find_decoder
from elastic.engines.vllm.model.graphs import CapturedGraphs
from elastic.engines.vllm.model.streaming import StreamingHooks
from elastic.errors import ConfigError, StateError
from elastic.hooks.weights_recorder import WeightsRecorder
from elastic.kvcache.manager import KVMemory
from elastic.kvcache.storage.layout import choose_layout
from elastic.kvcache.storage.pool import KVPool
from elastic.memory.backends.streams import note_current_stream
from elastic.planning.measured_cost import Calibration
from elastic.quant.sensitivity.stored_fingerprints import stored_fingerprints
from elastic.runtime.assemble import assemble, connect
from elastic.runtime.controller_setup import choose_policy
from elastic.runtime.handlers import weight_handlers
from elastic.runtime.options import WrapOptions, parse_rate, parse_variants
from elastic.runtime.parts import ModelParts
from elastic.runtime.runtime import Runtime
from elastic.weights.prepacked.choice import prepacked_layout

IsPackable = Callable[[nn.Module, torch.Tensor], bool]
_models: dict[str, ElasticModel] = {}
"""Of the workers in this process, by the id of vLLM's instance and the rank."""


class ElasticModel:
    """The model of one rank: its weights in pages, the KV pool beside them, and the runtime that moves both.

    `own_worker`: enters and leaves the gate with its steps; None: hooks on the model do.
    `eager`: hooks fetch released layers. `is_packable`: see `WrapOptions`. `find_files` returns the directory of the
    checkpoint, of which a profile has to be.

    Raises `ConfigError` or `CapacityError` for a budget that the model does not fit in, `StateError` for a second
    engine in one process; the model is as it was then.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: EngineSettings,
        device: torch.device,
        *,
        instance: str,
        rank: int = 0,
        ranks: int = 1,
        is_packable: IsPackable,
        find_files: Callable[[], str],
        eager: bool = True,
        own_worker: object | None = None,
    ) -> None:
        self.rank = rank
        self.channel: WorkerChannel | None = None
        """That of the KV connector, when it is made: it tells the scheduler's side of changes."""
        self.graphs: CapturedGraphs | None = None
        """Of the steps, if the worker has captured some."""
        self.actions = RankAgreement()
        self._name = f"{instance}:{rank}"
        self._looked = -1, True  # commits by then, and whether all layers were full
        if _models and own_worker is not None:
            raise StateError(ONE_CONNECTOR)
        with ExitStack() as memory, ExitStack() as on_model:
            self.place = f"{device}#vllm-{self._name.replace(':', '-')}"
            """The name of this rank's."""
            numbered = torch.device("cuda", device.index or 0) if device.type == "cuda" else device
            place = Place(self.place, numbered, settings.budget_bytes, settings.page_bytes)
            options = _wrap_options(model, settings, place, is_packable, find_files)

            def make_handlers(parts: ModelParts, stack: ExitStack) -> Mapping[type, ActionHandler]:
                deferred = DeferredActions(parts.weights, parts.broker)
                return weight_handlers(parts, deferred, options.copy_rate, releases_wait=True)

            parts = self._parts = assemble(model, options, _make_kv, make_handlers, memory, on_model)
            self.kv, self.gate = parts.kv.pools[0], parts.gate
            self.runtime = Runtime(parts, self.actions if ranks > 1 else None)
            self.counters = self.runtime.counters
            """What requests experience, as the scheduler's side tells it."""
            self.actions.begin = self._begin
            self.weights = WeightsRecorder(parts.weights, parts.gate).weights
            """Returns how often layers got other variants, and a name for those that they have."""
            connect(self.runtime, parts, options, memory)
            self._streaming = StreamingHooks(options.decoder.layers, parts.weights, parts.gate) if eager else None
            if self._streaming is not None:
                on_model.callback(self._streaming.remove)
            if own_worker is None:  # whose steps enter and leave the gate
                self._hook_forwards(model, on_model)
            self.kv.pool.listeners.append(self._pages_changed)
            memory.callback(self.kv.pool.listeners.remove, self._pages_changed)
            self.runtime.job_listeners.append(self._job_done)
            memory.callback(self.runtime.close)
            self.runtime.start(controlled=rank == 0)  # the others do as its controller says
            self._on_model, self._memory = on_model.pop_all(), memory.pop_all()
        if own_worker is not None:
            self._worker = weakref.ref(own_worker)
            _models[self._name] = self

    def _hook_forwards(self, model: nn.Module, on_model: ExitStack) -> None:
        enter = model.register_forward_pre_hook(lambda module, args: self.begin_forward())
        on_model.callback(enter.remove)
        leave = model.register_forward_hook(lambda *_: self.end_forward(), always_call=True)
        on_model.callback(leave.remove)

    @property
    def working(self) -> bool:
        """Whether actions are under way, or ranks have something to agree on."""
        return (self.runtime.working or self.actions.pending) and not self.runtime.closed

    @property
    def waiting(self) -> bool:
        """Whether actions are deferred or not done, or a controller has layers to bring back."""
        if self.runtime.closed:
            return False
        return self.runtime.busy or (self.runtime.controller is not None and not self._full)

    @property
    def _full(self) -> bool:
        """Whether all layers are there in full. They are looked at after commits alone."""
        commits, full = self._looked
        if commits != self.gate.commits:
            commits = self.gate.commits
            full = set(self.runtime.form()) == {self._parts.weights.layers[0].dtype}
            self._looked = commits, full
        return full

    def begin_forward(self) -> None:
        """Enter a step: no action commits until `end_forward`. Graphs are replayed if weights lie where they did."""
        if self.kv.device.type == "cuda":
            note_current_stream(self.kv.device)
        if self.gate.enter(id(self)):
            for streamer in self._parts.weights.streamers.values():
                streamer.leave_all()
        if self._streaming is not None and self._streaming.commits != self.gate.commits:
            self._streaming.update()
        if self.graphs is not None and self.graphs.commits != self.gate.commits:
            self.graphs.update()

    def end_forward(self) -> None:
        """Leave the step."""
        self.gate.leave(id(self))

    @contextmanager
    def all_full(self, what: str) -> Iterator[None]:
        """Let somebody write the weights, plain ones; no action commits meanwhile.

        Raises `StateError` if a layer is not there in full, or has matrices in oneDNN's order.
        """
        self.begin_forward()
        try:
            layers, form = self._parts.weights.layers, self.runtime.form()
            if set(form) != {layers[0].dtype} or self.runtime.busy:
                raise StateError(
                    f"{what} writes all weights, and layers are {', '.join(dict.fromkeys(form))} or on their way; call "
                    'restore() before, and wait until it is done (with a controller: under policy="manual")'
                )
            if any(slot.prepacked for unit in layers for slot in unit.slots.values()):
                raise StateError(
                    f"{what} writes plain matrices, and some lie in oneDNN's order (docs/vllm.md, Full weights on a "
                    "CPU); start an engine with the new weights"
                )
            yield
        finally:
            self.end_forward()

    def addresses(self) -> tuple[int | None, ...]:
        """Return the addresses of all parameters in pages; None for one that is packed or absent."""
        weights = self._parts.weights
        return tuple(slot.address for unit in weights.layers for slot in unit.slots.values())

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the budget that neither weights in pages nor KV blocks can ever have."""
        owners = self._parts.pools[0].status().owners
        return sum(nbytes for owner, nbytes in owners.items() if owner.startswith("fixed:"))

    def close(self) -> None:
        """End the runtime, and give every page back: the engine has stopped. Can be called twice."""
        _models.pop(self._name, None)
        self.actions.close()
        self.runtime.close(timeout_s=10)
        if self.channel is not None:
            self.channel.close()
        self._parts.weights.let_go()
        self._on_model.pop_all()  # the model goes too: its weights need no ordinary memory
        self._memory.close()

    def detach(self) -> None:
        """Leave the model as it was, in ordinary memory, and give every page back. Not inside a step."""
        with self.runtime.last_safe_point():
            self._on_model.close()
            self._memory.close()

    def _pages_changed(self) -> None:
        if self.channel is not None:
            self.channel.changed()

    def _job_done(self) -> None:
        if self.channel is not None:
            self.channel.wake()
            self.channel.changed()

    def _begin(self, actions: Sequence[Any], why: str) -> None:
        if not self.runtime.closed:
            self.runtime.apply(at_place(tuple(actions), self.place), why=why, wait=False)


def close_abandoned() -> bool:
    """Close the models of workers that are gone, which vLLM stopped none of; return whether there were any."""
    if _models:
        gc.collect()  # workers lie in circles
    abandoned = [model for model in _models.values() if model._worker() is None]
    for model in abandoned:
        model.close()
    return bool(abandoned)


def model_of(vllm_config: Any) -> ElasticModel:
    """Return the elastic model of the worker of this process. Raises `StateError` where it is not ours."""
    name = f"{vllm_config.instance_id}:{vllm_config.parallel_config.rank}"
    if name not in _models:
        raise StateError(
            "the worker of this process is not elastic; give the engine all arguments of elastic.vllm.options(...)"
        )
    return _models[name]


def _wrap_options(
    model: nn.Module,
    settings: EngineSettings,
    place: Place,
    is_packable: IsPackable,
    find_files: Callable[[], str],
) -> WrapOptions:
    """Return the options of `assemble`: the same on all ranks, so that each has room for as much."""
    decoder, variants = find_decoder(model), parse_variants(settings.variants)
    slo = None if settings.slo is None else SLO(**settings.slo)
    cache = Path(settings.variant_cache) / place.name.rpartition("-")[2] if settings.variant_cache else None
    if cache is not None:
        _make_directory(cache)
    return WrapOptions(
        decoder=decoder,
        places=[place],
        placement="as_loaded",
        layouts={place.device: choose_layout(None, place.device)},
        files=None,
        variants=variants,
        variant_cache=cache,
        copy_rate=parse_rate(settings.copy_rate),
        slo=slo,
        start_controller=True,
        make_policy=choose_policy(
            settings.to_policy(),
            slo,
            settings.order,
            variants,
            decoder.layers,
            lambda: Calibration({}),
            lambda: stored_fingerprints(find_files()),  # vLLM has joined matrices, and parts of them
        ),
        is_packable=is_packable,
        lives_in_pages=lambda parameter: parameter.ndim > 1,  # norms are read by address, and are .05 % of a layer
        choose_prepacked=lambda module, weight, _: prepacked_layout(weight) if is_packable(module, weight) else None,
    )


def _make_directory(cache: Path) -> None:
    """Make the directory of a rank's variants. Raises `ConfigError` where there can be none."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"variant_cache={str(cache.parent)!r} cannot be made or written: {error.strerror}; give another directory"
        ) from error


def _make_kv(pools: Sequence[KVPool], homes: Sequence[KVPool], stack: ExitStack) -> KVMemory:
    """Make a memory without cache layers: vLLM's blocks live in the pool's pages."""
    return KVMemory([(pool, choose_layout(None, pool.device)) for pool in pools], 1, homes)
