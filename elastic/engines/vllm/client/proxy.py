"""The runtimes of a vLLM engine's workers, as one: `elastic.vllm.runtime(llm)`, with the words of `model.elastic`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import Any, Concatenate, ParamSpec, TypeVar

from elastic.config import require
from elastic.controller.loop import ControllerHealth
from elastic.engines.vllm.client.messages import decode, decode_error, encode
from elastic.errors import ConfigError
from elastic.runtime.verbs import Layers
from elastic.types import Action, Change, Event, PlanStep, Resize, Result, Status

Answer = TypeVar("Answer")
Arguments = ParamSpec("Arguments")
POLL_S = 0.002
"""Between two questions whether an action is done."""


class RemoteRuntime:
    """What changes and shows the model of a vLLM engine. Thread-safe as far as the engine's `collective_rpc` is.

    Actions wait until they are done on all ranks; sizes are those of one rank, unless it says otherwise. `call` is
    vLLM's `collective_rpc`: it calls a method on every rank, and returns the answers in their order.
    """

    def __init__(self, call: Callable[..., list[Any]], settle_idle: Callable[[], object] = lambda: None) -> None:
        self._call = call
        self._settle_idle = settle_idle
        self.kv = RemoteKV(self)

    # -- what there is

    def status(self) -> Status:
        """Return the places and KV caches of all ranks, and where the layers are; a shard for each rank."""
        return _merge_status(self._look("status"))

    def form(self) -> tuple[str, ...]:
        """Return the variant that each decoder layer is in; `absent` for a released one."""
        return tuple(self._look("form")[0])

    def events(self) -> tuple[Event, ...]:
        """Return the last actions, oldest first, as the first rank did them."""
        return tuple(self._look("events")[0])

    def health(self) -> ControllerHealth:
        """Return whether the controller runs, what it last decided and why, and what went wrong."""
        health: ControllerHealth = self._look("health")[0]
        return health

    def snapshot(self) -> Any:
        """Return what a policy sees now."""
        return self._look("snapshot")[0]

    def check(self) -> None:
        """Recount the ledger of every rank. Raises `IntegrityError` with both sides of what differs."""
        self._look("check")

    def plan(self, actions: Action | Sequence[Action]) -> tuple[PlanStep, ...]:
        """Return what actions would do on one rank. Raises `ConfigError` or `CapacityError` if one cannot be done."""
        return tuple(self._look("plan", actions)[0])

    # -- actions

    def release(self, layers: Layers) -> Change:
        """Have the weights of decoder layers leave for host memory; their pages are KV blocks then."""
        return _merge_changes(self._change("release", _names(layers)))

    def swap(self, layers: Layers, variant: str) -> Change:
        """Have decoder layers in a variant that the engine was given, such as "int4"."""
        require(isinstance(variant, str), "variant", variant, "a name that the engine was given, such as 'int4'")
        return _merge_changes(self._change("swap", _names(layers), variant))

    def restore(self, layers: Layers | None = None) -> Change:
        """Have the full weights of decoder layers again, bit for bit; None: of all that were there at the start.

        `deferred`: they return as vLLM's scheduler gives blocks up.
        """
        return _merge_changes(self._change("restore", None if layers is None else _names(layers)))

    def apply(self, actions: Action | Sequence[Action]) -> tuple[Result, ...]:
        """Do actions, all or none, on all ranks before the same step; return the first rank's results."""
        several = tuple(actions) if isinstance(actions, Iterable) else (actions,)
        return tuple(self._change("apply", several, why="by hand")[0])

    def _look(self, name: str, *arguments: Any) -> list[Any]:
        """Ask every rank."""
        return [_value(answer) for answer in self._call("elastic_look", args=(name, encode((arguments, {}))))]

    def _change(self, name: str, *arguments: Any, **named: Any) -> list[tuple[Any, ...]]:
        """Begin an action on every rank, and wait for the results of all."""
        number = self._call("elastic_change", args=(name, encode((arguments, named))))[0]
        while None in (answers := self._call("elastic_result", args=(number,))):
            self._settle_idle()
            time.sleep(POLL_S)
        self._settle_idle()
        return [_value(answer) for answer in answers]


@dataclass(frozen=True)
class RemoteKV:
    """The KV cache of one rank: `rt.kv`. Sizes are bytes."""

    _runtime: RemoteRuntime

    @property
    def capacity_bytes(self) -> int:
        """Of the blocks that vLLM's scheduler may hand out now."""
        return self._runtime.status().kv[0].capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Of the blocks that live requests and cached prefixes have."""
        return self._runtime.status().kv[0].used_bytes

    @property
    def limit_bytes(self) -> int:
        """The limit last set."""
        return self._runtime.status().kv[0].limit_bytes

    @property
    def maximum_bytes(self) -> int:
        """The highest limit: what weights leave."""
        return self._runtime.status().kv[0].maximum_bytes

    def resize(self, size: int | str) -> Resize:
        """Set the most bytes of KV blocks, such as "4GiB"; "max": all that weights leave. Live requests go on."""
        result: Resize = self._runtime._change("resize", size)[0][0]
        return result


def _awaited(
    word: Callable[Concatenate[RemoteRuntime, Arguments], Answer],
) -> Callable[Concatenate[AsyncRemoteRuntime, Arguments], Coroutine[Any, Any, Answer]]:
    """Return a method that says a word of `RemoteRuntime` on a thread; its calls to the ranks run in the event loop."""

    async def awaited(self: AsyncRemoteRuntime, /, *args: Arguments.args, **named: Arguments.kwargs) -> Answer:
        loop = asyncio.get_running_loop()

        def call_from_thread(method: str, *, args: tuple[Any, ...]) -> list[Any]:
            return asyncio.run_coroutine_threadsafe(self.call(method, args=args), loop).result()

        return await asyncio.to_thread(word, RemoteRuntime(call_from_thread), *args, **named)

    awaited.__doc__ = word.__doc__
    return awaited


def _resize_kv(runtime: RemoteRuntime, size: int | str) -> Resize:
    """Say `RemoteKV.resize`."""
    return runtime.kv.resize(size)


@dataclass(frozen=True)
class AsyncRemoteRuntime:
    """The same for an `AsyncLLM`: every word is awaited, as in `await rt.swap([3], "int4")`."""

    call: Callable[..., Coroutine[Any, Any, list[Any]]]
    """Its `collective_rpc`."""

    status = _awaited(RemoteRuntime.status)
    form = _awaited(RemoteRuntime.form)
    events = _awaited(RemoteRuntime.events)
    health = _awaited(RemoteRuntime.health)
    snapshot = _awaited(RemoteRuntime.snapshot)
    check = _awaited(RemoteRuntime.check)
    plan = _awaited(RemoteRuntime.plan)
    release = _awaited(RemoteRuntime.release)
    swap = _awaited(RemoteRuntime.swap)
    restore = _awaited(RemoteRuntime.restore)
    apply = _awaited(RemoteRuntime.apply)
    resize_kv = _awaited(_resize_kv)


def runtime(llm: Any) -> Any:
    """Return the runtime of a vLLM engine: of an `LLM` or `LLMEngine` a `RemoteRuntime`, of an `AsyncLLM` its like.

    Raises `ConfigError` for anything else.
    """
    call = getattr(llm, "collective_rpc", None)
    if call is None:
        raise ConfigError(f"{type(llm).__name__} is no vLLM engine: it has no collective_rpc")
    if asyncio.iscoroutinefunction(call):
        return AsyncRemoteRuntime(call)
    return RemoteRuntime(call, partial(_settle_idle, getattr(llm, "llm_engine", llm)))


def runtimes(llm: Any) -> tuple[Any, ...]:
    """Return a runtime for each engine of an `AsyncLLM` with data parallelism; of all others, that of `runtime`.

    vLLM gives what `runtime` asks to all engines, and answers with what the first one says.
    """
    client: Any = getattr(llm, "engine_core", None)
    engines = getattr(client, "core_engines", ())
    if len(engines) < 2 or not asyncio.iscoroutinefunction(getattr(llm, "collective_rpc", None)):
        return (runtime(llm),)

    async def call(engine: Any, method: str, args: tuple[Any, ...]) -> list[Any]:
        answers = await client._call_utility_async("collective_rpc", method, None, args, None, engine=engine)
        return list(answers)

    return tuple(AsyncRemoteRuntime(partial(call, engine)) for engine in engines)


def _settle_idle(engine: Any) -> None:
    """Do what steps would in an engine of this process, unless it has requests: another thread may be about to step."""
    core = getattr(getattr(engine, "engine_core", None), "engine_core", None)  # None: in a process of its own
    if core is None or engine.has_unfinished_requests():
        return
    connector = getattr(core.scheduler, "connector", None)
    for part in getattr(connector, "sub_connectors", [connector]):
        settle = getattr(getattr(part, "scheduler", None), "settle", None)  # of our connector, and of no other
        if settle is not None:
            settle(core.step_fn)


def _names(layers: Layers) -> list[int | str]:
    """Return indices and names of layers as JSON has them; the ranks refuse what is no layer.

    Raises `ConfigError` for what JSON has not.
    """
    several: Iterable[Any] = [layers] if isinstance(layers, str) or not isinstance(layers, Iterable) else layers
    try:
        return [layer if isinstance(layer, str | bool) else index(layer) for layer in several]
    except TypeError as error:
        raise ConfigError(f"layers={layers!r} cannot be; give indices or names of decoder layers") from error


def _value(answer: str) -> Any:
    told = decode(answer)
    if "error" in told:
        raise decode_error(told["error"])
    return told["value"]


def _merge_changes(ranks: Sequence[tuple[Change, ...]]) -> Change:
    """Return the layers of the first rank, and the bytes of all."""
    from elastic.actions.results import merge_changes

    first, *others = (merge_changes(changes) for changes in ranks)
    return replace(
        first,
        moved_bytes=first.moved_bytes + sum(change.moved_bytes for change in others),
        released_bytes=first.released_bytes + sum(change.released_bytes for change in others),
        retained_bytes=first.retained_bytes + sum(change.retained_bytes for change in others),
    )


def _merge_status(ranks: Sequence[Status]) -> Status:
    first = ranks[0]
    if len(ranks) == 1:
        return first
    residencies = {
        layer: tuple(
            replace(residency, shard=f"{rank}/{len(ranks)}")
            for rank, status in enumerate(ranks)
            for residency in status.residencies[layer]
        )
        for layer in first.residencies
    }
    places = tuple(place for status in ranks for place in status.places)
    return replace(first, places=places, kv=tuple(kv for status in ranks for kv in status.kv), residencies=residencies)
