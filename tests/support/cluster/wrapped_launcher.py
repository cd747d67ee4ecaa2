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
    """Gives each rank a model of its own, wrapped as `wrap` does; `close` unwraps them and recounts."""

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

    def close(self) -> None:
        self.go_on()
        super().close()
        for model in self.models.values():
            rt = model.elastic
            assert rt.kv.used_bytes == 0
            rt.restore()
            rt.check()
            elastic.unwrap(model)
        self.models.clear()
