"""Keys and values in pages: the pool of one place, its limit, stores for layers, blocks for engines.

Way in: `pool.KVPool` and its `StoreLease`, `budget.WeightsShare`, `paged.BlockMemory`, and `guest.GuestMemory` for
layers of another instance. The cache layers, the KV actions and engines import it; it imports `elastic.memory` and the
leaves.
"""
