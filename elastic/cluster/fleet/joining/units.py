"""Ranks that have a model together from the beginning: none of them serves before all of them are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from elastic import clock
from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.instance import Instance
from elastic.errors import ElasticError
from elastic.planning.sharding.share import Share


class Units:
    """Puts ranks together as they come, also in the place of lost ones. Thread-safe; one unit at a time is formed."""

    def __init__(self, dispatcher: Dispatcher, form: Callable[[Mapping[str, Share]], None]) -> None:
        """`form` has ranks compute with each other."""
        self._dispatcher, self._form = dispatcher, form
        self._forming = clock.current().lock()

    def joined(self, instance: Instance) -> None:
        """Have the ranks of an instance's unit serve, if it was the last one that lacked.

        Raises what its ranks raise, unless one of them has gone; those that wait are not given requests meanwhile.
        """
        with self._forming:
            members = self._members(instance)
            if not members:
                return
            try:
                self._form(members)
            except ElasticError:
                with self._dispatcher.lock:
                    ranks = [self._dispatcher.instances.get(name) for name in members]
                if all(rank is not None and not rank.client.lost for rank in ranks):
                    raise
                return  # another one comes in the place of who has gone
            with self._dispatcher.lock:
                for each in self._dispatcher.present(members).values():
                    each.state = "serving"
                self._dispatcher.dispatch()
                self._dispatcher.changed.notify_all()

    def _members(self, instance: Instance) -> dict[str, Share]:
        """Return who has what of an instance's unit; empty: some lack, or it serves already."""
        share, unit = instance.spec.share, instance.spec.unit
        if share is None:
            return {}
        with self._dispatcher.lock:
            there = [i for i in self._dispatcher.instances.values() if i.spec.unit == unit and not i.client.lost]
            alive = [i for i in there if i.state in ("starting", "serving")]
            members = {i.spec.share: i for i in alive if i.spec.share is not None}
        waits = any(each.state == "starting" for each in members.values())
        complete = waits and len(members) == share.ranks
        return {each.name: of for of, each in members.items()} if complete else {}


def end_unit(dispatcher: Dispatcher, instance: Instance) -> None:
    """Have the others of an instance's unit be replaced by ranks with all of the model, as it goes. Under the lock."""
    for each in dispatcher.instances.values():
        if instance.spec.share is not None and each is not instance and each.spec.unit == instance.spec.unit:
            each.spec = replace(each.spec, share=None)
