"""What the connector keeps beside vLLM's scheduler."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.request import Request, RequestStatus

from elastic.engines.vllm.agreement import ActionOrders, Coordinator
from elastic.engines.vllm.kv.admission import GroupDemand, PromiseLedger
from elastic.engines.vllm.kv.capacity import BlockCapacity
from elastic.engines.vllm.kv.coordinator import CapacityCoordinator
from elastic.engines.vllm.kv.moves import move_blocks
from elastic.engines.vllm.kv.orders import Handshake, Occurrence, RequestEvent, StepOrders, StepReport, StepTokens
from elastic.engines.vllm.kv.prefixes import PrefixSharing
from elastic.engines.vllm.kv.worker_channel import WorkerChannel
from elastic.engines.vllm.metrics import CapacityStats
from elastic.errors import ElasticError, StateError
from elastic.memory.backends.shared_file import OpenFile

logger = logging.getLogger(__name__)
IDLE_S = 0.005
"""Between the steps of an engine without requests that waits for a rank."""
DECIDE_S = 0.05
"""After so long orders are decided anew, though nothing is known to have changed; until then tokens wait to be told."""


@dataclass(slots=True)
class _Told:
    """A request that lives, and what was told of it."""

    request: Request
    wakes: int
    """How often ranks had asked to be looked at when it came."""
    output: Sequence[int]
    """Its tokens, which vLLM appends to."""
    tokens: int = 0
    preemptions: int = 0


class SchedulerSide:
    """What is kept beside vLLM's scheduler: the coordinator, the requests that live, and what is told of them.

    `lock` keeps apart the thread that steps and, in an idle engine, the one that settles what a step would. Whatever
    changes what is decided, or who may enter, ends `quiet`; a step that finds it gives the orders of the last one.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._wake_files: list[OpenFile] = []  # of ranks; their lengths count: times would be too coarse
        self._ledger = promise_ledger(vllm_config, kv_cache_config, binding=bool(extra.get("promise", True)))
        self.requests: dict[str, _Told] = {}
        """Those that live."""
        self._running: dict[str, _Told] = {}  # those of them that have entered
        self._unheard: list[Request] = []  # refused in this step, as `may_enter` says
        self._prefixes = PrefixSharing()
        self._events: list[RequestEvent | StepTokens] = []
        self._told_figures = (0, 0, 0, 0, 0)
        self.figures_due = True
        """Whether `new_figures` may have some."""
        self.quiet = False
        """Whether nothing has changed since the last decision."""
        self.decisions = 0
        """Those that were not the last one again."""
        self.refused = 0
        """Requests for which there was no room, since whoever counts them set this to 0."""
        self._orders = StepOrders()  # the last ones, without what was for one step
        self._decided_s = 0.0
        self.movable = bool(extra.get("move_blocks", True))
        """Whether blocks may be moved where that can be done."""
        self._idle = True
        self._local: WorkerChannel | None = None
        self._agreement = Coordinator(vllm_config.parallel_config.world_size)
        self.lock = threading.RLock()
        self.coordinator: CapacityCoordinator

    def bind(self, pool: Any) -> None:
        """Take charge of how many of vLLM's blocks may be used: none but its null block to begin with."""
        self.coordinator = CapacityCoordinator(BlockCapacity(pool), self._ledger)

    def connect(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Begin with the blocks that the ranks have mapped. Raises `ConfigError` where they cannot serve.

        `metadata`: by pipeline and tensor-parallel rank; of another connector, if it is no `Handshake`.
        """
        handshakes = [each for each in metadata.values() if isinstance(each, Handshake)]
        channel = WorkerChannel.local.get(handshakes[0].wakes) if len(handshakes) == 1 else None
        try:
            self.coordinator.connect(handshakes)
        except ElasticError:
            if channel is not None:  # vLLM stops no worker then, and this process may start another engine
                ensure_kv_transfer_shutdown()
                channel.model.close()
            raise
        self._wake_files = _open_wake_files(handshakes)
        if channel is not None:
            self._local = channel
            channel.on_change = self.settle
        self._follow_weights()
        self._end_quiet()
        self.settle()  # so that the status is right before the first step

    # -- requests

    def arrived(self, request: Request) -> None:
        """Note a request before it has any block."""
        with self.lock:
            self._idle = False
            self.requests[request.request_id] = _Told(request, self._wakes(), request._output_token_ids)
            self._follow_weights()
            self._prefixes.arrive(request)
            arrived_s = time.perf_counter() - max(0.0, time.time() - request.arrival_time)
            self._tell("arrived", request, request.num_prompt_tokens, arrived_s)
            self._end_quiet()

    def may_enter(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """Return 0 if all that live, and this one, can still get every block that they may need; else None.

        False goes with either. vLLM looks at the next request where it is None: at one that has looked for its prefix
        by the weights of before, again with the next step; so at one before which an action ended that ranks of other
        processes have not told of yet. vLLM does not hear that one waits which reads no prefix (it wants
        log-probabilities of its prompt): until the step is scheduled, it does.
        """
        may = self._may_enter(request)
        if not may and request.skip_reading_prefix_cache:
            request.skip_reading_prefix_cache = False
            self._unheard.append(request)
        return (0 if may else None), False

    def _may_enter(self, request: Request) -> bool:
        arrival = self.requests.get(request.request_id)
        if arrival is None:  # queued, and about to be noted, while another thread steps
            return False
        waiting = len(self._ledger.waiting)
        if not self._ledger.may_enter(request.request_id, _tokens(request), self.coordinator.room):
            self.refused += 1
            if len(self._ledger.waiting) > waiting:  # the first that waits has a say in how many blocks there should be
                self._end_quiet()
            return False
        self._follow_weights()
        told = self._local is not None or arrival.wakes <= self.coordinator.wakes
        return told and self._prefixes.may_look_up(request.request_id)

    def entered(self, request: Request, blocks: Any, external_tokens: int) -> None:
        """Note that a request has its first blocks, or again some after it was preempted: promise it what it needs."""
        self._ledger.enter(request.request_id, _tokens(request))
        self._prefixes.enter(request.request_id)
        self._running[request.request_id] = self.requests[request.request_id]
        self._tell("scheduled", request)
        self._end_quiet()

    def left(self, request: Request, block_ids: Sequence[Any]) -> tuple[bool, None]:
        """Note that a request ends; its blocks are freed at once after this, as is returned."""
        self._ledger.leave(request.request_id)
        self._prefixes.leave(request.request_id)
        self._running.pop(request.request_id, None)
        told = self.requests.pop(request.request_id, None)
        if told is not None:
            self._tell_tokens({request.request_id: told})
            self._tell_preemptions([told])
        aborted = request.status is RequestStatus.FINISHED_ABORTED
        self._tell("cancelled" if aborted else "completed", request)
        self._end_quiet()
        return False, None

    # -- steps

    def next_orders(self, scheduled: Any) -> StepOrders:
        """Decide what the ranks do before the step that was just scheduled."""
        idle = not scheduled.total_num_scheduled_tokens
        while self._unheard:
            self._unheard.pop().skip_reading_prefix_cache = True
        if self._tell_tokens(self._running) < self._decided_s + DECIDE_S and self.quiet and not idle:
            taken = self.coordinator.taken
            if taken != self._orders.used_blocks:
                self._orders, self.figures_due = self._orders._replace(used_blocks=taken), True
            return self._orders
        with self.lock:
            before = self.coordinator.sequence
            orders = self._decide()
        if idle and orders.sequence == before:
            time.sleep(IDLE_S)
        return orders

    def receive(self, output: Any) -> None:
        """Take in what ranks tell after a step, if they do."""
        report = output.kv_connector_worker_meta
        if not isinstance(report, StepReport):
            return
        with self.lock:
            for rank, state in report.ranks.items():
                if state.actions is not None:
                    self._agreement.receive(rank, state.actions)
            self.coordinator.receive(report)
            self._follow_weights()
            self._end_quiet()

    def step_ended(self) -> tuple[()]:
        """Note the end of a step: without requests, what would need more steps is settled here.

        vLLM asks for events then, of which there are none; the blocks of ended requests are free.
        """
        if not self.requests:
            self._idle = True
            self.settle()
        return ()

    def settle(self, step: Callable[[], object] | None = None) -> None:
        """Do what steps would do, if no request is there. Called from any thread.

        An engine in the caller's process takes no step while it has no request. One rank that lives in this process is
        told here what it would be with a step; for others `step` runs one, in which no request can take part. So it
        does while steps that were scheduled ahead have blocks of aborted requests.
        """
        if self._local is not None:
            if step is not None:
                with self.lock:
                    if self._idle and self.coordinator.capacity.used:
                        step()
            self._settle_local(self._local)
            return
        while step is not None:
            with self.lock:  # a request that arrives waits for it
                if not (self._idle and (self._untold or self.coordinator.settling)):
                    return
                step()

    def _settle_local(self, channel: WorkerChannel) -> None:
        if not self._idle:
            return
        with self.lock:
            while self._idle:  # steps that follow a request's arrival use the pool without the lock
                self._withdraw_idle(channel)
                before = self.coordinator.sequence
                channel.before_step(self._decide())
                report = channel.report()
                if report is not None:
                    self.coordinator.receive(report)
                    self._end_quiet()
                elif self.coordinator.sequence == before:
                    return

    def _withdraw_idle(self, channel: WorkerChannel) -> None:
        """Withdraw what an idle engine has in the way of a shrink; cached prefixes move, as they do with a step."""
        books = self.coordinator
        if not books.moving:
            books.capacity.withdraw_freed()
        elif copies := move_blocks(books.capacity, (), frozenset()).copies:
            channel.sectors.copy_blocks(copies)
            books.moved_blocks += len(copies)

    def busy(self) -> bool:
        """Return whether the engine is to go on stepping though no request is there."""
        return self._untold or self.coordinator.busy

    def awaits_blocks(self) -> bool:
        """Return whether a request that finds no block should sit a step out rather than take another's.

        By promise there is a block for it, if not yet; else while sectors are being mapped.
        """
        books = self.coordinator
        promised = books.promises is not None and books.promises.total <= books.capacity.usable
        return promised or not books.settled or books.needed > books.mapped

    @property
    def _untold(self) -> bool:
        """Whether the ranks have not been told all, or have not answered."""
        books, told = self.coordinator, self._orders
        if (told.used_blocks, told.capacity_blocks) != (books.taken, books.capacity.usable):
            return True
        return bool(self._events) or self._wakes() != books.wakes or self._agreement.pending

    def new_figures(self) -> CapacityStats | None:
        """Return the figures for vLLM's metrics, None if they are as they were told last."""
        if not self.figures_due:
            return None
        books, self.figures_due = self.coordinator, False
        now = books.capacity.usable, books.taken, books.mapped, books.moved_blocks, books.sequence
        if now == self._told_figures:
            return None
        (*_, moved, changes), self._told_figures = self._told_figures, now
        gauges = {"usable_blocks": now[0], "taken_blocks": now[1], "mapped_sectors": now[2]}
        return CapacityStats({**gauges, "moved_blocks": now[3] - moved, "capacity_changes": now[4] - changes})

    def close(self) -> None:
        """Be settled no more. Can be called twice."""
        if self._local is not None:
            self._local.on_change = lambda: None
            self._local = None

    def _decide(self) -> StepOrders:
        """Return the next orders, with what happened since the last ones."""
        was_quiet, self.quiet, self.figures_due = self.quiet, True, True  # what changes from here on ends it again
        self._decided_s = time.perf_counter()
        wakes = self._wakes()
        self._tell_preemptions(self._running.values())
        events, self._events = self._events, []
        orders = self.coordinator.next_orders(actions=self._agreement.orders(), requests=events, wakes=wakes)
        before, self._orders = self._orders, orders._replace(actions=ActionOrders(), requests=())
        self.decisions += not was_quiet or self._orders != before
        if not self.coordinator.settled or self.coordinator.capacity.leaving:  # the next decision may be another one
            self.quiet = False
        return orders

    def _end_quiet(self) -> None:
        """Have the next step decide. Called when what has changed can be seen."""
        self.quiet, self.figures_due = False, True

    def _follow_weights(self) -> None:
        """Have nothing found in the prefix cache that was computed with other weights than the ranks have now.

        What was scheduled may have been computed with other weights than were known then, so all is forgotten.
        """
        weights = self.coordinator.weights if self._local is None else [self._local.weights()]
        if self._prefixes.change(weights):
            self.coordinator.capacity.forget_contents()

    def _wakes(self) -> int:
        """Count how often ranks have asked to be looked at."""
        return sum(file.nbytes for file in self._wake_files)

    def _tell_tokens(self, requests: Mapping[str, _Told]) -> float:
        """Tell of the tokens of requests that were not told of yet; return the time. The next decision sends it."""
        produced, at_s = {}, time.perf_counter()
        for name, told in requests.items():
            tokens = len(told.output)
            if tokens > told.tokens:
                produced[name] = tokens - told.tokens
            told.tokens = tokens
        if produced:
            self._events.append(StepTokens(produced, at_s))
        return at_s

    def _tell_preemptions(self, requests: Iterable[_Told]) -> None:
        """Tell of the requests that have lost their blocks."""
        for told in requests:
            if told.request.num_preemptions > told.preemptions:
                self._tell("preempted", told.request)
            told.preemptions = told.request.num_preemptions

    def _tell(self, what: Occurrence, request: Request, tokens: int = 0, at_s: float | None = None) -> None:
        at_s = time.perf_counter() if at_s is None else at_s
        self._events.append(RequestEvent(what, request.request_id, tokens, at_s))


def _open_wake_files(handshakes: Iterable[Handshake]) -> list[OpenFile]:
    """Open those of the ranks of this host; others are only heard with steps."""
    files = []
    for handshake in handshakes:
        try:
            if handshake.wakes is not None:
                files.append(OpenFile(handshake.wakes))
        except StateError as error:
            logger.warning("actions of rank %d wait while there are no requests: %s", handshake.rank, str(error))
    return files


def promise_ledger(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, binding: bool) -> PromiseLedger:
    """Make the ledger of a model's groups of layers; for those that drop old tokens by vLLM's own bound."""
    longest = vllm_config.model_config.max_model_len
    speculative = vllm_config.speculative_config
    drafts = speculative.num_speculative_tokens if speculative is not None else 0
    groups = []
    for group in kv_cache_config.kv_cache_groups:
        spec, most, extra = group.kv_cache_spec, None, 0
        if hasattr(spec, "max_admission_blocks_per_request"):
            most = spec.max_admission_blocks_per_request(
                max_in_flight_tokens=vllm_config.max_in_flight_tokens, max_model_len=longest
            )
        if isinstance(spec, MambaSpec):
            extra = spec.num_speculative_blocks + 2  # the states before and after a step, kept for prefixes
        groups.append(GroupDemand(spec.block_size, most, extra))
    return PromiseLedger(groups, longest=longest, lookahead=1 + 2 * drafts, binding=binding)


def _tokens(request: Request) -> int:
    """Count the tokens that a request may come to have; a session gets more of its prompt as it goes, to any length."""
    return sys.maxsize if request.resumable else int(request.num_prompt_tokens + (request.max_tokens or 0))
