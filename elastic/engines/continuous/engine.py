"""Continuous batching of a wrapped model: requests join and leave a running batch, their cache lives in its pages."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from elastic.config import require
from elastic.controller.sensors.request_metrics import Outcome
from elastic.engines.base import FinishReason, Listener, Output, Request
from elastic.engines.continuous.compatibility import require_servable, require_supported
from elastic.engines.sampling import SamplingState, answer_seed, sample
from elastic.engines.stopping import end_tokens, with_ends
from elastic.errors import CapacityError, ConfigError, Overloaded, StateError
from elastic.hooks.base import Hook
from elastic.kvcache.storage.pool import KVPool
from elastic.runtime.runtime import Runtime, runtime

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.requests import GenerationOutput

    from elastic.engines.continuous.manager import ElasticManager

logger = logging.getLogger(__name__)
GREEDY = SamplingState(Request((0,), 1), 0)
OUTCOMES: dict[FinishReason, Outcome] = {
    "stop": "completed",
    "length": "completed",
    "cancelled": "cancelled",
    "failed": "failed",
}
_engines: weakref.WeakSet[ContinuousEngine] = weakref.WeakSet()


@dataclass
class _ActiveRequest:
    """A request that has not ended."""

    request: Request
    listener: Listener
    sampling: SamplingState
    short_of_kv_s: float
    """On the scheduler's clock, when it came; once it is scheduled, how long it has waited for blocks."""
    sent: int = 0
    scheduled_s: float | None = None


class ContinuousEngine:
    """The embedded engine: transformers' continuous batching, its cache in blocks on the pages of the wrapped model.

    What layers give up is cache capacity at the next step, and what they take back they get when no request needs it.
    A request that does not fit now waits; none is evicted, restarted or computed twice. `max_queue` bounds how many
    may wait (None: any number). `max_batch_tokens` bounds the tokens of one forward pass: a longer prompt is computed
    in parts. `block_tokens` is the size of a block, `share_prefixes` has requests share the blocks of a common
    beginning. Raises `BackendUnavailable` for a version of transformers that it does not know, `StateError` for a model
    that is not wrapped, `ConfigError` for one that it cannot serve.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_queue: int | None = None,
        max_requests: int = 256,
        max_batch_tokens: int = 512,
        block_tokens: int = 32,
        share_prefixes: bool = True,
    ) -> None:
        require_supported()
        counts = {"max_requests": max_requests, "max_batch_tokens": max_batch_tokens, "block_tokens": block_tokens}
        for name, count in counts.items():
            require(count >= 1, name, count, "at least 1")
        require(max_queue is None or max_queue >= 1, "max_queue", max_queue, "at least 1, or None")
        self.runtime: Runtime = runtime(model)
        self.counters = self.runtime.counters
        self._model = model
        self._config = model.config.get_text_config(decoder=True)
        self._max_queue = max_queue
        self._live: dict[str, _ActiveRequest] = {}
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._state = "new"
        with ExitStack() as stack:
            from elastic.engines.continuous.cache import ElasticPagedCache
            from elastic.engines.continuous.manager import ElasticManager

            stack.callback(self.runtime.occupy("a continuous batching engine; stop it first"))
            self.runtime.observe(False)  # it counts its requests itself
            stack.callback(self.runtime.observe, True)
            kv = _one_pool(model)
            window = getattr(self._config, "sliding_window", None)  # a longer part of a prompt would overwrite itself
            self._cache = ElasticPagedCache(
                self._config,
                kv,
                device=model.device,
                dtype=model.dtype,
                block_tokens=block_tokens,
                max_batch_tokens=min(max_batch_tokens, window or max_batch_tokens),
                share_prefixes=share_prefixes,
            )
            stack.callback(self._cache.close)
            self._manager = ElasticManager(model, self._cache, self, self._deliver, self._choose, max_requests)
            self._variants = _VariantRecorder(self.runtime, self._manager)
            stack.callback(model.register_forward_pre_hook(self._variants).remove)
            kv.pool.listeners.append(self._manager.wake)
            stack.callback(kv.pool.listeners.remove, self._manager.wake)
            self._stack = stack.pop_all()

    # -- what its users do

    @property
    def weights(self) -> tuple[tuple[str, ...], ...]:
        """The forms that the layers have had: for each, the layers' variants. `Output.weights` is an index into it."""
        return tuple(self._variants.forms)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The model's own end tokens: its generation config's `eos_token_id`, or its config's."""
        return end_tokens(self._model)

    @property
    def serving(self) -> bool:
        """True while requests are taken: after `start`, until it is stopped or its thread has failed."""
        return self._state == "serving" and self._manager.background_thread_status.fatal_error is None

    def start(self) -> None:
        """Begin to serve. Raises `StateError` if it was started before."""
        if self._state != "new":
            raise StateError(f"the engine is {self._state}; make a new one")
        self._state = "serving"
        _engines.add(self)
        self._manager.start()

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request; see `Engine`."""
        self._check(request)
        if not self.serving:
            raise StateError("the engine is not serving; start it, or make a new one")
        request = with_ends(request, self.end_tokens)
        sampling = SamplingState(request, answer_seed(request, 0))
        with self._lock:
            if request.id in self._live:
                raise ConfigError(f"request id {request.id!r} is in use; choose another")
            self.counters.arrived(request.id, len(request.prompt), request.arrived_s)
            try:
                self._require_place_in_queue()
                self._cache.expect(request.id, len(request.prompt) + request.max_tokens)
            except (Overloaded, CapacityError):
                self.counters.ended(request.id, "rejected")
                raise
            self._live[request.id] = _ActiveRequest(request, listener, sampling, self._manager.scheduler.short_of_kv_s)
        accepted = self._manager.add_request(
            list(request.prompt),
            request_id=request.id,
            max_new_tokens=request.max_tokens,
            streaming=True,
            eos_token_id=list(request.stop_tokens),
        )
        if accepted is None:
            self._forget(request.id, "failed")
            self._cache.free_blocks(request.id)
            raise StateError("the engine has stopped")
        if not self._manager.is_running():  # it ended meanwhile, without this one
            self.cancelled(request.id)

    def cancel(self, request: str) -> None:
        """End a request and free what it holds; its listener gets `cancelled`. Unknown or ended: nothing happens."""
        if request in self._live:
            self._manager.cancel_request(request)

    def stop(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Take no more requests; finish those there are (`drain`, for `timeout_s` at the most), or cancel them."""
        with self._lock:
            was, self._state = self._state, "stopped"
        if was == "serving":
            self._manager.stop(timeout=timeout_s, hard_stop=not drain)
            if self._manager.is_running():
                self._manager.stop(hard_stop=True)
            for name in list(self._live):
                self.cancelled(name)
        if was != "stopped":
            self._stack.close()

    def __enter__(self) -> ContinuousEngine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- what its thread calls

    def scheduled(self, request: str) -> None:
        """Note when a request goes into a batch for the first time."""
        live = self._live.get(request)
        if live is not None and live.scheduled_s is None:
            live.scheduled_s = time.perf_counter()
            live.short_of_kv_s = self._manager.scheduler.short_of_kv_s - live.short_of_kv_s
            self.counters.scheduled(request, live.scheduled_s)

    def stalled(self, requests: int) -> None:
        """Count live requests that were left out of a batch for want of blocks."""
        self.counters.stalled(requests)

    def cancelled(self, request: str) -> None:
        """Tell the listener of a request that it was cancelled."""
        live = self._forget(request, "cancelled")
        if live is not None:
            self._tell(live, Output(request, (), "cancelled", at_s=time.perf_counter(), weights=self._variants.current))

    def _deliver(self, output: GenerationOutput) -> None:
        """Tell the listener of a request its new tokens, or its end."""
        live = self._live.get(output.request_id)
        if live is None:
            return
        tokens = tuple(output.generated_tokens[live.sent :])
        first = live.scheduled_s is not None and not live.sent
        live.sent += len(tokens)
        self.counters.produced(output.request_id, len(tokens))
        finish = self._finish(live.request, output, tokens)
        if finish is not None:
            self._forget(output.request_id, OUTCOMES[finish])
        error = output.error if finish == "failed" else None
        news = Output(output.request_id, tokens, finish, error, time.perf_counter(), self._variants.current)
        if first:
            news = replace(news, scheduled_s=live.scheduled_s, waited_for_kv_s=live.short_of_kv_s)
        self._tell(live, news)

    def _finish(self, request: Request, output: GenerationOutput, tokens: tuple[int, ...]) -> FinishReason | None:
        if not output.is_finished():
            return None
        if output.error is not None:
            return "failed" if self._state == "serving" else "cancelled"
        return "stop" if tokens and tokens[-1] in request.stop_tokens else "length"

    def _choose(self, names: list[str], logits: torch.Tensor) -> torch.Tensor:
        """Choose the next tokens [requests] from logits [requests, vocabulary], each by the rule of its request."""
        live = [self._live.get(name) for name in names]
        states = [request.sampling if request else GREEDY for request in live]
        tokens = [chosen.token for chosen in sample(logits, states)]
        for state, token in zip(states, tokens, strict=True):
            state.append(token)
        return torch.tensor(tokens, device=logits.device)

    # -- inside

    def _check(self, request: Request) -> None:
        vocabulary, longest = self._config.vocab_size, getattr(self._config, "max_position_embeddings", None)
        total = len(request.prompt) + request.max_tokens
        if not request.prompt:
            raise ConfigError("prompt: it has no token; give at least one")
        if request.max_tokens < 1:
            raise ConfigError(f"max_tokens={request.max_tokens} must be at least 1")
        wrong = next((token for token in request.prompt if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise ConfigError(f"prompt: token {wrong} is none of the model's; they are 0 to {vocabulary - 1}")
        if longest and total > longest:
            raise ConfigError(
                f"the prompt has {len(request.prompt)} tokens; with max_tokens={request.max_tokens} that is more than "
                f"the {longest} that the model was made for"
            )

    def _require_place_in_queue(self) -> None:
        if self._max_queue is None:
            return
        waiting = sum(live.scheduled_s is None for live in list(self._live.values()))
        if waiting >= self._max_queue:
            wait_s = min(60.0, max(1.0, self.counters.read().queue_delay_s))
            raise Overloaded(f"{waiting} requests wait, max_queue={self._max_queue}", retry_after_s=wait_s)

    def _forget(self, request: str, outcome: Outcome) -> _ActiveRequest | None:
        live = self._live.pop(request, None)
        if live is not None:
            self.counters.ended(request, outcome)
        return live

    def _tell(self, live: _ActiveRequest, output: Output) -> None:
        try:
            live.listener(output)
        except Exception:  # a listener's fault is not its engine's: the others are served on
            logger.exception("the listener of request %s failed", output.request)


class _VariantRecorder(Hook):
    """A pre-hook of the model, behind those of `wrap`: notes the variants of the layers at each forward pass."""

    def __init__(self, runtime: Runtime, manager: ElasticManager) -> None:
        self.forms: dict[tuple[str, ...], int] = {}
        """The layers' variants -> a number, in the order in which they came."""
        self.current = 0
        self._runtime = runtime
        self._manager = manager

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        # the pass is behind the gate: no layer changes until it has ended
        if threading.current_thread() is self._manager.thread:
            self.current = self.forms.setdefault(self._runtime.form(), len(self.forms))


def _one_pool(model: Any) -> KVPool:
    """Return the KV pool of a model that the engine can serve. Raises `ConfigError` for others."""
    pools = list(runtime(model).kv.memory.shares())
    if len(pools) != 1:
        raise ConfigError(f"its KV cache is at {len(pools)} places; continuous batching needs all of it at one")
    require_servable(model)
    return pools[0]


def _stop_all() -> None:
    """Stop all engines at exit: a thread that is in torch when the interpreter ends would abort it."""
    for engine in list(_engines):
        if not engine.runtime.in_forked_child:
            engine.stop(drain=False, timeout_s=10)


atexit.register(_stop_all)
