"""vLLM's KV cache in elastic pages: how many blocks there are from step to step. None of it imports vLLM.

Way in: `coordinator.CapacityCoordinator` beside vLLM's scheduler, `worker_channel.WorkerChannel` in each worker; what
they tell each other is in `orders`. `elastic.engines.vllm.connector` carries it.
"""
