"""`elastic.vllm`: vLLM with weights and KV blocks in the same pages (docs/vllm.md)."""

from elastic.engines.vllm import AsyncRemoteRuntime, EngineSettings, RemoteRuntime, options, runtime, runtimes

__all__ = ["AsyncRemoteRuntime", "EngineSettings", "RemoteRuntime", "options", "runtime", "runtimes"]
