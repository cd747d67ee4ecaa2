"""What a fleet knows of one instance: its rank, what it was given, and whether it has room for more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic import clock
from elastic.cluster.control.messages import Hello
from elastic.cluster.control.status import InstanceStatus, RankState
from elastic.cluster.fleet.planning.router import freeness
from elastic.cluster.fleet.records.memory_file import HeldMemory
from elastic.cluster.fleet.records.requests import RequestRecord
from elastic.cluster.rank.client import RankClient
from elastic.cluster.rank.spec import RankSpec
from elastic.engines.base import Request
from elastic.engines.core.admission import AdmissionLedger, Demand
from elastic.engines.core.kv_state import KVDirectory, KVFormat
from elastic.engines.core.load import EngineLoad
from elastic.engines.pipeline.path import LayerPath
from elastic.planning.pipeline.chunk_cost import Chunk

AHEAD = 1
"""Sequences that an instance may have besides `max_requests`, so that none of its steps waits for the fleet."""


@dataclass(slots=True)
class _Unheard:
    """A request of which its instance has told nothing yet."""

    blocks: int
    """All that it may need."""
    prompt_blocks: int
    """Those that are to be computed first."""


@dataclass(eq=False)
class Instance:
    """One rank that serves alone, as its own leader. Under the lock of the `Dispatcher` that has it."""

    name: str
    client: RankClient
    spec: RankSpec
    launcher: str
    forms: list[int]
    """Its index of weights -> the fleet's."""
    same_host: bool
    """Whether its clock is the fleet's."""
    memory: HeldMemory | None = None
    """Its KV cache as others can read it, also when it has ended."""
    directory: KVDirectory | None = None
    """Where in its cache the keys and values of its sequences are, in the layers that it computes itself."""
    state: RankState = "serving"
    why: str = ""
    moves: int = 0
    """Requests that are on their way from here or to here, and ranks that were killed of which it keeps keys and
    values for others: it does not end before."""
    removals: int = 0
    """Calls that remove it, and were not interrupted."""
    leaving: bool = False
    """Whether it was asked to end: then its end is no failure."""
    records: dict[str, RequestRecord] = field(default_factory=dict)
    given: int = 0
    served: bool = False
    """Whether it has told a token."""
    heard_s: float = field(default_factory=clock.now)
    progress_s: float = field(default_factory=clock.now)
    """When its engine last began a step, or had nothing to do."""
    cut_off_s: float | None = None
    """Since when its engine waits for another rank to be given up."""
    unheard: dict[str, _Unheard] = field(default_factory=dict)
    limit_changes: int = 0
    """By how many threads its limit is being changed: until all instances have theirs it is given nothing."""
    flips: int = 0
    """How many changes of who computes which layers it takes part in now."""
    group: tuple[str, ...] = ()
    """The ranks that compute layers of it, or could; none: it is by itself."""
    path: LayerPath | None = None
    """Who computes its layers, in a group."""
    group_blocks: int = 0
    """The highest limit that its group could give it, if the others had nothing."""
    policy_blocks: int = 0
    """The highest limit that a policy of the fleet could have it given, by dropping weights of others too."""

    def __post_init__(self) -> None:
        self.hello: Hello = self.client.hello
        """Who it is."""
        self.kv_format: KVFormat = self.hello.kv
        """The form of its blocks."""
        self.load: EngineLoad = self.hello.load
        self._alone_blocks = self.load.total_blocks  # the highest limit that it had by itself
        self.changes = 0
        """Counts the times that its room, or what it has, became another."""
        self._full: tuple[str, int, int] | None = None  # a request for which it had no room: its id and answers, when

    @property
    def most_blocks(self) -> int:
        """The highest limit that it had by itself, or can have now: what is larger never fits."""
        return max(self._alone_blocks, self.reachable_blocks)

    @property
    def reachable_blocks(self) -> int:
        """The highest limit that a request may wait for: it is given that when one waits which needs it.

        Alone, what it keeps free counts too.
        """
        uncapped = 0 if self.group else self.load.uncapped_blocks
        return max(self.load.total_blocks, self.group_blocks, self.policy_blocks, uncapped)

    @property
    def sequences(self) -> int:
        """Answers that it was given and that have not ended."""
        if not self.records:
            return 0
        return sum([record.left for record in self.records.values()])  # a list is faster: every request asks for it

    @property
    def free_blocks(self) -> int:
        """Blocks after promises, as it last told, and after what it was given since."""
        free = self.load.free_blocks
        return free - sum(unheard.blocks for unheard in self.unheard.values()) if self.unheard else free

    @property
    def freeness(self) -> float:
        """Blocks that are left for each running sequence."""
        return freeness(self.free_blocks, self.sequences)

    def hear(self, load: EngineLoad, now: float) -> None:
        """Note a sign of life."""
        if load.steps != self.load.steps or not (load.running or load.waiting):
            self.progress_s = now
        if load.lost_rank != self.load.lost_rank:
            self.cut_off_s = now if load.lost_rank else None
        self.heard_s = now
        if load != self.load:  # most signs of life say nothing new
            self.changes += 1
            self.load = load
        if not self.group:
            self._alone_blocks = max(self._alone_blocks, load.total_blocks, load.uncapped_blocks)

    def give(self, record: RequestRecord, cached: int, now: float) -> None:
        """Note a request that it gets, so many blocks of whose prompt it has."""
        if not self.records:
            self.progress_s = now  # it had nothing to do
        record.instance, record.begun, record.routed, record.given_s = self.name, False, True, now
        self.changes += 1
        self.records[record.request.id] = record
        self.given += 1
        prompt = max(0, len(record.request.prompt) // self.kv_format.block_tokens - cached)
        self.unheard[record.request.id] = _Unheard(all_blocks(self.kv_format, record) - cached, prompt)

    def reserve(self, record: RequestRecord) -> None:
        """Keep room for a request that may come."""
        self.unheard[record.request.id] = _Unheard(all_blocks(self.kv_format, record), 0)

    def take_back(self, record: RequestRecord) -> None:
        """Note that a request which was to go elsewhere goes on here."""
        self.changes += 1
        self.records[record.request.id] = record
        record.instance = self.name

    def take(self, record: RequestRecord) -> None:
        """Note that a request is not there any more."""
        self.changes += 1
        self.records.pop(record.request.id, None)
        self.unheard.pop(record.request.id, None)
        record.instance = None

    def may_get(self, record: RequestRecord, now: float) -> bool:
        """Return whether it takes requests, and has not just refused this one."""
        return self.state == "serving" and not self.limit_changes and record.refused.get(self.name, 0.0) <= now

    def holds(self, record: RequestRecord, cached: int, reserved: int = 0) -> bool:
        """Return whether a request could begin there at once, and all that it has could still end.

        `reserved` blocks are to stay free, for others: then it must find all that it may need beside them.
        """
        live, new = self.sequences, record.left
        if live and live + new > self.hello.max_requests + AHEAD:
            return False
        needed = all_blocks(self.kv_format, record) - cached
        if reserved:
            return self.fits_alone(record.request) and needed <= self.free_blocks - reserved
        if not live or not self.fits_alone(record.request):
            return self.fits_alone(record.request)
        if needed <= self.free_blocks:
            return True
        asked = record.request.id, new, self.changes
        if self._full == asked:  # the first that waits is asked about whenever any instance tells something
            return False
        if can_all_end(self.kv_format, [*self.records.values(), record], self.load.total_blocks):
            return True
        self._full = asked
        return False

    def decoding(self) -> list[Chunk]:
        """Return what its next step has of answers that are being generated: a token of each."""
        answers = [answer for record in self.records.values() for answer in record.live if answer.tokens]
        return [Chunk(answer.state.id, answer.computed, 1) for answer in answers]

    def fits_alone(self, request: Request) -> bool:
        """Return whether one answer of a request fits there, if nothing else is there, while its limit is as it is."""
        return self.request_blocks(request) <= self.load.total_blocks

    def request_blocks(self, request: Request) -> int:
        """Count the blocks, as its load counts them, that one answer of a request needs by itself."""
        return self.blocks_alone(len(request.prompt) + request.max_tokens)

    def blocks_alone(self, tokens: int) -> int:
        """Count the blocks, as its load counts them, of the sectors that so many tokens of one sequence take.

        With several groups of layers each group takes whole sectors of its own, and the load counts those of the first.
        """
        kv, sizes = self.kv_format, self.hello.sector_blocks
        if len(sizes) < 2:
            return blocks_of(kv, tokens)
        return sizes[0] * sum(-(-count // size) for count, size in zip(blocks_by_group(kv, tokens), sizes, strict=True))

    @property
    def should_step(self) -> bool:
        """Whether it has a request that could be computed: one that waits for a limit to rise cannot."""
        return bool(self.load.running) or any(self.fits_alone(record.request) for record in self.records.values())

    def status(self) -> InstanceStatus:
        """Return what `Fleet.status` says of it."""
        requests = len(self.records)
        ranks = (self.name,) if self.path is None else tuple(dict.fromkeys((self.name, *self.path.ranks)))
        layers = [] if self.path is None else [self.path.copies_of(layer) for layer in range(self.path.layers)]
        path = tuple("|".join(map("+".join, copies)) for copies in layers)
        tp = max((len(holders) for copies in layers for holders in copies), default=1)
        epoch = 0 if self.path is None else self.path.epoch
        return InstanceStatus(self.name, self.name, ranks, self.load, requests, self.freeness, epoch, path, tp)


def blocks_of(kv: KVFormat, tokens: int) -> int:
    """Count the blocks that so many tokens of a sequence need, in the size of those of the first group of layers.

    Loads and limits are counted so: a block of a group with half as many layers is half of one.
    """
    if kv.windows == (None,):
        return -(-tokens // kv.block_tokens)
    first, *_ = sizes = [len(layers) for layers, _ in kv.groups]
    return sum(-(-count * size // first) for count, size in zip(blocks_by_group(kv, tokens), sizes, strict=True))


def blocks_by_group(kv: KVFormat, tokens: int) -> list[int]:
    """Count the blocks of each group of layers that so many tokens of a sequence need."""
    sizes = (tokens if window is None else min(tokens, window) for window in kv.windows)
    return [-(-size // kv.block_tokens) for size in sizes]


def all_blocks(kv: KVFormat, record: RequestRecord) -> int:
    """Count the blocks that a request may need at the most; its answers share those of the prompt."""
    prompt, most = len(record.request.prompt), record.request.max_tokens
    shared = blocks_of(kv, prompt // kv.block_tokens * kv.block_tokens)
    return shared + record.left * (blocks_of(kv, prompt + most) - shared)


def can_all_end(kv: KVFormat, records: Sequence[RequestRecord], total_blocks: int) -> bool:
    """Return whether requests could have the blocks of their tokens so far at the same time, and all end then.

    The banker's algorithm, as the engine's own admission; but blocks that requests share count for each. Answers
    behind the first of a request that has no tokens yet wait, and hold none.
    """
    ledger, held = AdmissionLedger((1,)), 0
    for record in records:
        prompt, most = len(record.request.prompt), record.request.max_tokens
        for i, answer in enumerate(record.live):
            now = blocks_of(kv, prompt + len(answer.tokens) + 1) if answer.tokens or not i else 0
            ledger.add(Demand([blocks_of(kv, prompt + most) - now], [now]))
            held += now
    return held <= total_blocks and ledger.reserved_sectors([0]) <= total_blocks - held
