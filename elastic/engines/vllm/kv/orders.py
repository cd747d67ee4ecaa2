"""What the scheduler's side and the workers' side of the connector tell each other, once a step each way.

The scheduler's side alone decides, so all ranks do the same before the same step. An order says how many sectors are to
be mapped, not how many more: one that is carried out twice does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from elastic.engines.vllm.agreement import ActionOrders, RankReport
from elastic.engines.vllm.kv.prefixes import Weights
from elastic.errors import ConfigError, require
from elastic.types import SharedFile

REGISTERING = ("nixl", "mooncake", "moriio", "p2pnccl")
"""Parts of the names of connectors that register all KV memory with a network card, or send it by device address."""

Occurrence = Literal["arrived", "scheduled", "completed", "cancelled", "preempted"]


class RequestEvent(NamedTuple):
    """Something that happened to a request, for the counters of the rank with the controller."""

    what: Occurrence
    request: str
    tokens: int
    """Of the prompt, when it arrived."""
    at_s: float
    """Seconds of `time.perf_counter`, which all processes of a machine share."""


class StepTokens(NamedTuple):
    """The tokens that were generated in one step."""

    tokens: Mapping[str, int]
    """By request."""
    at_s: float
    """Seconds of `time.perf_counter`, which all processes of a machine share."""


class StepOrders(NamedTuple):
    """What every rank does before a step."""

    sequence: int = 0
    """Rises with each change of `sectors`."""
    sectors: int = 0
    """Those with lower numbers are to be mapped, the others not."""
    used_blocks: int = 0
    """That requests have, or were promised."""
    capacity_blocks: int = 0
    """That requests may have, the null block left out."""
    actions: ActionOrders = ActionOrders()
    requests: tuple[RequestEvent | StepTokens, ...] = ()
    """What happened since the last orders, in its order."""
    wakes: int = 0
    """How often ranks had asked to be looked at."""


class RankState(NamedTuple):
    """What one rank has and wants. Sectors."""

    sequence: int
    """Of the last order that was carried out."""
    mapped: int
    target: int
    """What its KV limit allows, as far as pages are ready."""
    most: int
    """What requests that live may have beyond the limit, which binds new ones only."""
    unsettled: bool = False
    """Whether it wants to be stepped though no request is there."""
    working: bool = False
    """Whether it wants to be stepped also while requests that have blocks are paused."""
    actions: RankReport | None = None
    weights: Weights = (0, b"")
    wakes: int = 0
    """Those of the last orders: what it tells is as new."""
    number: int = 0
    """Of the report, at this rank: a later one counts, in whatever order they come."""


@dataclass(frozen=True)
class StepReport:
    """The states of some ranks after a step."""

    ranks: Mapping[int, RankState]

    def aggregate(self, other: StepReport) -> StepReport:
        """Join the reports of two workers; vLLM does so over all of them."""
        return StepReport({**self.ranks, **other.ranks})


@dataclass(frozen=True)
class Handshake:
    """What a rank tells once, before the first step."""

    rank: int
    state: RankState
    blocks_per_sector: int
    guaranteed_sectors: int
    """That weights leave to the KV cache when all of them are there."""
    error: str = ""
    """Why pages could not be had for all sectors; empty: they could."""
    wakes: SharedFile | None = None
    """Grows by a byte each time that the rank asks to be looked at; `WorkerChannel.local` has that side by it."""


def find_orders(metadata: object) -> StepOrders | None:
    """Find our orders in the metadata of a step, also among those of several connectors; None if there are none."""
    if isinstance(metadata, StepOrders):
        return metadata
    inner = map(find_orders, getattr(metadata, "metadata", ()))
    return next((orders for orders in inner if orders is not None), None)


def refuse_connector(config: object) -> None:
    """Raise `ConfigError` for a user's KV connector that cannot work where KV pages come and go, or beside ours.

    `config` has the fields of vLLM's `KVTransferConfig`. NIXL, Mooncake and their like register all KV memory once.
    """
    fields = config if isinstance(config, Mapping) else {}
    name, extra = fields.get("kv_connector"), fields.get("kv_connector_extra_config")
    theirs = isinstance(name, str) and name != "ElasticConnector"
    require(theirs, "connector", config, "a mapping with a kv_connector of yours, as vLLM's kv_transfer_config has")
    if any(part in str(name).lower() for part in REGISTERING):
        raise ConfigError(
            f"the KV connector {name} registers all KV memory when the engine starts, and elastic maps and unmaps it "
            "while it runs; leave one of the two out (connectors that copy blocks, such as OffloadingConnector, work)"
        )
    inner = extra.get("connectors", ()) if isinstance(extra, Mapping) else ()
    require(isinstance(inner, list | tuple), "connectors", inner, "a list of KV connectors")
    for connector in inner:
        refuse_connector(connector)
