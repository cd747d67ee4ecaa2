"""What could be done against an overload, priced before there is one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from elastic.cluster.fleet.dispatcher import Dispatcher
from elastic.cluster.fleet.groups.price import learned_cost
from elastic.cluster.fleet.groups.verbs import GroupVerbs
from elastic.cluster.fleet.overload.offers import FORM, MOVED, START_S, add_offer, move_offer, planned_offer
from elastic.cluster.fleet.overload.readings import FleetReadings
from elastic.cluster.fleet.overload.swaps import Swaps
from elastic.cluster.fleet.rank_verbs import RankVerbs
from elastic.cluster.fleet.records.event_log import EventLog
from elastic.config import Overload, parse_bytes
from elastic.controller.fleet_snapshot import FleetSnapshot
from elastic.controller.remedies import Offer
from elastic.errors import CapacityError, ConfigError, StateError


class PricedVerbs(GroupVerbs, RankVerbs):
    """The verbs of a fleet, and the prices of what its policy of drops chooses among."""

    _dispatcher: Dispatcher
    _log: EventLog
    _overload = Overload()  # the settings of the policy of drops
    start_s = START_S
    """How long an instance takes to come, as those did that the policy of drops had come."""

    def plan(self, need: int | str) -> tuple[Offer, ...]:
        """Price what could give `need` bytes of KV (or such as "24MiB") to requests of the instance with least free.

        That requests move, layers are dropped, shared by two ranks or four, or swapped where ranks have variants, or
        one more instance comes: each with its seconds of serving and the bytes that it frees, as the fleet's policy of
        drops compares them, or one with its defaults would; nothing is done. Where layers were dropped, that they
        return is priced, too: it takes bytes. What is not possible now is left out. What one action would come to, say
        `drop`, `restore`, `migrate`, `replicate` and `reshard` with `dry_run`. Raises `StateError` while no rank
        serves.
        """
        self._begin()
        needed, settings = parse_bytes(need, option="need"), self._overload
        form = {name: getattr(settings, name) for name in FORM}
        self._groups.registry.settle(None)
        now = FleetReadings(self._dispatcher).read(self.groups(), self.layer_bytes())
        if now is None:
            raise StateError("no rank serves now; try again when one does")
        least = min(now.groups, key=lambda group: (len(group.members), group.free_bytes))
        waits = replace(least, waiting_bytes=least.free_bytes + needed)  # the fullest one, for more than is free
        short = replace(now, groups=tuple(waits if group is least else group for group in now.groups))
        offers: list[Offer | None] = [move_offer(short, settings.kv_high, learned_cost(self._log.events(), MOVED))]
        with suppress(CapacityError, ConfigError):  # no drop frees so much, or ranks cannot reach each other
            how = {"whole": not settings.partial, "most": settings.most_stages, **form}
            offers.append(planned_offer("drop", self.drop(needed, dry_run=True, **how)))
        offers.append(_share_offer(self, short, needed, form))
        if (swap := Swaps(self, settings).plan(short)) is not None:
            offers.append(swap.offer)
        offers.append(add_offer(short, self.start_s))
        possible = [offer for offer in offers if offer is not None and offer.relieved_bytes > 0]
        back = self.restore(dry_run=True, **form)
        assert back.price is not None
        if back.fetched_bytes:
            possible.append(Offer("restore", back.price.seconds, back.price.relieved_bytes))
        return tuple(possible)


def _share_offer(fleet: GroupVerbs, snapshot: FleetSnapshot, needed: int, form: Mapping[str, Any]) -> Offer | None:
    """Return the offer that the fullest instance shares its layers with the emptiest ones: of two if that suffices."""
    alone = [group for group in snapshot.groups if len(group.members) == 1]
    ranks = [group.names[0] for group in sorted(alone, key=lambda group: (-group.waiting_bytes, -group.free_bytes))]
    offer = None
    with suppress(CapacityError, ConfigError):  # layers are not cut so, or ranks cannot reach each other
        for tp in (count for count in (2, 4) if count <= len(ranks)):
            more = planned_offer("reshard", fleet.reshard(ranks[:tp], tp=tp, dry_run=True, **form))
            offer = more or offer
            if more is None or more.relieved_bytes >= needed:
                break
    return offer
