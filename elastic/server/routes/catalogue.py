"""The models behind one server, by the names that requests say."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from elastic.engines.base import Engine
from elastic.errors import ElasticError, NotFound
from elastic.server.generation.state import ServerState
from elastic.server.protocol.errors import APIError

if TYPE_CHECKING:
    from elastic.cluster.deployment.deployments import Deployments

ModelOptions = Callable[[str], Mapping[str, Any]]
"""Path of a deployed model -> options of its `ServerState`: `tokenizer`, `max_model_len`, and such."""


class Catalogue:
    """The server's own model, and those that are deployed beside it. Thread-safe."""

    def __init__(
        self, own: ServerState, deployments: Deployments | None = None, options: ModelOptions | None = None
    ) -> None:
        """With `deployments`, `options` reads what is needed to answer for one of them."""
        self.own, self.deployments, self.options = own, deployments, options
        self._others: dict[str, ServerState] = {}
        self._answering = WeakSet([own])  # also those that are gone, as long as a request has them
        self._lock = threading.Lock()
        self.refresh()

    def named(self, name: str | None) -> ServerState:
        """Return the model that a request means; None is the server's own. Raises `APIError` for an unknown one."""
        if name is None or name == self.own.name:
            return self.own
        model = self._others.get(name)
        if model is None:
            names = ", ".join(repr(each.name) for each in self.all())
            message = f"the model {name[:200]!r} does not exist here; there is {names}"
            raise APIError(404, message, param="model", code="model_not_found")
        return model

    def all(self) -> list[ServerState]:
        """Return all models, the server's own first."""
        return [self.own, *self._others.values()]

    def refresh(self) -> None:
        """See what is deployed now. Reads tokenizers: not on the event loop.

        The threads of a model that is gone end with the last request that has found it here. Raises what reading a
        model raises, when all others are seen.
        """
        if self.deployments is None or self.options is None:
            return
        failure: ElasticError | None = None
        with self._lock:
            told = {each.name: each.path for each in self.deployments.status() if each.name != self.own.name}
            engines = dict[str, Engine]()
            for name in told:
                with suppress(NotFound):  # it ends just now
                    engines[name] = self.deployments[name]
            kept = {n: state for n, state in self._others.items() if state.engine is engines.get(n)}
            for name in engines.keys() - kept.keys():  # also one that means another model than before
                try:
                    kept[name] = ServerState(engines[name], name=name, **self.options(told[name]))
                except ElasticError as error:
                    failure = error
            self._others = {name: kept[name] for name in engines if name in kept}
            self._answering = WeakSet([*self._answering, *self._others.values()])
        if failure is not None:
            raise failure

    def cancel_answers(self) -> None:
        """End the answers of all models that still run, as cancelled, and begin no more. On the event loop."""
        for state in list(self._answering):
            state.cancel_answers()

    def close(self) -> None:
        """End the threads of the models that are not the server's own."""
        for state in self._others.values():
            state.close()
