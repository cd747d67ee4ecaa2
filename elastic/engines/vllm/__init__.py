"""vLLM as an elastic engine, by its public plugin points only; nothing of it is patched.

A quantization method keeps the weights where they can move (`linear`), a worker class has the runtime on them
(`worker`, `assembly`), a KV connector has vLLM's blocks in pages of the same budget (`connector`, `kv`), and a
scheduler class moves live blocks (`scheduler`). Way in: `options` and `runtime` here, which is `elastic.vllm`; neither
this nor `support`, `assembly`, `agreement`, `model`, `client` and `kv` import vLLM. It imports `runtime` and what is
below.
"""

from elastic.engines.vllm.client.proxy import AsyncRemoteRuntime, RemoteRuntime, runtime, runtimes
from elastic.engines.vllm.client.settings import EngineSettings, options

__all__ = ["AsyncRemoteRuntime", "EngineSettings", "RemoteRuntime", "options", "runtime", "runtimes"]
