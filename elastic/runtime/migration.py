"""Migration, as the user of a runtime sees it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Literal, overload

from elastic.actions.results import together
from elastic.runtime.acting import Acting, Layers
from elastic.types import Action, Change, Migrate, MigrateKV


class Migrating(Acting):
    """The part of a runtime that has weights and KV caches at other places."""

    @overload
    def migrate(self, target: Layers, place: str, *, kv: bool = True, wait: Literal[True] = True) -> Change: ...

    @overload
    def migrate(
        self, target: Layers, place: str, *, kv: bool = True, wait: Literal[False]
    ) -> Future[tuple[Change, ...]]: ...

    def migrate(
        self, target: Layers, place: str, *, kv: bool = True, wait: bool = True
    ) -> Change | Future[tuple[Change, ...]]:
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
        found = self._weights.find_parts(target)
        actions: list[Action] = [Migrate(indices, place, parts) for parts, indices in found.items()]
        if kv and () in found:
            actions.append(MigrateKV(found[()], place))
        done = self.apply(actions, wait=wait)
        return done if isinstance(done, Future) else together(done)

    @overload
    def migrate_kv(self, layers: Layers, place: str, *, wait: Literal[True] = True) -> Change: ...

    @overload
    def migrate_kv(self, layers: Layers, place: str, *, wait: Literal[False]) -> Future[tuple[Change, ...]]: ...

    def migrate_kv(self, layers: Layers, place: str, *, wait: bool = True) -> Change | Future[tuple[Change, ...]]:
        """Have the KV cache of decoder layers at another place, that of running generations too; weights stay.

        On another device, attention goes there or fetches what it needs, whichever moves fewer bytes. Errors are those
        of `migrate`. With `wait=False`, a future. (CoCoServe, section 3.3)
        """
        done = self.apply((MigrateKV(self._weights.layer_indices(layers), place),), wait=wait)
        return done if isinstance(done, Future) else done[0]
