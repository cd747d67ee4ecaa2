"""vLLM's workers with an elastic model on them, and what the user's process calls on every rank."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from huggingface_hub import snapshot_download
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from elastic.engines.vllm.agreement import at_place
from elastic.engines.vllm.assembly import ElasticModel, close_abandoned
from elastic.engines.vllm.client.messages import decode, encode, encode_error
from elastic.engines.vllm.client.settings import CONNECTOR, KEY, EngineSettings
from elastic.engines.vllm.connector import virtual_bytes
from elastic.engines.vllm.linear import is_packable
from elastic.engines.vllm.model.graphs import CapturedGraphs
from elastic.errors import ConfigError, StateError
from elastic.memory.pages.finalizers import call_at_death, cancel

LOOKS = ("check", "events", "form", "health", "plan", "snapshot", "status")
CHANGES = ("apply", "release", "resize", "restore", "swap")


class RankCalls:
    """What `collective_rpc` calls on every rank. Arguments and answers are JSON: vLLM would flatten records."""

    elastic: ElasticModel | None = None
    _jobs: dict[int, Future[Any] | Exception] | None = None

    def elastic_look(self, name: str, arguments: str = "[[], {}]") -> str:
        """Call a method of the runtime that only looks; return `encode(answer)`, or an error."""
        try:
            given, named = decode(arguments)
            if name not in LOOKS:
                raise ConfigError(f"{name!r} is none of {LOOKS}")
            model = self._model()
            return encode({"value": getattr(model.runtime, name)(*at_place(given, model.place), **named)})
        except Exception as error:  # told to the caller, in whose process it is raised again
            return encode({"error": encode_error(error)})

    def elastic_change(self, name: str, arguments: str = "[[], {}]") -> int:
        """Begin an action, on all ranks alike; return the number to ask for its result by."""
        jobs = self._jobs = {} if self._jobs is None else self._jobs
        number = 1 + max(jobs, default=0)
        try:
            given, named = decode(arguments)
            if name not in CHANGES:
                raise ConfigError(f"{name!r} is none of {CHANGES}")
            model = self._model()
            method = model.runtime.kv.resize if name == "resize" else getattr(model.runtime, name)
            jobs[number] = method(*at_place(given, model.place), **named, wait=False)
        except Exception as error:  # raised again when the result is asked for
            jobs[number] = error
        for old in [key for key in jobs if key <= number - 100]:
            del jobs[old]  # whoever asked for it is gone
        if self.elastic is not None and self.elastic.channel is not None:
            self.elastic.channel.wake()
        return number

    def elastic_result(self, number: int) -> str | None:
        """Return the results of a job, or its error; None while it is under way."""
        jobs = self._jobs or {}
        job = jobs.get(number, StateError(f"action {number} is not known to this worker any more"))
        if isinstance(job, Future) and not job.done():
            return None
        try:
            if isinstance(job, Exception):
                raise job
            return encode({"value": job.result()})
        except Exception as error:  # whatever the action raised is its caller's, in another process
            return encode({"error": encode_error(error)})

    def _model(self) -> ElasticModel:
        if self.elastic is None:
            raise StateError("this worker has no elastic model: it was shut down, or needs elastic_attach first")
        return self.elastic


class ElasticWorker(RankCalls):
    """What is added to a platform's worker. Its base comes behind it."""

    vllm_config: Any
    model_runner: Any
    device: torch.device
    rank: int

    def load_model(self, **options: Any) -> None:
        """Load the model, then move its weights into pages."""
        if close_abandoned():
            ensure_kv_transfer_shutdown()
        config, settings = self.vllm_config, _settings(self.vllm_config)
        super().load_model(**options)  # type: ignore[misc]
        self.elastic = ElasticModel(
            self.model_runner.get_model(),
            settings,
            self.device,
            instance=config.instance_id,
            rank=self.rank,
            ranks=config.parallel_config.world_size,
            is_packable=is_packable,
            find_files=partial(_directory, config),
            eager=config.compilation_config.mode == CompilationMode.NONE,
            own_worker=self,
        )

    def determine_available_memory(self) -> int:
        """Return the bytes of KV cache that there are addresses for: what weights never need.

        Raises `ConfigError` for a budget that leaves activations no room.
        """
        with self._starting():
            return self._virtual_bytes(super().determine_available_memory())  # type: ignore[misc]

    def _virtual_bytes(self, available: int) -> int:
        model = self._model()
        pool = model.kv.pool
        room = model.kv.limits.maximum * pool.page_bytes
        if self.device.type == "cuda" and room > available:
            most = pool.budget_pages * pool.page_bytes - room + available
            raise ConfigError(f"budget leaves too little for activations beside it; it may be {most:,} bytes at most")
        budget = pool.budget_pages * pool.page_bytes - model.fixed_bytes
        specs = self.get_kv_cache_spec()  # type: ignore[attr-defined]
        if self.device.type == "cpu":
            _require_dtype(self.vllm_config, specs.values())
        return virtual_bytes(self.vllm_config, specs, budget, pool.page_bytes)

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        """Make the KV cache, in a reserved range."""
        with self._starting():
            super().initialize_from_config(*args, **kwargs)  # type: ignore[misc]

    def compile_or_warm_up_model(self) -> Any:
        """Compile, and capture CUDA graphs if the engine uses any."""
        with self._starting():
            times = super().compile_or_warm_up_model()  # type: ignore[misc]
        if self.vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
            model = self._model()
            model.graphs = CapturedGraphs(self.model_runner, model.addresses, model.gate)
            model.graphs.note_capture()
        return times

    def execute_model(self, scheduler_output: Any) -> Any:
        """Carry out orders, then run the step; no action commits inside it."""
        model = self.elastic or self._model()  # which raises; one call less in a step
        if model.channel is not None:
            model.channel.before_step(scheduler_output.kv_connector_metadata)
        try:
            model.begin_forward()
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        finally:
            model.end_forward()

    def execute_dummy_batch(self) -> None:
        """Run the step of a rank without requests."""
        model = self._model()
        try:
            model.begin_forward()
            super().execute_dummy_batch()  # type: ignore[misc]
        finally:
            model.end_forward()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Load other weights into the place of these. Raises `StateError` while any layer is not there in full."""
        with self._model().all_full("reload_weights"):
            super().reload_weights(*args, **kwargs)  # type: ignore[misc]

    def update_weights(self, update_info: Any) -> None:
        """Take in weights from a trainer. Raises `StateError` while any layer is not there in full."""
        with self._model().all_full("update_weights"):
            super().update_weights(update_info)  # type: ignore[misc]

    def shutdown(self) -> None:
        """Stop, and give all pages back."""
        super().shutdown()  # type: ignore[misc]
        self._close()

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """Give all pages back if the engine does not start: vLLM stops no worker then, and another may follow."""
        try:
            yield
        except BaseException:
            ensure_kv_transfer_shutdown()
            self._close()
            raise

    def _close(self) -> None:
        if self.elastic is not None:
            self.elastic.close()
            self.elastic = None


class CpuWorker(ElasticWorker, CPUWorker):  # type: ignore[misc]
    """The elastic worker of vLLM's CPU platform."""


class GpuWorker(ElasticWorker, Worker):  # type: ignore[misc]
    """The elastic worker of vLLM's CUDA platform."""


class ElasticExtension(RankCalls):
    """`worker_extension_cls`: weights alone, attached to an eager engine that runs already; its KV cache stays."""

    _elastic_end: weakref.ref[Any] | None = None

    def elastic_attach(self, settings: str, name: str = "attached") -> int:
        """Move the weights of the decoder layers into pages; return how many layers there are."""
        config: Any = self.vllm_config  # type: ignore[attr-defined]
        if self.elastic is not None:
            raise StateError("the weights of this worker are elastic already; call elastic_detach before")
        if config.compilation_config.mode != CompilationMode.NONE:
            raise ConfigError("enforce_eager=False: only an eager engine can be attached to")
        if config.model_config.quantization != "elastic":
            raise ConfigError(
                f"quantization={config.model_config.quantization!r}: its weights cannot move; start the engine with "
                "quantization='elastic'"
            )
        given, ranks = EngineSettings.from_json(decode(settings)), config.parallel_config.world_size
        if ranks > 1 and given.policy != "manual":
            raise ConfigError(
                f"policy={given.policy!r} would change one of {ranks} ranks, which agree on nothing without elastic's "
                "own worker; attach with policy='manual', or start the engine with elastic.vllm.options(...)"
            )
        model = ElasticModel(
            self.model_runner.get_model(),  # type: ignore[attr-defined]
            given,
            self.device,  # type: ignore[attr-defined]
            instance=f"{name}-{config.instance_id}",
            rank=self.rank,  # type: ignore[attr-defined]
            is_packable=is_packable,
            find_files=partial(_directory, config),
        )
        self.elastic = model
        self._elastic_end = call_at_death(  # beside: a worker may be collected in the midst of anything
            self, lambda: threading.Thread(target=model.close, name="elastic close").start()
        )
        return len(model.runtime.form())

    def elastic_detach(self) -> None:
        """Undo `elastic_attach`."""
        self._model().detach()
        self.elastic = None
        if self._elastic_end is not None:
            cancel(self._elastic_end)


def _settings(config: Any) -> EngineSettings:
    """Return what `elastic.vllm.options` gave an engine. Raises `ConfigError` where not all of it is there."""
    settings: Any = (config.additional_config or {}).get(KEY)
    given = {
        "additional_config": settings is not None,
        "quantization": config.model_config.quantization == "elastic",
        "kv_transfer_config": CONNECTOR["kv_connector"] in _connectors(config.kv_transfer_config),
    }
    changed = ", ".join(name for name, there in given.items() if not there)
    if changed:
        raise ConfigError(
            f"the engine has an elastic worker, but its own {changed}; give it all arguments of "
            "elastic.vllm.options(...), and these no other value (a connector of yours: options(connector=...))"
        )
    if config.parallel_config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"pipeline_parallel_size={config.parallel_config.pipeline_parallel_size}: elastic vLLM knows layers by "
            "their index, which differs by stage; use tensor_parallel_size"
        )
    return EngineSettings.from_json(settings)


def _directory(config: Any) -> str:
    """Return where the files of an engine's model are: its own directory, or that in the cache of the hub's models.

    Raises `ConfigError` where there is none.
    """
    model = config.model_config
    if os.path.isdir(model.model):
        return str(model.model)
    try:
        return str(
            snapshot_download(
                model.model, revision=model.revision, cache_dir=config.load_config.download_dir, local_files_only=True
            )
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {model.model}: its files are in no directory of this machine, by which to see whether a profile is "
            "of this model; give the engine a directory, or an order by name"
        ) from error


def _connectors(transfer: Any) -> list[str | None]:
    """Return the names of a KV connector, and of those inside it."""
    if transfer is None:
        return []
    inner = transfer.kv_connector_extra_config.get("connectors", ())
    return [transfer.kv_connector, *(each.get("kv_connector") for each in inner)]


def _require_dtype(config: Any, specs: Iterable[Any]) -> None:
    """Raise `ConfigError` for a cache that vLLM's attention on a CPU would take for one in the model's dtype.

    vLLM does not refuse it, and wider elements are written behind the cache.
    """
    dtype = config.model_config.dtype
    other = {spec.dtype for spec in specs if isinstance(spec, AttentionSpec) and spec.dtype.itemsize > 1} - {dtype}
    if other:
        raise ConfigError(
            f"kv_cache_dtype={config.cache_config.cache_dtype!r}: on a CPU vLLM has keys and values in the model's "
            f"dtype, {str(dtype).removeprefix('torch.')}, or in fp8; leave it 'auto', or give the model another dtype"
        )
