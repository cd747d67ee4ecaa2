"""The words that every part of Elastic shares: frozen records, no behaviour. Sizes are bytes, times as named."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

ResizeStatus = Literal["applied", "deferred", "stale"]
HOST = "host"
"""Where a released layer exists."""
DROPPED = "dropped"
"""In place of a place, for a layer whose weights are nowhere in this process."""


@dataclass(frozen=True)
class ResizeKV:
    """Action: set the most bytes that new KV caches of one instance may hold on `place`."""

    place: str
    limit_bytes: int | None
    """None: the maximum, whatever it is when the action is done; the limit follows it from then on."""
    revision: int | None = None
    """A resize with a revision not above the last one applied is refused as stale. None: the next one."""


@dataclass(frozen=True)
class Release:
    """Action: the weights of these decoder layers (indices) leave their place; host memory has them.

    A released layer that is called is streamed back for the time of the call.
    """

    layers: tuple[int, ...]


@dataclass(frozen=True)
class Drop:
    """Action: the weights of these decoder layers (indices) leave this process, which keeps no copy: others have them.

    A dropped layer cannot be called until it is back; a pipeline passes over it. (KunServe, section 4.1)
    """

    layers: tuple[int, ...] = ()
    shards: tuple[int, ...] = ()
    """Only these shards, of any layers: part p of layer l is `l * shards + p`. The layers are theirs, said or not."""
    after_restore: bool = False
    """A dry run takes layers in a variant for restored; the drop itself is refused while they are not."""


@dataclass(frozen=True)
class SharedFile:
    """A memory file that other processes of the same host and user can open: by /proc, while one holds it."""

    host: str
    """Names the host and its process namespace."""
    pid: int
    descriptor: int
    inode: int
    """So that another file that got the number is noticed."""
    nbytes: int = 0
    """As long as it was when this was written; it may have grown."""


@dataclass(frozen=True)
class RankMemory:
    """The memory of one place of a rank, which serves it to the ranks that have met it, on whatever host."""

    rank: str
    place: str


@dataclass(frozen=True)
class LayerPages:
    """Where the full weights of one decoder layer lie in the memory of a place."""

    layer: int
    pages: tuple[int, ...] = field(repr=False)
    """Of the place, in order: the first begins with the first parameter."""
    nbytes: int
    """Of all its parameters, padding included: the last page may not be full."""
    layout: str
    """A checksum of names, shapes, dtypes and offsets of its parameters: layers with equal ones lie alike."""
    digest: int
    """A checksum of the weights, of all shards."""
    shards: tuple[int, ...] = (0,)
    """The parts of the layer, from 0, that are there."""


@dataclass(frozen=True)
class WeightsSource:
    """Full weights of decoder layers as another process reads them, for as long as they stay there."""

    file: SharedFile | None
    """Where processes of the host read them; None: nowhere."""
    page_bytes: int
    layers: tuple[LayerPages, ...]
    memory: RankMemory | None = None
    """Where other ranks read them; None: nowhere."""


@dataclass(frozen=True)
class Fetch:
    """Action: the full weights of these decoder layers (indices) return to their place, bit for bit, as by `Restore`.

    Dropped ones are read from the memory of other processes, the parts of a layer from several at once; from the
    checkpoint, if these have gone. (AMOEBA, section 3.2)
    """

    layers: tuple[int, ...]
    sources: tuple[WeightsSource, ...] = field(repr=False)
    """Each has some of the layers, or of their parts."""
    coordinated: bool = True
    """Whether what computes beside it goes first, in a rank that computes layers with others."""
    shards: tuple[int, ...] = ()
    """As for `Drop`."""


@dataclass(frozen=True)
class Swap:
    """Action: these decoder layers (indices) are at their place in another variant, such as `int4`.

    With `parts`, only the parameters under these names inside the layer, such as `mlp` or `self_attn.q_proj`.
    """

    layers: tuple[int, ...]
    variant: str
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Restore:
    """Action: the full weights of these decoder layers (indices) return to their place, bit for bit."""

    layers: tuple[int, ...] = ()
    parts: tuple[str, ...] = ()
    """As for `Swap`."""
    shards: tuple[int, ...] = ()
    """As for `Drop`: of dropped layers."""


@dataclass(frozen=True)
class Migrate:
    """Action: these decoder layers (indices) are at another place from then on, in the variants that they are in.

    With `parts`, only the parameters under these names inside the layer, such as `mlp` or `self_attn.q_proj`. Their KV
    cache stays where it is. (CoCoServe, section 3.3)
    """

    layers: tuple[int, ...]
    place: str
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class MigrateKV:
    """Action: the KV cache of these decoder layers (indices) is at another place from then on."""

    layers: tuple[int, ...]
    place: str


@dataclass(frozen=True)
class Replicate:
    """Action: these decoder layers (indices) are at one more place, which computes a part of each batch.

    The KV rows that a replica computes live with it. (CoCoServe, section 3.2)
    """

    layers: tuple[int, ...]
    place: str


@dataclass(frozen=True)
class Evict:
    """Action: the replicas of these decoder layers (indices) leave a place; their KV rows go back home."""

    layers: tuple[int, ...]
    place: str


Action = ResizeKV | Release | Drop | Fetch | Swap | Restore | Migrate | MigrateKV | Replicate | Evict


KINDS: dict[type, str] = {
    Swap: "swap",
    Restore: "restore",
    Release: "release",
    Drop: "drop",
    Fetch: "fetch",
    ResizeKV: "resize_kv",
    Migrate: "migrate",
    MigrateKV: "migrate_kv",
    Replicate: "replicate",
    Evict: "evict",
}
"""What they are called in text: logs, results, HTTP."""


@dataclass(frozen=True)
class Resize:
    """What a KV resize came to."""

    status: ResizeStatus
    limit_bytes: int
    """The limit in force now."""
    used_bytes: int
    """Bytes mapped for caches that are alive."""
    overage_bytes: int
    """Bytes by which live caches still exceed the limit; 0 once applied."""
    released_bytes: int
    """Physical memory given back by this call."""
    revision: int
    moved_bytes: int = 0
    """Bytes of caches at rest that were copied to host memory."""


@dataclass(frozen=True)
class Change:
    """What an action on layers came to."""

    status: Literal["applied", "deferred"]
    """`deferred`: some layers wait for pages, and return when there are enough."""
    layers: tuple[int, ...]
    """The layers that changed."""
    deferred: tuple[int, ...] = ()
    """The layers that wait."""
    moved_bytes: int = 0
    """Bytes copied."""
    released_bytes: int = 0
    """What the KV cache may count on more than before; below zero where weights took pages."""
    retained_bytes: int = 0
    """Pages that tensors outside still show; they become free when those die."""


Result = Resize | Change


@dataclass(frozen=True)
class PlanStep:
    """What one action would do, from a dry run."""

    action: Action
    status: ResizeStatus
    moved_bytes: int
    released_pages: int
    """A resize: given back to the system. Else: to the KV cache, below zero where weights take them."""
    transient_pages: int
    """Pages needed while it runs and given back after."""
    pause_ms: float
    """Estimated exclusive time at the safe point: that of the last action of this kind, 0.0 before the first."""


@dataclass(frozen=True)
class Prepared:
    """Actions that are prepared and wait to be committed."""

    id: str
    steps: tuple[PlanStep, ...]
    """What the commit will do."""
    moved_bytes: int
    """Bytes that were copied for it."""
    pages: int
    """Pages that are held for it."""
    expires_s: float
    """When it is rolled back if it was not committed, in seconds since the epoch."""


@dataclass(frozen=True)
class Event:
    """One action, as it happened."""

    id: int
    action: Action
    when_s: float
    """Seconds since the epoch."""
    why: str
    moved_bytes: int
    """Bytes copied: for a resize, caches at rest that went to host memory; else weights."""
    released_bytes: int
    prepare_ms: float
    wait_ms: float
    """From asking for the safe point until the forward passes in flight had ended; new ones waited too."""
    pause_ms: float
    """Exclusive time at the safe point: no forward pass could run. Letting go of decode graphs is a part of it."""
    ok: bool
    outcome: str
    """The status of the result, or the error's text."""


@dataclass(frozen=True)
class PlaceStatus:
    """The ledger of one place: `free_bytes` plus the owners sum to `budget_bytes`."""

    name: str
    page_bytes: int
    budget_bytes: int
    owners: dict[str, int] = field(hash=False)
    """Owner -> bytes: `kv`, `staging`, `retained`, `layer:i`, `fixed:name`. `staging` is kept back to swap layers (one
    packed layer, if there are variants) and to stream released ones (one layer; under a policy only once one is
    released: docs/controller.md)."""
    free_bytes: int
    """Bytes that nobody owns, and that are not kept back: `idle_bytes` still mapped where a released layer was, taken
    as soon as they are needed, `parked_bytes` created and kept for reuse, the rest not created."""
    idle_bytes: int
    parked_bytes: int
    mappings: int
    """Contiguous mappings now in force (Linux allows a process about 65,530)."""


@dataclass(frozen=True)
class KVStatus:
    """The KV cache of one instance on one place.

    `limit` is what was asked for; `capacity` what a scheduler may count on now: never more than the limit, nor than
    the pages that are mapped or free. `used` is mapped for caches that are alive, `idle` mapped and kept for the next
    cache, `retained` mapped because a tensor outside still shows it.
    """

    place: str
    capacity_bytes: int
    limit_bytes: int
    maximum_bytes: int
    used_bytes: int
    idle_bytes: int
    retained_bytes: int
    revision: int
    share: float = 1.0
    """Of the decoder layers, how many have their cache here; 0: none."""


@dataclass(frozen=True)
class HostStatus:
    """The host store of this process: weights of all wrapped models, each counted once."""

    memory_bytes: int
    """In host memory of our own."""
    locked_bytes: int
    """Of these, page-locked."""
    file_bytes: int
    """In checkpoint files, mapped: in memory as far as the system caches them."""
    staging_bytes: int
    """Page-locked, for what passes through on its way from checkpoint files to GPUs: 32 MiB for each model and place
    that had to stream such layers."""


@dataclass(frozen=True)
class Residency:
    """Where and how a module exists."""

    place: str
    """The name of a place, or `host`, or `dropped`: it is nowhere in this process."""
    variant: str
    """Full precision by the name of its dtype, such as `float16`; else the variant's name. Several, as `float16+int8`,
    where only parts of a layer were swapped."""
    shard: str = "whole"
    """Of a layer of which some shards were dropped: those that are there, such as `0,1/4`."""
    part: str = ""
    """Of a layer whose modules are at several places: the name inside it. Empty: the layer, or the rest of it."""


@dataclass(frozen=True)
class Status:
    """A snapshot of a runtime."""

    layers: int
    places: tuple[PlaceStatus, ...]
    kv: tuple[KVStatus, ...]
    residencies: dict[str, tuple[Residency, ...]] = field(hash=False)
    """Decoder layer (module name) -> where it exists, its own place first."""
    host: HostStatus
    events: int
