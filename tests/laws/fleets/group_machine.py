"""The fleet's machine, whose instances merge, drop layers, compute each other's, get them back and part besides."""

from __future__ import annotations

import itertools
from contextlib import suppress
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

import elastic
from elastic import CapacityError, ConfigError, Overloaded, StateError
from elastic.config import Overload
from laws.fleets.fleet_machine import MODELS, MOST, FleetMachine
from support import architectures
from support.lossless_variant import HALF, exact
from support.wrapped_model import small

SOON_S = 5.0
"""How long a restore waits for requests that need the room of dropped layers; then nothing has changed."""
REFUSALS = (ConfigError, StateError, Overloaded, CapacityError)
LAYERS = 3
PLACES = itertools.count()
AT_ONCE = Overload(
    tick_s=0.01, queue_high_s=0.02, pressure_ticks=1, recovery_ticks=2, cooldown_s=0.02, dwell_s=0.05, idle_s=0.05
)
"""A policy that acts between any two rules."""
TIGHT = {"llama-gqa": 256 << 10, "gemma3": 256 << 10}
"""Bytes of a rank whose cache a burst fills."""


@cache
def checkpoint(name: str) -> TemporaryDirectory[str]:
    """A model's files: what a rank drops comes back from there when no other rank has it any more."""
    folder: TemporaryDirectory[str] = TemporaryDirectory(prefix=f"{name}-")
    exact(architectures.build(name)).save_pretrained(folder.name)
    return folder


class GroupMachine(FleetMachine):
    """Nothing is computed twice unless a rank was lost: not by drops, restores, merges or splits, whoever asks."""

    lost = False

    @initialize(
        name=st.sampled_from(MODELS),
        ranks=st.integers(2, 4),
        policy=st.sampled_from([None, "balance", AT_ONCE, ("balance", AT_ONCE)]),
    )
    def begin(self, name: str, ranks: int, policy: Any) -> None:
        self.nbytes = 2 << 20 if policy in (None, "balance") else TIGHT[name]
        super().begin(name, ranks, policy)

    def wrap(self, name: str, model: Any) -> None:
        place = small(self.nbytes, f"cpu#{next(PLACES)}")  # one of its own for each rank
        elastic.wrap(model, places=place, variants=[HALF], checkpoint=checkpoint(name).name)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "fleet") and not self.lost:
            assert self.fleet.status().totals.recomputed_tokens == 0

    @rule(data=st.data(), hangs=st.booleans())
    def lose_a_rank(self, data: Any, hangs: bool) -> None:
        self.lost = True
        super().lose_a_rank(data, hangs)

    @rule(data=st.data(), drain=st.booleans())
    def remove(self, data: Any, drain: bool) -> None:
        self.lost = self.lost or not drain
        with suppress(StateError):  # it computes layers of others, which do not come back now
            super().remove(data, drain)

    @rule(data=st.data(), pages=st.integers(0, 300))
    def resize(self, data: Any, pages: int) -> None:
        with suppress(StateError):  # below what others were allotted there
            super().resize(data, pages)

    @rule(data=st.data(), share=st.floats(0.5, 1.0))
    def end_within_lower_limits(self, data: Any, share: float) -> None:
        """Whoever shares memory with others: half of it is enough for one request after another."""
        for rank in self.ranks:
            (kv,) = self.fleet.look(rank).status.kv
            self.resize_to(rank, int(share * kv.maximum_bytes))
        request = self.any_request(data)
        if request is not None:
            self.heard.wait([f"{request.id}/{i}" for i in range(request.n)])

    @rule(data=st.data(), layers=st.lists(st.integers(0, 2), min_size=1, unique=True))
    def swap(self, data: Any, layers: list[int]) -> None:
        with suppress(*REFUSALS):  # a layer that was dropped
            super().swap(data, layers)

    @rule(data=st.data())
    def restore(self, data: Any) -> None:
        with suppress(*REFUSALS):
            super().restore(data)

    @rule(which=st.lists(st.integers(0, 2), min_size=4, max_size=12), begins=st.booleans())
    def burst(self, which: list[int], begins: bool) -> None:
        """Submit several requests; all of them have begun then, or a policy may act while they wait."""
        for prompt in which:
            self.submit(prompt, MOST, 1)
        if begins and self.asked:
            for rank in self.ranks:
                self.resize_to(rank, None)
            last = next(reversed(self.asked))
            if last not in self.cancelled:
                self.heard.wait_for_tokens(f"{last}/0", 1)

    # -- groups

    def two_ranks(self, data: Any) -> tuple[str, str]:
        """Draw two ranks; the same one twice is refused, and so is one alone."""
        return self.any_rank(data), self.any_rank(data)

    @rule(share=st.floats(0.05, 1.0), whole=st.booleans())
    def drop_as_much(self, share: float, whole: bool) -> None:
        with suppress(*REFUSALS):
            need = int(share * sum(self.fleet.layer_bytes()))
            dropped = self.fleet.drop(need=need, whole=whole, timeout_s=SOON_S)
            assert dropped.status != "applied" or dropped.freed_bytes >= need

    @rule(data=st.data(), cut=st.integers(1, LAYERS - 1))
    def drop_by_hand(self, data: Any, cut: int) -> None:
        first, second = self.two_ranks(data)
        with suppress(*REFUSALS):
            self.fleet.drop(layers={first: range(cut, LAYERS), second: range(cut)}, timeout_s=SOON_S)

    @rule(data=st.data())
    def take_back(self, data: Any) -> None:
        with suppress(*REFUSALS):
            self.fleet.restore(self.any_rank(data) if data.draw(st.booleans()) else None, timeout_s=SOON_S)

    @rule(data=st.data())
    def merge(self, data: Any) -> None:
        with suppress(*REFUSALS):
            self.fleet.merge(*self.two_ranks(data))

    @rule(data=st.data())
    def split(self, data: Any) -> None:
        with suppress(*REFUSALS):
            self.fleet.split(self.any_rank(data), timeout_s=SOON_S)

    @rule(data=st.data(), layers=st.lists(st.integers(0, LAYERS - 1), min_size=1, unique=True))
    def compute_elsewhere(self, data: Any, layers: list[int]) -> None:
        home, rank = self.two_ranks(data)
        with suppress(*REFUSALS):
            self.fleet.migrate(home, sorted(layers), rank, timeout_s=SOON_S)

    @rule(data=st.data(), layers=st.lists(st.integers(0, LAYERS - 1), min_size=1, unique=True))
    def replicate(self, data: Any, layers: list[int]) -> None:
        home, rank = self.two_ranks(data)
        with suppress(*REFUSALS):
            self.fleet.replicate(home, layers, rank, timeout_s=SOON_S)

    @rule(data=st.data(), layers=st.none() | st.lists(st.integers(0, LAYERS - 1), min_size=1, unique=True))
    def evict(self, data: Any, layers: list[int] | None) -> None:
        with suppress(*REFUSALS):
            self.fleet.evict(self.any_rank(data), layers, timeout_s=SOON_S)
