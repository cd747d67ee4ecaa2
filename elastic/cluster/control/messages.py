"""The messages between a fleet and its ranks: frozen records that can be pickled. `PROTOCOL` changes with them.

A fleet sends `Submit`, `Cancel`, `Ask` and `Bye`; a rank sends `Hello` first, then `News` after each step of its
engine, `Refused`, `Answer` and `Beat`. What is asked is one of `Question`; the answer of each is said there, and in
`stage_questions`. Nothing is unpickled before both ends have proven that they know the key.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field
from typing import Any

from elastic.cluster.control.columns import Columns, from_columns, to_columns
from elastic.cluster.control.stage_questions import PeerQuestion, StageQuestion, WeightDigests, WeightsOf
from elastic.cluster.control.status import Wire
from elastic.engines.base import Output
from elastic.engines.core.kv_state import KVFormat, KVReport, KVSource, SequenceKV
from elastic.engines.core.load import EngineLoad
from elastic.engines.core.step import SequenceState
from elastic.planning.pipeline.chunk_cost import ModelCost
from elastic.types import Action

PROTOCOL = 18


@dataclass(frozen=True)
class ModelFacts:
    """What is served, so that a fleet takes only ranks whose answers are the same."""

    digests: tuple[int, ...]
    """A checksum of each decoder layer's parameters as they were loaded, in order."""
    fixed_digest: int
    """Of all other parameters: embedding, final norm, head."""
    vocabulary: int
    longest: int | None
    """Tokens that a request may have, prompt and answer together; None: any number."""
    end_tokens: tuple[int, ...]
    variants: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankPlace:
    """Memory that a rank may use, as it was started with."""

    text: str
    """As it was written, such as `cpu#a=1GiB`."""
    name: str
    memory: str
    """What it is a part of: "cpu", or a GPU by its UUID. Places of one host with the same share it."""
    budget_bytes: int | None
    """None: chosen by the rank, of what was free when it began."""
    total_bytes: int
    """What there is of this memory at all, for the rank's process."""


@dataclass(frozen=True)
class Hello:
    """Rank to fleet, first: who it is."""

    name: str
    """The name that it was started with; empty: the fleet chooses one."""
    pid: int
    host: str
    """Names the host and its process namespace: ranks with equal ones can read each other's memory files."""
    model: ModelFacts
    kv: KVFormat
    max_requests: int
    memory: KVSource | None
    """Where others can read its KV cache; None: they cannot."""
    load: EngineLoad = field(default_factory=EngineLoad)
    forms: tuple[tuple[str, ...], ...] = ()
    """`Engine.weights` so far."""
    cost: ModelCost | None = None
    """What steps of its model cost; None: nobody asked for that."""
    places: tuple[RankPlace, ...] = ()
    """Those that it was started with; none: as `elastic.wrap` chose."""
    sector_blocks: tuple[int, ...] = ()
    """Of each group of layers, the blocks of a sector: less than one of a group is not to be had; (): nobody asks."""
    shares_prefixes: bool = True
    """Whether sequences share the blocks of a common beginning there."""


@dataclass(frozen=True)
class Submit:
    """Fleet to rank: go on with the answers of one request, from the tokens that they have."""

    states: tuple[SequenceState, ...]
    waited_s: float = 0.0
    """How long ago the request arrived; clocks of several hosts differ, durations do not."""
    kv: tuple[SequenceKV, ...] = ()
    """Where their keys and values are, as far as they were computed: no token of these is computed again."""
    source: KVSource | None = None
    """What `kv` is about, if its blocks are another rank's; None: they were received under the request's id."""


@dataclass(frozen=True)
class Cancel:
    """Fleet to rank: end a request, or one of its answers."""

    request: str
    index: int | None = None


@dataclass(frozen=True)
class Ask:
    """Fleet to rank: do or tell something; there is one `Answer` with the same id."""

    id: int
    question: Question


@dataclass(frozen=True)
class Answer:
    """Rank to fleet: what came of a question."""

    id: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class News:
    """Rank to fleet, after each step: its tokens, before any block that came free with it can have another owner."""

    outputs: tuple[Output, ...]
    starts: tuple[int, ...]
    """For each output, how many tokens of its answer there were before."""
    load: EngineLoad
    kv: KVReport | None = None
    """What has changed of where the KV cache of sequences lies."""
    forms: tuple[tuple[str, ...], ...] = ()
    """Forms that were added to `Engine.weights`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _news, (tuple(to_columns(self.outputs)), self.starts, astuple(self.load), self.kv, self.forms)


def _news(columns: tuple[Any, ...], starts: tuple[int, ...], load: tuple[Any, ...], kv: Any, forms: Any) -> News:
    return News(from_columns(Columns(*columns)), starts, EngineLoad(*load), kv, forms)


@dataclass(frozen=True)
class Refused:
    """Rank to fleet: a request was not taken; nothing of it is there. Instead of Hello: there is no rank, and why."""

    request: str
    error: Exception


@dataclass(frozen=True)
class Beat:
    """Rank to fleet, every so often: it is alive, whatever its engine does."""

    load: EngineLoad


@dataclass(frozen=True)
class Bye:
    """Fleet to rank: end. With `drain`, when what it was given has ended. Rank to fleet, last: it ends in order."""

    drain: bool = False
    why: str = ""
    """Fleet to rank: why it is refused."""


# -- questions


@dataclass(frozen=True)
class Locate:
    """Where the KV of a request lies: `tuple[SequenceKV, ...]` of its answers that have blocks; none: it has ended."""

    request: str


@dataclass(frozen=True)
class Receive:
    """Copy blocks of another rank for a request that may come; answers with the bytes that were copied.

    It can be asked again with more tokens: what is there already is not copied again. `states` are those of the
    beginning. Raises `CapacityError` or `Overloaded` if there is no room; then nothing is kept.
    """

    states: tuple[SequenceState, ...]
    kv: tuple[SequenceKV, ...]
    source: KVSource
    coordinated: bool = True
    """Behind what computes there; False: the request waits for it."""


@dataclass(frozen=True)
class GiveUp:
    """Forget what was received for a request that does not come."""

    request: str


@dataclass(frozen=True)
class HandOver:
    """Stop a request between two steps, and hold its blocks: `HandedOver`, or None if it has ended."""

    request: str


@dataclass(frozen=True)
class HandedOver:
    """A request that has stopped at one rank, for another to go on with."""

    states: tuple[SequenceState, ...]
    kv: tuple[SequenceKV, ...]


@dataclass(frozen=True)
class FreeBlocks:
    """Free the blocks of a request that was handed over."""

    request: str


@dataclass(frozen=True)
class TakeBack:
    """Go on with a request that was handed over, as if nothing had been."""

    request: str


@dataclass(frozen=True)
class Look:
    """`RuntimeView`: the runtime's status, events and request statistics."""


@dataclass(frozen=True)
class RuntimeView:
    """What `/elastic/status` says of one rank."""

    status: Any
    """`elastic.Status`"""
    stats: Any
    """`RequestStats` of its engine."""
    events: tuple[Any, ...] = ()
    """The last `elastic.Event`s."""
    controller: Any = None
    """`ControllerHealth`"""
    times: Any = None
    """`StageTimes`"""
    wires: tuple[Wire, ...] = ()
    variants: tuple[str, ...] = ()
    """What layers can be swapped to."""
    utilization: float | None = None
    """The mean share of the last two minutes in which its GPU was busy, whoever used it; None where nobody tells."""


@dataclass(frozen=True)
class Apply:
    """Do actions, all or none: their results. With `dry_run` the steps of a plan instead."""

    actions: tuple[Action, ...]
    why: str = "by the fleet"
    dry_run: bool = False


@dataclass(frozen=True)
class PrepareActions:
    """`Runtime.prepare`."""

    actions: tuple[Action, ...]
    id: str
    timeout_s: float = 60.0


@dataclass(frozen=True)
class CommitActions:
    """`Runtime.commit`."""

    id: str


@dataclass(frozen=True)
class RollbackActions:
    """`Runtime.rollback`."""

    id: str


@dataclass(frozen=True)
class Check:
    """Recount the ledgers and the engine's blocks. Raises `IntegrityError`."""


@dataclass(frozen=True)
class Drain:
    """Take no more requests; answers at once."""


Question = (
    Locate
    | Receive
    | GiveUp
    | HandOver
    | FreeBlocks
    | TakeBack
    | Look
    | Apply
    | PrepareActions
    | CommitActions
    | RollbackActions
    | Check
    | Drain
    | WeightsOf
    | WeightDigests
    | PeerQuestion
    | StageQuestion
)

ToRank = Submit | Cancel | Ask | Bye
