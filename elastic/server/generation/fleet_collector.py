"""A fleet as Prometheus sees it: its ranks, its instances, and the memory of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric

from elastic.server.fleets.views import RankViews
from elastic.server.generation.collector import ActionTotals, Families, Labels, memory, step_tokens

if TYPE_CHECKING:
    from elastic.cluster.control.messages import RuntimeView
    from elastic.cluster.control.status import RankStatus

_LOADS = {
    "running": "Sequences that have KV blocks.",
    "waiting": "Sequences that were not in a step yet.",
    "free_blocks": "KV blocks that could be given now, after what is promised.",
    "total_blocks": "KV blocks at the limit that is in force.",
}
_TOTALS = {
    "requests_routed": ("routed", "Requests that were given to an instance."),
    "requests_moved": ("moved", "Requests that were moved to another instance while they ran."),
    "requests_moved_bytes": ("moved_bytes", "KV that was copied for that."),
    "fleet_exchanged_bytes": ("exchanged_bytes", "KV that was copied as layers of instances changed their rank."),
    "ranks_lost": ("ranks_lost", "Ranks that ended, hung or were cut off."),
    "requests_resumed": ("requests_resumed", "Requests that went on elsewhere after their rank was lost."),
    "tokens_recomputed": ("recomputed_tokens", "Tokens whose KV was lost, and was computed again."),
    "fleet_prefix_hits": ("prefix_hits", "Requests that were sent where the beginning of their prompt was."),
}


_TIMES = {
    "busy_seconds": ("busy_s", "Seconds in which a rank computed."),
    "bubble_seconds": ("bubble_s", "Seconds in which a rank did not, while steps waited for other ranks."),
    "hidden_states_wait_seconds": ("waiting_s", "Seconds that steps waited for hidden states, added up over steps."),
}
_WIRES = {"sent": "sent_bytes", "received": "received_bytes", "read": "read_bytes", "copied": "copied_bytes"}
"""By kind."""
_WIRES_HELP = (
    "Hidden states sent to and received from another rank, the peer; what was read in its memory by a wire, or copied "
    "from its GPU to one here."
)


class FleetCollector:
    """A collector for a registry of `prometheus_client`. A rank that hangs delays a scrape by half a second at most."""

    def __init__(self, ranks: RankViews, name: str) -> None:
        self._ranks = ranks
        self._all = Families(name)
        self._of_instance = Families(name, ("instance",))
        self._of_rank = Families(name, ("instance", "rank"))
        self._actions = ActionTotals()

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        now = self._ranks.fleet.status()
        of = {instance.leader: instance.name for instance in now.instances}
        present: dict[Labels, RankStatus] = {
            (of.get(rank.name, ""), rank.name): rank for rank in now.ranks if rank.state != "ended"
        }
        up: dict[Labels, float] = {labels: rank.up for labels, rank in present.items()}
        yield self._of_rank.gauge("rank_up", "1 while a rank serves or drains.", up)
        states: dict[Labels, float] = {(*labels, rank.state): 1 for labels, rank in present.items()}
        yield self._of_rank.gauge("rank_state", "1 for the state that a rank is in.", states, "state")
        for word, help in _LOADS.items():
            loads: dict[Labels, float] = {(each.name,): getattr(each.load, word) for each in now.instances}
            yield self._of_instance.gauge(f"instance_{word}", help, loads)
        requests: dict[Labels, float] = {(each.name,): each.requests for each in now.instances}
        yield self._of_instance.gauge("instance_requests", "Requests that an instance has, and that live.", requests)
        stages: dict[Labels, float] = {
            (each.name,): len({frozenset(r.split("+")) for layer in each.path for r in layer.split("|")}) or 1
            for each in now.instances  # `r0+r1` share a layer, of `r0|r1` both have it
        }
        help = "Ranks that compute the layers of an instance; those that share a layer count as one."
        yield self._of_instance.gauge("instance_stages", help, stages)
        shards: dict[Labels, float] = {(each.name,): each.tp for each in now.instances}
        yield self._of_instance.gauge(
            "instance_shards", "Ranks that share a layer of an instance, at the most.", shards
        )
        dropped: dict[Labels, float] = {labels: len(rank.dropped) for labels, rank in present.items() if rank.up}
        yield self._of_rank.gauge("rank_dropped_layers", "Layers that a rank has not, as others compute them.", dropped)
        queued = "Requests that no instance has room for yet."
        yield self._all.gauge("fleet_queue_length", queued, {(): now.queued})
        for name, (field, help) in _TOTALS.items():
            yield self._all.counter(name, help, {(): getattr(now.totals, field)})
        yield from self._of_models(of)

    def _of_models(self, of: dict[str, str]) -> Iterator[Metric]:
        views = self._ranks.read()
        yield step_tokens(self._of_rank, {(of.get(rank, ""), rank): view.stats for rank, view in views.items()})
        yield from memory(self._of_rank, {(of.get(rank, ""), rank): view.status for rank, view in views.items()})
        for rank, view in views.items():
            self._actions.add((of.get(rank, ""), rank), view.events)
        yield from self._actions.collect(self._of_rank)
        yield from self._pipeline({(of.get(rank, ""), rank): view for rank, view in views.items()})

    def _pipeline(self, views: Mapping[Labels, RuntimeView]) -> Iterator[Metric]:
        """Yield what ranks did with their time, and what went between them."""
        timed = {labels: view.times for labels, view in views.items() if view.times is not None}
        for name, (field, help) in _TIMES.items():
            seconds = {labels: getattr(times, field) for labels, times in timed.items()}
            yield self._of_rank.counter(name, help, seconds)
        loads: dict[Labels, float] = {
            labels: max(view.times.load, view.utilization or 0.0)
            for labels, view in views.items()
            if view.times is not None
        }
        yield self._of_rank.gauge("rank_load", "The share of the last two minutes in which a rank was busy.", loads)
        wires = {(*labels, wire.rank): wire for labels, view in views.items() for wire in view.wires}
        nbytes = {(*of, kind): getattr(wire, field) for of, wire in wires.items() for kind, field in _WIRES.items()}
        yield self._of_rank.counter("wire_bytes", _WIRES_HELP, nbytes, "peer", "kind")
