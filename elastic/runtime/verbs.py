"""The verbs of a runtime: a method for each action on layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, overload

from elastic.actions.arguments import listed
from elastic.actions.results import merge_changes
from elastic.actions.transactions.executor import ActionExecutor
from elastic.errors import require_flag
from elastic.planning.sharding.shard_pages import ShardPages
from elastic.types import (
    Action,
    Change,
    Drop,
    Evict,
    Fetch,
    Migrate,
    MigrateKV,
    Release,
    Replicate,
    Restore,
    Swap,
    WeightsSource,
)
from elastic.weights.model import ModelWeights

Layers = int | str | Iterable[int | str]
"""Decoder layers by index or module name."""
Sources = WeightsSource | Sequence[WeightsSource]
Done = Change | Future[tuple[Change, ...]]


class LayerVerbs(ABC):
    """What is known of the layers of a model, and can be done to them: verbs make actions, which `apply` has done."""

    def __init__(self, weights: ModelWeights, executor: ActionExecutor) -> None:
        self.weights = weights
        """Of the decoder layers: what computes parts of these asks it, too."""
        self.at_home = weights.initially_resident
        """The decoder layers that `wrap` left at their place: what `restore()` restores."""
        self.shards = weights.shards
        """The number of shards of each decoder layer. Part p of layer l is shard `l * shards + p`."""
        self._executor = executor

    @abstractmethod
    def apply(self, actions: Action | Sequence[Action], *, why: str = "by hand", wait: bool = True) -> Any:
        """Do actions, all or none."""

    def _change(self, actions: Sequence[Action], wait: bool) -> Done:
        results = self.apply(actions, wait=wait)
        return results if isinstance(results, Future) else merge_changes(results)

    # -- what there is

    @property
    def replicated(self) -> tuple[int, ...]:
        """The decoder layers that have replicas now."""
        return tuple(sorted(self.weights.replicas))

    def form(self) -> tuple[str, ...]:
        """Return the variant that each decoder layer is in; `absent` for a released one, `dropped` for one of these."""
        return self.weights.form()

    @property
    def dropped(self) -> tuple[int, ...]:
        """The decoder layers whose weights, or some shards of them, are nowhere in this process."""
        return self.weights.dropped

    @property
    def layer_pages(self) -> tuple[int, ...]:
        """Pages of its place that the full weights of each decoder layer have, or had."""
        return tuple(layer.pages for layer in self.weights.layers)

    @property
    def shards_here(self) -> tuple[frozenset[int], ...]:
        """The parts of each decoder layer, from 0, that are at its place."""
        return tuple(layer.shards_here for layer in self.weights.layers)

    @property
    def dropped_shards(self) -> tuple[int, ...]:
        """The shards whose weights are nowhere in this process."""
        return self.weights.dropped_shards

    @property
    def shard_pages(self) -> tuple[ShardPages, ...]:
        """Pages of its place that the full weights of each decoder layer need, by the parts that are here."""
        return tuple(layer.shard_pages for layer in self.weights.layers)

    # -- what can be done

    @overload
    def release(self, layers: Layers, *, wait: Literal[True] = True) -> Change: ...
    @overload
    def release(self, layers: Layers, *, wait: Literal[False]) -> Future[tuple[Change, ...]]: ...

    def release(self, layers: Layers, *, wait: bool = True) -> Done:
        """Have the weights of decoder layers leave their place, for host memory; their pages are KV capacity then.

        `layers` are indices or module names, one or several. A released layer that is called is streamed back for the
        time of the call, so the model goes on working, slower. Raises `ConfigError` for what is no layer, and
        `CapacityError` if host memory is short or there is no room for a prefetch buffer. With `wait=False`, a future.
        """
        return self._change((Release(self.weights.layer_indices(layers)),), wait)

    @overload
    def drop(self, layers: Layers = (), *, shards: Sequence[int] = (), wait: Literal[True] = True) -> Change: ...
    @overload
    def drop(
        self, layers: Layers = (), *, shards: Sequence[int] = (), wait: Literal[False]
    ) -> Future[tuple[Change, ...]]: ...

    def drop(self, layers: Layers = (), *, shards: Sequence[int] = (), wait: bool = True) -> Done:
        """Have the weights of decoder layers leave this process, without a copy; their pages are KV capacity then.

        `layers` are indices or module names, one or several; of `shards`, by number, only these are dropped, while the
        others stay where they are (AMOEBA, 3.2). A dropped layer cannot be called until it is back, by `fetch` from a
        process that has the same weights, or by `restore` from the checkpoint. Nothing is copied or hashed, so all
        layers take milliseconds; but a layer whose digest was never asked for (`rt.digests`) is read once before.
        Raises `ConfigError` for what is no layer, and for one with shared parameters or adapters; `StateError` for one
        that was written since the model was wrapped, has replicas or modules elsewhere, or is not at its place in full.
        With `wait=False`, a future. (KunServe, section 4.1)
        """
        indices, shards = self.weights.layer_indices(layers), listed(shards, "shards")
        measured = indices or tuple(self.weights.parts_by_layer(shards))
        self._executor.call(partial(self.weights.digests, measured))
        return self._change((Drop(indices, shards),), wait)

    @overload
    def fetch(
        self, layers: Layers, source: Sources, *, shards: Sequence[int] = (), wait: Literal[True] = True
    ) -> Change: ...
    @overload
    def fetch(
        self, layers: Layers, source: Sources, *, shards: Sequence[int] = (), wait: Literal[False]
    ) -> Future[tuple[Change, ...]]: ...

    def fetch(self, layers: Layers, source: Sources, *, shards: Sequence[int] = (), wait: bool = True) -> Done:
        """Have dropped decoder layers at their place again, bit for bit, from the memory of another process.

        `source` is the other's `rt.weights_source(layers)`, or those of several: the shards of a layer come from all
        that have some at once. With `shards`, by number, and no layers, these alone return beside those that are here.
        What cannot be read any more in one memory is read in another that has it, or else from the checkpoint. Pages
        come from the KV cache as by `restore`, and layers that find none are `deferred`. Raises `ConfigError` for what
        is no layer, and for sources without them or of another model; `StateError` where the weights cannot be had, or
        are not those that were dropped; `CapacityError` as `restore`. With `wait=False`, a future. (KunServe, section
        4.4)
        """
        sources = (source,) if isinstance(source, WeightsSource) else listed(source, "sources")
        fetch = Fetch(self.weights.layer_indices(layers), sources, shards=listed(shards, "shards"))
        return self._change((fetch,), wait)

    @overload
    def restore(
        self, layers: Layers | None = None, *, shards: Sequence[int] = (), wait: Literal[True] = True
    ) -> Change: ...
    @overload
    def restore(
        self, layers: Layers | None = None, *, shards: Sequence[int] = (), wait: Literal[False]
    ) -> Future[tuple[Change, ...]]: ...

    def restore(self, layers: Layers | None = None, *, shards: Sequence[int] = (), wait: bool = True) -> Done:
        """Have the full weights of decoder layers at their place again, bit for bit. None: all that `wrap` left there.

        `layers` are indices or module names; also of modules inside a layer, where parts of it were swapped; or
        `shards` of dropped layers alone, by number.
        The KV cache gives up free pages, idle caches, and caches at rest (to the host), never what a running one holds:
        then the answer is `deferred`, new caches do not get these pages, and the layers return as pages come free.
        Dropped layers are read from host memory or the checkpoint. Raises `ConfigError` for what is no layer,
        `CapacityError` for more layers than the place has room for, and `StateError` for a dropped layer that neither
        has, or has otherwise.
        """
        if shards := listed(shards, "shards"):
            named = () if layers is None else self.weights.layer_indices(layers)
            return self._change((Restore(named, shards=shards),), wait)
        by_parts = self.weights.find_parts(self.at_home if layers is None else layers)
        return self._change([Restore(indices, parts) for parts, indices in by_parts.items()], wait)

    @overload
    def swap(self, layers: Layers, variant: str, *, wait: Literal[True] = True) -> Change: ...
    @overload
    def swap(self, layers: Layers, variant: str, *, wait: Literal[False]) -> Future[tuple[Change, ...]]: ...

    def swap(self, layers: Layers, variant: str, *, wait: bool = True) -> Done:
        """Have decoder layers at their place in a variant that `wrap` was asked for, such as `"int4"`.

        `layers` are indices or module names, also of modules inside a layer (`"model.layers.3.mlp"`). It goes from any
        variant to any other, and from host memory; the KV cache and all generations go on, and what the layers no
        longer need is KV capacity. Where pages are short, layers go one after another through a reserve; those that
        find none are `deferred`, as by `restore`. The full weights stay in host memory. Raises `ConfigError` for what
        is no layer or no variant. With `wait=False`, a future. (MorphServe, section 3.3.)
        """
        by_parts = self.weights.find_parts(layers)
        return self._change([Swap(indices, variant, parts) for parts, indices in by_parts.items()], wait)

    @overload
    def migrate(self, target: Layers, place: str, *, kv: bool = True, wait: Literal[True] = True) -> Change: ...
    @overload
    def migrate(
        self, target: Layers, place: str, *, kv: bool = True, wait: Literal[False]
    ) -> Future[tuple[Change, ...]]: ...

    def migrate(self, target: Layers, place: str, *, kv: bool = True, wait: bool = True) -> Done:
        """Have decoder layers, or modules of them, at another place that `wrap` opened.

        `target` are indices or module names, down to a projection (`"model.layers.5.self_attn.q_proj"`). They move in
        the variant that they are in while the model goes on generating; the pages that they leave are KV capacity. A
        module that comes to its layer's own place is part of the layer again. On another device, what they are given
        travels to them, and results back when they are needed; a layer of which only norms and biases would stay goes
        as a whole. The KV cache of whole layers goes with them, unless `kv=False`; that of modules stays. Raises
        `ConfigError` for what is no layer or no place, and for a layer with shared parameters or adapters that is to go
        to another device; `CapacityError` where the place has no room; `StateError` for a layer whose swap is deferred,
        or whose cache a continuous batching engine uses. With `wait=False`, a future. (CoCoServe, section 3.3)
        """
        require_flag(kv, "kv")
        by_parts = self.weights.find_parts(target)
        actions: list[Action] = [Migrate(indices, place, parts) for parts, indices in by_parts.items()]
        if kv and () in by_parts:
            actions.append(MigrateKV(by_parts[()], place))
        return self._change(actions, wait)

    @overload
    def migrate_kv(self, layers: Layers, place: str, *, wait: Literal[True] = True) -> Change: ...
    @overload
    def migrate_kv(self, layers: Layers, place: str, *, wait: Literal[False]) -> Future[tuple[Change, ...]]: ...

    def migrate_kv(self, layers: Layers, place: str, *, wait: bool = True) -> Done:
        """Have the KV cache of decoder layers at another place, that of running generations too; weights stay.

        On another device, attention goes there or fetches what it needs, whichever moves fewer bytes. Errors are those
        of `migrate`. With `wait=False`, a future. (CoCoServe, section 3.3)
        """
        return self._change((MigrateKV(self.weights.layer_indices(layers), place),), wait)

    @overload
    def replicate(self, layers: Layers, place: str, *, wait: Literal[True] = True) -> Change: ...
    @overload
    def replicate(self, layers: Layers, place: str, *, wait: Literal[False]) -> Future[tuple[Change, ...]]: ...

    def replicate(self, layers: Layers, place: str, *, wait: bool = True) -> Done:
        """Have decoder layers at one more place, which computes a part of the rows of each batch from then on.

        Rows are scattered where consecutive layers with the same replicas begin and gathered where they end; each place
        gets as many as it has been fast, and keeps the KV cache of those. Running generations go on, their rows' KV
        moving with them. Under an engine requests are shared out instead, and their KV stays where it is. A layer with
        replicas is not swapped, released or migrated before they are evicted. Raises `ConfigError` for what is no layer
        or no place, `CapacityError` where the place has no room, `StateError` for a layer that is there itself, or is
        released. With `wait=False`, a future. (CoCoServe, section 3.2)
        """
        return self._change((Replicate(self.weights.layer_indices(layers), place),), wait)

    @overload
    def evict(self, layers: Layers, place: str, *, wait: Literal[True] = True) -> Change: ...
    @overload
    def evict(self, layers: Layers, place: str, *, wait: Literal[False]) -> Future[tuple[Change, ...]]: ...

    def evict(self, layers: Layers, place: str, *, wait: bool = True) -> Done:
        """Undo `replicate`: the replicas of decoder layers leave a place, and their pages are KV capacity there.

        KV rows that were there return with the next token of their generation; where they find no room they stay, and
        the generation goes on, slower. Raises `ConfigError` for what is no layer or no place, `StateError` for a layer
        without a replica there. With `wait=False`, a future.
        """
        return self._change((Evict(self.weights.layer_indices(layers), place),), wait)
