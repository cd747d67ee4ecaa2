"""Ten minutes of a fleet of processes: clients come and go, requests move, ranks die, hang, come and are sent away."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from elastic.cluster.fleet.fleet import Fleet
from elastic.errors import ElasticError
from elastic.types import ResizeKV
from integration.serving.soak_clients import Books, everyone
from support.isolation.named_memory import NamedMemory
from support.processes import wait_for_end, wait_until
from support.serving.generations import same_unless_close
from support.serving.live_server import MODEL_DIR, empty, live

logger = logging.getLogger(__name__)
DURATION_S = 600.0
ENGINE = {"block_tokens": 8, "max_batch_tokens": 128}


class Disturber:
    """Does something to a fleet every now and then, on a thread; `did` counts what."""

    def __init__(self, fleet: Fleet, books: Books) -> None:
        self.fleet, self.books = fleet, books
        self.did: Counter[str] = Counter()
        self.pids = self.serving_pids()
        self.rng = random.Random(5)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Disturber:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def serving_pids(self) -> dict[str, int]:
        return {rank.name: rank.pid for rank in self.fleet.status().ranks if rank.serves}

    @property
    def settled(self) -> bool:
        """Whether the fleet has seen all faults so far, and has replaced what was lost."""
        lost = self.did["SIGKILL"] + self.did["SIGSTOP"]
        return len(self.serving_pids()) >= 2 and self.fleet.status().totals.ranks_lost >= lost

    def _run(self) -> None:
        next_fault_s = time.monotonic() + 5.0
        while not self._ending.wait(self.rng.uniform(0.0, 0.2)):
            kinds: list[Callable[[], str]] = [self.move, self.move, self.move, self.resize]
            if time.monotonic() >= next_fault_s and self.settled:
                kinds = [self.lose, self.lose, self.replace]
                next_fault_s = time.monotonic() + self.rng.uniform(2.0, 12.0)
            kind = self.rng.choice(kinds)
            try:
                self.did[kind()] += 1
            except (ElasticError, ProcessLookupError) as error:  # the request has ended, the rank is lost: it is not so
                logger.info("not done: %s", error)
                self.did[f"{kind.__name__} refused"] += 1
            self.pids |= self.serving_pids()

    def move(self) -> str:
        live = [name for name in list(self.books.prompts) if name not in self.books.ends]
        self.fleet.move(self.rng.choice(live or ["none"]), self.rng.choice(sorted(self.serving_pids())))
        return "moves"

    def resize(self) -> str:
        rank = self.rng.choice(sorted(self.serving_pids()))
        place = self.fleet.look(rank).status.places[0]
        self.fleet.apply(rank, ResizeKV(place.name, int(self.rng.uniform(0.15, 1.0) * place.budget_bytes)))
        return "resizes"

    def lose(self) -> str:
        how = self.rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        os.kill(self.rng.choice(sorted(self.serving_pids().values())), how)
        return how.name

    def replace(self) -> str:
        name = self.rng.choice(sorted(self.serving_pids()))
        self.fleet.add()
        self.fleet.remove(name)
        return "replacements"


@pytest.mark.long
def test_no_request_is_lost_repeated_or_changed_while_ranks_come_and_go() -> None:
    named = NamedMemory()
    fleet = Fleet(str(MODEL_DIR), ranks=2, places=["cpu=32MiB"], engine=ENGINE, beat_timeout_s=5)
    books, seen = Books(), Counter[str]()
    with fleet:
        books.keep(fleet)
        disturber = Disturber(fleet, books)
        with live(fleet) as server:
            with disturber:
                asyncio.run(everyone(server.url, DURATION_S, seen))
            wait_until(lambda: empty(fleet))
            fleet.check()
            traffic, totals = fleet.counters.read(), fleet.status().totals
            disturber.pids |= disturber.serving_pids()
    for pid in disturber.pids.values():
        wait_for_end(pid)
    assert named.left() == set()
    logger.warning("%s; %s; %s; %s", traffic, totals, dict(seen), dict(disturber.did))
    assert_books(books, traffic, seen)
    done = disturber.did
    assert min(done["moves"], done["SIGKILL"], done["SIGSTOP"], done["resizes"], done["replacements"]) >= 5, done
    assert totals.ranks_lost == done["SIGKILL"] + done["SIGSTOP"]


def assert_books(books: Books, traffic: Any, seen: Counter[str]) -> None:
    """Every request has ended once, as it should, with the tokens that the model gives it."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    assert books.ends.keys() == books.prompts.keys()
    assert Counter(books.ends.values()) == {"length": traffic.completed, "cancelled": traffic.cancelled}
    assert (traffic.failed, traffic.rejected) == (0, 0)
    assert traffic.arrived == traffic.completed + traffic.cancelled == seen.total()
    assert traffic.completed >= seen["read"]
    answers = {(books.prompts[name], tuple(tokens)) for name, tokens in books.tokens.items() if tokens}
    for prompt, tokens in answers:
        assert same_unless_close(model, prompt, tokens)
