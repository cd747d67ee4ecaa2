"""Ranks of this process over tiny models that are wrapped with small pages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import elastic
from elastic.cluster.launch.in_process import InProcessLauncher
from elastic.cluster.rank.client import RankClient
from elastic.cluster.rank.spec import RankSpec


class WrappedLauncher(InProcessLauncher):
    """Gives each rank a model of its own, wrapped as `wrap` does; `close` and `forget` unwrap them and recount."""

    def __init__(self, build: Callable[[], Any], wrap: Callable[[Any], object]) -> None:
        super().__init__(start_timeout_s=120)
        self._build, self._wrap = build, wrap
        self._building = threading.Lock()
        self.models: dict[str, Any] = {}
        self._gates: dict[str, threading.Event] = {}

    def start(self, spec: RankSpec) -> RankClient:
        with self._building:
            model = self._build()
            self._wrap(model)
            gate = self._gates[spec.name] = threading.Event()
            gate.set()
            model.register_forward_pre_hook(lambda *_: gate.wait(600) and None)
            self.models[spec.name] = model
        return super().start(replace(spec, model=model))

    def hang(self, name: str) -> None:
        """Have the model of a rank stand still at its next forward pass."""
        self._gates[name].clear()

    def go_on(self) -> None:
        for gate in self._gates.values():
            gate.set()

    def forget(self, name: str) -> None:
        """Have a rank that was lost or removed give its memory back, which it has as long as its model is wrapped."""
        self._gates[name].set()
        (rank,) = [rank for rank in self._ranks if rank.name == name]
        assert rank.wait(120) is not None, "it lives on behind its fleet"
        self._ranks.remove(rank)
        self._unwrap(name)

    def close(self) -> None:
        self.go_on()
        super().close()
        for name in list(self.models):
            self._unwrap(name)

    def _unwrap(self, name: str) -> None:
        model = self.models.pop(name)
        rt = model.elastic
        assert rt.kv.used_bytes == 0
        rt.restore()
        rt.check()
        elastic.unwrap(model)
