"""The model that a worker of vLLM has: its decoder layers, how released ones are streamed, and its CUDA graphs.

Nothing here imports vLLM. `assembly` and `worker` import it.
"""
