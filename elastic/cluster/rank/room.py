"""What the memory of a rank could hold, for a fleet that plans which layers it computes."""

from __future__ import annotations

from elastic.cluster.control.stage_questions import Room
from elastic.engines.continuous.engine import ContinuousEngine


def measure_room(engine: ContinuousEngine) -> Room:
    """Return the room of an engine's rank, as it is now."""
    room, runtime = engine.kv_room(), engine.runtime
    return Room(
        path=engine.path,
        pages=room.pages,
        page_bytes=room.page_bytes,
        sector_pages=room.sector_pages,
        most_sectors=room.sectors,
        committed_sectors=room.committed,
        weight_pages=runtime.shard_pages,
        resident=frozenset(range(engine.path.numbers)) - frozenset(runtime.dropped_shards),
        in_variant={
            layer.index: layer.held_pages
            for layer in runtime.weights.layers
            if not layer.absent and layer.precision is not layer.full
        },
    )
