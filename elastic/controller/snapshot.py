"""One moment of an instance as a policy sees it, in frozen records. Seconds in `*_s`; None: not known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic.planning.cost_model import CostModel
from elastic.planning.placement import ResourceDemand
from elastic.types import Action, Event, Evict


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of the observations of a sliding window; all None while there are none."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    ema: float | None = None
    """Moving average of all observations, each new one with a weight of a quarter."""


@dataclass(frozen=True)
class RequestStats:
    """The experience of requests at one moment."""

    waiting: int = 0
    """Requests that arrived and were not scheduled yet."""
    running: int = 0
    queue_delay_s: float = 0.0
    """Time that the oldest waiting request has waited; 0.0 when none waits."""
    arrived: int = 0
    """Totals since the start: requests offered."""
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    rejected: int = 0
    preemptions: int = 0
    """Times that a running request lost its cache."""
    stalls: int = 0
    """Times that a running request was left out of a step because no KV block was to be had."""
    prompt_tokens: int = 0
    """Of requests that were taken."""
    generated_tokens: int = 0
    tokens_per_s: float = 0.0
    """Generated, over the window."""
    arrivals_per_s: float = 0.0
    queued_s: Quantiles = Quantiles()
    """Arrival to first scheduling, of requests scheduled within the window."""
    ttft_s: Quantiles = Quantiles()
    tpot_s: Quantiles = Quantiles()
    itl_s: Quantiles = Quantiles()
    moved: int = 0
    """Requests that another engine has adopted, or may."""
    step_tokens: int = 0
    """Tokens of all steps of the engine, of prompts and of answers."""
    steps_by_tokens: tuple[int, ...] = ()
    """How many steps had one token, 2, 3 to 4, 5 to 8 and so on."""

    @property
    def kv_waits(self) -> int:
        """Times that requests had found no KV block, since the start."""
        return self.stalls + self.preemptions


@dataclass(frozen=True)
class MemoryStats:
    """The KV cache of all layers together, as far as the first of several places to be full allows."""

    used_bytes: int
    """Bytes of the capacity, in the share that is used of the fullest place."""
    capacity_bytes: int
    """Bytes that new and running caches may hold now; grows with swapped layers."""
    maximum_bytes: int
    limit_bytes: int | None = None
    """Set by hand, below the maximum: the capacity does not grow with swapped layers."""
    created_bytes: int | None = None
    """Bytes of the capacity that exist in physical memory already; the rest is created when it is needed."""

    @property
    def use(self) -> float:
        """Used share of the capacity, from 0 to 1."""
        return self.used_bytes / self.capacity_bytes if self.capacity_bytes else 1.0


@dataclass(frozen=True)
class DeviceStats:
    """One GPU as NVML sees it; None for what it does not report."""

    place: str
    utilization: float | None = None
    """Share of time with a kernel running, from 0 to 1."""
    used_bytes: int | None = None
    """Bytes used by all processes."""
    total_bytes: int | None = None
    own_bytes: int | None = None
    """Bytes used by this process."""
    pcie_tx_bytes_per_s: float | None = None
    pcie_rx_bytes_per_s: float | None = None


@dataclass(frozen=True)
class HostStats:
    """Host memory."""

    available_bytes: int | None = None
    total_bytes: int | None = None


@dataclass(frozen=True)
class PlaceReading:
    """One place of the instance."""

    name: str
    total_bytes: int
    free_bytes: int
    """Bytes that nobody owns."""
    kv_used_bytes: int = 0
    kv_capacity_bytes: int = 0
    kv_maximum_bytes: int = 0
    idle: float | None = None
    """Share of its compute that nobody uses, from 0 to 1."""
    kv_limit_bytes: int | None = None
    """The limit of the KV capacity, where that is below the maximum."""


@dataclass(frozen=True)
class Snapshot:
    """One moment of one instance."""

    at_s: float
    """Seconds of `time.monotonic`."""
    traffic: RequestStats
    kv: MemoryStats
    layers: tuple[str, ...]
    """Variant of each decoder layer, such as "float32" or "int4"; "absent" for a released one, "dropped"."""
    busy: bool = False
    """True while actions that were asked for are under way or deferred."""
    devices: tuple[DeviceStats, ...] = ()
    host: HostStats = HostStats()
    residencies: tuple[tuple[str, ...], ...] = ()
    """Places that have each decoder layer, its own first; () where there is one place only."""
    places: tuple[PlaceReading, ...] = ()
    events: tuple[Event, ...] = ()
    """The last actions, oldest first."""
    apart: tuple[int, ...] = ()
    """Decoder layers of which modules are at other places: they are neither replicated nor released."""
    name: str = ""
    """The instance's own name in its group."""
    others: tuple[PeerState, ...] = ()
    """The other models of its group, as of their last ticks."""


@dataclass(frozen=True)
class EvictionRequest:
    """A model's request to another one of its group: replicas are to leave before it does anything else."""

    model: str
    action: Evict


@dataclass(frozen=True)
class PeerState:
    """One model of a group, as of its last tick."""

    name: str
    snapshot: Snapshot
    needs: tuple[ResourceDemand, ...]
    """Needs of its decoder layers, in bytes."""
    model: Callable[[int], CostModel]
    """Its cost model, for a number of rows."""
    rows: float = 0.0
    """Moving average of its running requests."""
    pending: tuple[Action, ...] = ()
    """Actions that it has asked its runtime for, and that are not known to be done."""
    short: bool = False
    """True when it sees a shortage."""
    asks: tuple[EvictionRequest, ...] = ()
