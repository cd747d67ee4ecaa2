"""Pages that travel between weights and the KV cache while actions are under way.

Way in: `broker.PageBroker`, `allocation.WeightPageAllocator`, `staging_reserve.StagingReserve`. The actions and the
runtime import it; it imports `elastic.kvcache`, `elastic.weights` and `elastic.memory`.
"""
