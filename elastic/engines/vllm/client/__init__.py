"""What the process of the user has: the options of an engine, and the proxy by which its runtimes are reached.

Nothing here imports vLLM. Way in: `elastic.vllm.options`, `elastic.vllm.runtime`.
"""
