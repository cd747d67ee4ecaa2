"""Pages that travel between weights and the KV cache while actions are under way.

Way in: `broker.PageBroker` and its `StagingReserve`, `allocation.WeightPageAllocator`. The actions and the runtime
import it; it imports `elastic.kvcache`, `elastic.weights` and `elastic.memory`.
"""
