"""Continuous batching of a wrapped model: requests join and leave a running batch, their cache lives in its pages."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from elastic.engines.base import GrammarCompiler, Listener, Request
from elastic.engines.continuous.active_requests import ActiveRequests
from elastic.engines.continuous.compatibility import kv_format, one_pool, require_options
from elastic.engines.continuous.lifetime import EngineLifetime
from elastic.engines.continuous.moves import MovingRequests, one_request
from elastic.engines.continuous.ranks.cohorts import Cohorts
from elastic.engines.continuous.ranks.home_kv import HomeKV
from elastic.engines.continuous.ranks.hosted_stages import HostedStages
from elastic.engines.continuous.ranks.joined_ranks import JoinedRanks
from elastic.engines.continuous.ranks.layer_exchange import LayerExchange
from elastic.engines.continuous.ranks.recovery import Recovery
from elastic.engines.continuous.received import ReceivedKV, ReceivedRequests
from elastic.engines.continuous.reports import EngineReports
from elastic.engines.continuous.step_loop import StepLoop
from elastic.engines.continuous.variant_recorder import VariantRecorder
from elastic.engines.core.block_manager import BlockManager
from elastic.engines.core.kv_state import KVSource, SequenceKV
from elastic.engines.core.restart import RestartingScheduler
from elastic.engines.core.step import SequenceState
from elastic.engines.core.step_budget import StepBudget
from elastic.engines.executor.kv_exchange import KVExchange
from elastic.engines.executor.layer_groups import block_groups
from elastic.engines.executor.model_runner import ModelRunner
from elastic.engines.pipeline.home import HomeExecutor
from elastic.engines.pipeline.path import LayerPath
from elastic.engines.pipeline.turn import Turn
from elastic.engines.sampling import answer_seed, require_tokens, require_valid
from elastic.engines.stopping import end_tokens, with_ends
from elastic.errors import (
    CapacityError,
    ConfigError,
    ElasticError,
    Overloaded,
    StateError,
    is_number,
    require,
    require_flag,
    require_seconds,
    require_whole,
)
from elastic.kvcache.storage.paged import BlockMemory
from elastic.memory.rate_limit import YieldingPace
from elastic.openmp import release_threads
from elastic.planning.arrangement.step_pages import StepPages
from elastic.runtime.runtime import Runtime, runtime
from elastic.weights.decoder import batch_context_length

IN_USE = "a continuous batching engine; stop it first (one that was dropped ends with its last request)"


class ContinuousEngine:
    """The embedded engine: its cache is in blocks on the pages of the wrapped model.

    What layers give up is cache capacity at the next step, and what they take back they get when no request needs it.
    A request that does not fit now waits; none is evicted, restarted or computed twice. `max_queue` bounds how many
    may wait (None: any number), `max_requests` how many answers are computed at a time. `max_batch_tokens` bounds the
    tokens of one forward pass: a longer prompt is computed in parts. `block_tokens` is the size of a block (None: see
    `usual_block_tokens`), `block_layout` the order in it (a name of `LAYOUTS`); `kv_cache_dtype="int8"` keeps keys and
    values in 8 bits ("auto": in the model's dtype); `share_prefixes` has requests share the blocks of a common
    beginning; `cohorts` is how many batches may be in flight (None: one, or where other ranks compute layers as many as
    keep these busy); `step_budget` says how many tokens each step may have, by what they cost (None:
    `max_batch_tokens`); `grammars` serves structured output. Decode steps on a CPU are captured and replayed, to the
    same bits (`executor.graphs`), on a GPU with `cuda_graphs`; with `enforce_eager` the model is called at every step.
    An engine that is dropped ends with its last request, unless its model refers to it: then it has to be stopped.
    Fleets ask its parts: `reports`, `moves`, `stages`, `exchange`, `ranks`, `cohorts`, `recovery`, `kv`.
    Raises `StateError` for a model that is not wrapped, `ConfigError` for one that it cannot serve.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_queue: int | None = None,
        max_requests: int = 256,
        max_batch_tokens: int = 512,
        block_tokens: int | None = None,
        block_layout: str = "head_centric",
        kv_cache_dtype: str = "auto",
        share_prefixes: bool = True,
        cohorts: int | None = None,
        step_budget: StepBudget | None = None,
        grammars: GrammarCompiler | None = None,
        enforce_eager: bool = False,
        cuda_graphs: bool = False,
    ) -> None:
        require_options(
            max_queue=max_queue, max_requests=max_requests, max_batch_tokens=max_batch_tokens,
            block_tokens=block_tokens, block_layout=block_layout, kv_cache_dtype=kv_cache_dtype,
            share_prefixes=share_prefixes, cohorts=cohorts, step_budget=step_budget, grammars=grammars,
            enforce_eager=enforce_eager, cuda_graphs=cuda_graphs,
        )  # fmt: skip
        self.runtime: Runtime = runtime(model)
        self.counters, self.shards = self.runtime.counters, self.runtime.shards
        """`shards`: into how many each decoder layer is cut; 1: layers are whole."""
        self._model, self._config = model, model.config.get_text_config(decoder=True)
        self._max_queue, self._max_batch_tokens, self._grammars = max_queue, max_batch_tokens, grammars
        self._lock, self._state = threading.Lock(), "new"
        with ExitStack() as stack:
            occupation = self.runtime.occupy(IN_USE)
            stack.callback(occupation.end)
            kv = one_pool(model)
            self.kv_format = form = kv_format(model, block_tokens, block_layout, kv_cache_dtype)
            open_memory = partial(BlockMemory, kv, block_groups(form))
            self._blocks = BlockManager(open_memory, form.windows, form.block_tokens, share_prefixes)
            assert isinstance(self._blocks.memory, BlockMemory)
            memory = self._memory = self._blocks.memory
            memory.owed = self._blocks.owed_sectors
            stack.callback(memory.close)
            gate = self.runtime.gate if not enforce_eager and (cuda_graphs or model.device.type == "cpu") else None
            runner = self._runner = ModelRunner(model, memory, form, grammars, gate)
            stack.callback(runner.close)
            self._variants = VariantRecorder(self.runtime, lambda: False)
            self._requests = ActiveRequests(self.counters, self._variants)
            scheduler = RestartingScheduler(
                self._blocks, max_requests=max_requests, max_batch_tokens=max_batch_tokens, cohorts=cohorts or 1
            )
            scheduler.weights = self._variants.weights
            scheduler.budget = step_budget or scheduler.budget
            self._put_together(scheduler, cohorts)
            stack.callback(self.ranks.close)
            stack.callback(model.register_forward_pre_hook(self._variants).remove)
            kv.pool.listeners.append(self._loop.news.set)
            stack.callback(kv.pool.listeners.remove, self._loop.news.set)
            stack.callback(self.moves.close)
            occupation.end_dropped = self._lifetime.end_dropped
            self._lifetime.begin(self, stack.pop_all())

    def _put_together(self, scheduler: RestartingScheduler, cohorts: int | None) -> None:
        """Make the parts that the engine has besides its scheduler and the runner of its steps."""
        layers = len(self._memory.layers) // self.kv_format.kv_shards
        turn, path = Turn(), LayerPath.alone("", layers, self.runtime.shards)
        home = self._home = HomeExecutor(self._runner, self._memory, turn, path)
        home.set_cohorts(cohorts or 1)
        loop = self._loop = StepLoop(scheduler, home, self._requests)
        exchange = KVExchange(self.kv_format, self.runtime.shards, YieldingPace(turn.wait_idle, lambda: turn.stage_s))
        self.kv = kv = HomeKV(self._memory, self._runner.cache, exchange, home)
        """The keys and values of its layers."""
        self.reports = EngineReports(loop, home, kv)
        """What others are told of it."""
        received = ReceivedRequests(self._blocks, self._memory, exchange)
        self.moves = MovingRequests(loop, self._requests, received, self._memory)
        """Requests that go to other engines, and come from these, with their keys and values."""
        self.stages = HostedStages(self._model, self._memory, home, turn, exchange)
        """Layers of other instances that are computed here."""
        self.exchange = LayerExchange(loop, home, kv, self.stages, self.reports)
        """Layers that change the rank that computes them."""
        self.ranks = JoinedRanks(self.runtime, loop, home, kv, self.stages, self.moves, self.reports)
        """The ranks that layers can go to."""
        self.cohorts = Cohorts(loop, home, self.stages, self.exchange, self.reports, cohorts, self._max_batch_tokens)
        """The batches that are in flight."""
        self.recovery = Recovery(
            self.runtime, loop, home, kv, self.stages, self.exchange, self.ranks, self.cohorts, self.moves
        )
        """How it goes on when another rank is lost."""
        self._lifetime = EngineLifetime(self.runtime, loop, home, self._requests)
        loop.before_steps, loop.when_stuck = self.cohorts.fill_stages, self.moves.end_crowded_out
        hosted = self.stages.by_home
        loop.when_idle = lambda: not hosted and home.prepare()  # unless layers of other instances are computed here
        self._variants.counts = partial(_computes, loop, home)

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
        return self._state == "serving" and not self._loop.ended

    def start(self) -> None:
        """Begin to serve, on a thread of its own. Raises `StateError` if it was started before."""
        with self._lock:
            if self._state != "new":
                raise StateError(f"the engine is {'serving' if self.serving else 'stopped'}; make a new one")
            self._state = "serving"
            self.reports.begin()
            self._loop.start()
        release_threads()

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request; see `Engine`."""
        self._check(request, listener)
        request = with_ends(request, self.end_tokens)
        names = [request.id] if request.n == 1 else [f"{request.id}[{index}]" for index in range(request.n)]
        states = [SequenceState(name, request, i, answer_seed(request, i)) for i, name in enumerate(names)]
        self._add(states, listener)
        if not self._variants.counts():  # as a listener is
            release_threads()

    def longest_request(self, most: int, *, ever: bool = False) -> int:
        """Return the most tokens of a request for the KV cache; see `Engine`."""
        require_whole(most, "most", least=0)

        def is_refused(tokens: int) -> bool:
            try:
                self._blocks.require_possible(tokens)
            except CapacityError:
                return True
            except Overloaded:
                return not ever
            return False

        return bisect_left(range(1, most + 1), True, key=is_refused)

    def adopt(
        self,
        states: Sequence[SequenceState],
        listener: Listener,
        *,
        kv: Sequence[SequenceKV] = (),
        source: KVSource | None = None,
        waited_s: float | None = None,
    ) -> int:
        """Go on with the answers of one request that another engine had; raises as `submit` does.

        The listener gets the tokens from here on. `kv` says of which answers keys and values are there, and of how
        many tokens: they were received (`source` None), or are copied now. What is not there, or cannot be read, is
        computed anew from the tokens. Returns the tokens that are not. `waited_s`: how long ago the request arrived,
        None: as it says itself. Raises `Overloaded` if there is no room for the blocks now; nothing is kept then.
        """
        request = one_request(states)
        self._check(request, listener)
        for state in states:
            if len(state.generated) >= request.max_tokens:
                raise ConfigError(f"adopt: {state.id!r} has all of its {request.max_tokens} tokens; it has ended")
            require_tokens("generated", state.generated, self._config.vocab_size)
        if waited_s is not None:
            require(is_number(waited_s), "waited_s", waited_s, "a number of seconds, or None")
            request = replace(request, arrived_s=time.perf_counter() - waited_s)
            states = [replace(state, request=request) for state in states]
        received = self.moves.take_received(states, kv, source)
        try:
            self._add(states, listener, received)
        except ElasticError:
            for each in received.values():
                self._blocks.release(each.table)
            raise
        return sum(each.computed for each in received.values())

    def export(self, request: str) -> tuple[SequenceState, ...]:
        """End a request here between two steps, for another engine to adopt; its listener gets no further word.

        Its KV is lost, and a token that is in flight: `moves.hand_over` keeps both. Returns the states of its answers
        that have not ended; none if it is unknown, has ended or was handed over. A listener gets none either, and the
        request goes on, if the engine's thread has not taken it yet, or one of its answers has failed untold. Raises
        `StateError` if the engine is not serving.
        """

        def leave() -> tuple[SequenceState, ...]:
            names, scheduler = self._requests.sequences(request), self._loop.scheduler
            untold = self._requests.untold  # not empty where a listener is told another's token
            if not all(name in scheduler.sequences or name in untold for name in names):
                return ()
            states = []
            for name in names:
                state, last = scheduler.export(name), untold.pop(name, None)
                if last is not None:
                    state = replace(last.state(), generated=last.state().generated[:-1])
                assert state is not None, name
                states.append(state)
            self._requests.forget(request, "moved")
            return tuple(states)

        return leave() if threading.current_thread() is self._loop.thread else self._loop.between_steps(leave)

    def cancel(self, request: str, index: int | None = None) -> None:
        """End a request, or one of its answers, and free what it holds; see `Engine`."""
        require(isinstance(request, str), "request", request, "the id of a request, a text")

        def leave() -> None:
            for sequence in self._requests.sequences(request, index):
                self._loop.end(sequence, "cancelled")

        if request in self._requests.active:
            with suppress(StateError):  # the loop has ended, and all requests with it
                self._loop.post(leave)

    def stop(self, *, drain: bool = True, timeout_s: float | None = None) -> None:
        """Take no more requests; finish those there are (`drain`, for `timeout_s` at the most), or cancel them."""
        require_flag(drain, "drain")
        if timeout_s is not None:
            require_seconds(timeout_s, "timeout_s")
        if threading.current_thread() is self._loop.thread:
            raise StateError("the engine cannot be stopped by a listener, on its own thread; use another one")
        with self._lock:
            self._state = "stopped"
        self._lifetime.end(drain=drain, timeout_s=timeout_s)

    def check(self) -> None:
        """Recount the blocks of all sequences, of those that were handed over or may come, and of other instances."""
        self._blocks.check()
        for stage in list(self.stages.by_home.values()):
            stage.memory.check()

    # -- among other ranks

    step_pages = StepPages()
    """What its rank keeps free for steps over its sectors, and those of others; before the engine is started."""

    @property
    def rank(self) -> str:
        """This rank's name among others; set before the engine has anything to do with them."""
        return self._home.rank

    @rank.setter
    def rank(self, name: str) -> None:
        if name == self.rank:
            return
        if self._home.links or self.stages.by_home:
            raise StateError(f"rank {self.rank!r} computes layers with others; it cannot be renamed to {name!r}")
        self._home.path = replace(self.path, home=name, ranks=(name,) * len(self.path.ranks))

    @property
    def path(self) -> LayerPath:
        """The path of the engine's own steps that are begun now."""
        return self._home.path

    @property
    def step_times(self) -> tuple[float, float]:
        """Seconds of a step while this rank computes all layers, and of a hop of one that others compute layers of, in
        the mean of the last; 0.0: there was none."""
        return self._home.step_s, self._home.hop_s

    def __enter__(self) -> ContinuousEngine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- inside

    def _add(
        self, states: Sequence[SequenceState], listener: Listener, received: Mapping[str, ReceivedKV] | None = None
    ) -> None:
        """Have the loop take a request, with the blocks of its sequences that have `received` some."""
        received = received or {}
        request = states[0].request
        tokens = len(request.prompt) + request.max_tokens
        if self.runtime.in_forked_child:  # whose lock may be held for ever
            raise StateError("this process was forked from the one whose engine serves: ask that one")
        with self._lock:
            if not self.serving:
                raise StateError("the engine is not serving; start it, or make a new one")
            self._requests.add(states, listener)
            try:
                if not received and self._max_queue is not None:
                    waiting = self._requests.waiting_before(request)
                    if waiting >= self._max_queue:
                        wait_s = min(60.0, max(1.0, self.counters.read().queue_delay_s))
                        raise Overloaded(f"{waiting} requests wait, max_queue={self._max_queue}", retry_after_s=wait_s)
                for name, each in received.items():
                    self._blocks.attach(name, each.table)
                self._blocks.expect([state.id for state in states], tokens)
                computed = {name: each.computed for name, each in received.items()}
                self.counters.arrived(request.id, len(request.prompt), request.arrived_s, sequences=len(states))
                self._loop.post(partial(self._loop.scheduler.add, states, computed))
            except ElasticError as error:
                for state in states:
                    self._blocks.forget(state.id)
                if isinstance(error, Overloaded | CapacityError):
                    self.counters.refused(request.arrived_s)
                self._requests.forget(request.id, "failed")
                raise

    def _check(self, request: Request, listener: Listener) -> None:
        require(callable(listener), "listener", listener, "a function of an elastic.Output")
        require_valid(request, self._config.vocab_size, batch_context_length(self._config))
        if request.grammar is not None:
            if self._grammars is None:
                raise ConfigError("grammar: this engine has no compiler of grammars; make it with grammars=")
            self._grammars.matcher(request.grammar)  # it is compiled now, and kept: the executor's is made at once


def _computes(loop: StepLoop, home: HomeExecutor) -> bool:
    """Return whether the present thread computes an engine's own steps."""
    thread = threading.current_thread()
    return thread is loop.thread or thread in home.threads.started
