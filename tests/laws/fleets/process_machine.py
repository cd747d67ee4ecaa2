"""A random machine of a fleet on real processes: they merge, drop, restore and part, are killed and stand still, while
requests run. What is drawn follows from a seed; what meets what, from the machine's luck."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from elastic import CapacityError, ConfigError, Overloaded, RankLost, StateError
from elastic.cluster.fleet.fleet import Fleet
from elastic.config import Overload
from elastic.engines.base import Output, Request
from elastic.types import ResizeKV, Restore, Swap
from support.cluster.shared_launcher import SharedLauncher
from support.cluster.small_checkpoint import LAYERS, VOCABULARY, checkpoint, small_model
from support.isolation.named_memory import NamedMemory
from support.lossless_variant import HALF
from support.processes import FORKSERVER, alive, held, wait_until
from support.serving.generations import Collector, prompts, same_unless_close

PROMPTS = prompts([3, 9, 17, 40, 70, 121], VOCABULARY, seed=5)
BEGINNING = prompts([130], VOCABULARY, seed=7)[0]
LIKE_OTHERS = [*PROMPTS, BEGINNING[:20], BEGINNING[:33] + PROMPTS[1], BEGINNING[:70], BEGINNING]
"""Prompts of which some begin as others do."""
TOKENS = (20, 60, 150)
LIVE = 6
"""Requests that run all the time."""
PLACE, MOST_PAGES, PAGE = "cpu=6MiB", 64, 64 << 10
WEIGHTS = sum(each.nbytes for each in small_model().parameters())
TIGHT = f"cpu={(WEIGHTS + (7 + 3 * LAYERS) * PAGE) >> 10}KiB"
"""Three sectors of KV: one is kept for a drop, the others are for one of the longest requests, and little else."""
LONGEST_PAGES = 3 * LAYERS
"""Of the longest request, in whole sectors."""
ENGINE = {"block_tokens": 8, "max_batch_tokens": 64}
SOON_S, BEAT_S = 2.0, 6.0
REFUSALS = (ConfigError, StateError, Overloaded, CapacityError)


class Traffic(Collector):
    """So many requests all the time: one that ends is followed by the next."""

    def __init__(self, fleet: Fleet, chance: random.Random, prompts: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self._prompts = prompts
        self.asked: dict[str, Request] = {}
        self.cancelled: set[str] = set()
        self._fleet, self._chance = fleet, chance
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._flows = False

    def __call__(self, output: Output) -> None:
        super().__call__(output)
        if output.finish is not None:
            self._submit()

    def begin(self) -> None:
        """Have requests come, and wait until some generate."""
        self._flows = True
        self.fill()
        self.wait_for_tokens(self.live()[0], 1)

    def fill(self) -> None:
        """Submit what is missing: some may have been refused while nobody had room."""
        for _ in range(LIVE - len(self.live())):
            self._submit()

    def live(self) -> list[str]:
        """List the requests that have not ended."""
        with self._lock:
            return sorted(self.asked.keys() - self.ends.keys())

    def end(self) -> None:
        """Have no more come, wait for all, and see that each has the plain model's tokens, each once."""
        with self._lock:
            self._flows = False
        self.wait(list(self.asked), timeout_s=180)
        for name, request in self.asked.items():
            end, got = self.ends[name], self.tokens[name]
            assert end.finish == "length" or (end.finish == "cancelled" and name in self.cancelled), end
            assert end.finish == "cancelled" or len(got) == request.max_tokens
            assert same_unless_close(small_model(), request.prompt, got), name

    def computed_once(self) -> tuple[int, int]:
        """Return the least and most tokens that engines compute for all of them, with nothing computed twice.

        They are the same but for cancelled ones: what of those was under way nobody was told.
        """
        least = most = 0
        for name, request in self.asked.items():
            told = len(self.tokens[name])
            if self.ends[name].finish == "cancelled":
                least += len(request.prompt) + told - 1 if told else 0
                most += len(request.prompt) + told + 1
            else:
                least, most = least + len(request.prompt) + told - 1, most + len(request.prompt) + told - 1
        return least, most

    def _submit(self) -> None:
        with self._lock:
            if not self._flows:
                return
            name = f"request-{next(self._numbers)}"
            request = Request(self._chance.choice(self._prompts), self._chance.choice(TOKENS), id=name)
            self.asked[name] = request
            try:
                self._fleet.submit(request, self)
            except (Overloaded, CapacityError, StateError):  # nobody has room just now, or nobody is there
                del self.asked[name]


class ProcessMachine:
    """One fleet, and what is done to it. Verbs are called one after another, kills and stops fall in between."""

    def __init__(self, fleet: Fleet, seed: int, *, sharded: bool = False) -> None:
        self.fleet, self.chance, self._sharded = fleet, random.Random(seed), sharded
        self.traffic = Traffic(fleet, random.Random(seed + 1), LIKE_OTHERS if sharded else PROMPTS)
        self.done: list[str] = []
        """What was done, for who reads of a failure."""
        self.deadly, self.killed = False, set[int]()
        self._ranks, self._timers = len(self.ranks()), list[threading.Timer]()

    # -- runs

    def run(self, actions: int, *, deadly: bool) -> None:
        """Do so many actions at random; `deadly`: processes are killed, too. All requests have ended then."""
        self.deadly = deadly
        self.traffic.begin()
        try:
            for _ in range(actions):
                self.act()
                self.traffic.fill()
            for timer in self._timers:
                timer.join()
            self.settle()
        except BaseException as error:
            error.add_note(f"after {', '.join(self.done)}")
            raise

    def act(self) -> None:
        """Do one thing, and recount all books."""
        verbs: list[tuple[Callable[[], object], int]] = [
            (self.drop_as_much, 4), (self.drop_by_hand, 4), (self.restore, 3), (self.merge, 2), (self.split, 2),
            (self.migrate, 2), (self.replicate, 2), (self.evict, 1), (self.move, 4), (self.cancel, 2),
            (self.resize, 3), (self.swap, 3), (self.swap_back, 2), (self.stand_still, 2), (self.wait_a_little, 3),
            (self.kill, 4 if self.deadly else 0), (self.share, 12 * self._sharded), (self.part, 6 * self._sharded),
        ]  # fmt: skip
        (verb,) = self.chance.choices([verb for verb, _ in verbs], [weight for _, weight in verbs])
        self.done.append(verb.__name__)
        with suppress(*REFUSALS):
            verb()
        with suppress(*((RankLost,) if self.deadly else ())):
            self.fleet.check()

    def settle(self) -> None:
        """Have all be as at first: every layer at every rank, no limit, no request."""
        wait_until(lambda: not any(map(alive, self.killed)), "a killed process lives")
        wait_until(lambda: self.killed.isdisjoint(self.pids().values()), "a killed process is taken for a rank")
        wait_until(lambda: len(self.ranks()) == self._ranks, "no rank came in the place of a lost one")
        for rank in self.ranks():
            self.resize_to(rank, None)
        self.traffic.end()
        assert self.fleet.restore(timeout_s=60).status == "applied"
        wait_until(lambda: not self.fleet.groups(), "a group is left")
        for rank in self.ranks():
            self.fleet.apply(rank, Restore(tuple(range(LAYERS))))
            wait_until(lambda rank=rank: not self.used(rank), f"blocks of rank {rank} are in use")  # type: ignore[misc]
        assert all(not rank.dropped for rank in self.fleet.status().ranks if rank.serves)
        self.fleet.check()

    # -- what is there

    def ranks(self) -> list[str]:
        return [rank.name for rank in self.fleet.status().ranks if rank.serves]

    def any_rank(self) -> str:
        return self.chance.choice(self.ranks() or ["nobody"])

    def two_ranks(self) -> tuple[str, str]:
        """Draw two ranks; one alone is refused."""
        return self.any_rank(), self.any_rank()

    def some_layers(self) -> list[int]:
        return sorted(self.chance.sample(range(LAYERS), self.chance.randint(1, LAYERS)))

    def used(self, rank: str) -> int:
        return sum(kv.used_bytes for kv in self.fleet.look(rank).status.kv)

    def computed(self) -> int:
        """Return the tokens of all steps of all engines."""
        return sum(self.fleet.look(rank).stats.step_tokens for rank in self.ranks())

    def pids(self) -> dict[str, int]:
        return {rank.name: rank.pid for rank in self.fleet.status().ranks if rank.serves}

    # -- verbs

    def drop_as_much(self) -> None:
        need = int(self.chance.uniform(0.05, 1.0) * sum(self.fleet.layer_bytes()))
        dropped = self.fleet.drop(need, whole=self.chance.random() < 0.3, timeout_s=SOON_S)
        assert dropped.status != "applied" or dropped.freed_bytes >= need

    def drop_by_hand(self) -> None:
        (first, second), cut = self.two_ranks(), self.chance.randint(1, LAYERS - 1)
        exchange = self.chance.choice(["live", "live", "stall"])
        self.fleet.drop(
            layers={first: range(cut, LAYERS), second: range(cut)}, timeout_s=SOON_S, exchange=exchange,
            layers_per_step=self.chance.choice([None, 1]),
        )  # fmt: skip

    def restore(self) -> None:
        self.fleet.restore(self.any_rank() if self.chance.random() < 0.5 else None, timeout_s=SOON_S)

    def share(self) -> None:
        """Have two ranks share every layer."""
        self.reshard(self.two_ranks(), 2)

    def part(self) -> None:
        """Have a rank, and who shares its layers, compute all of them again."""
        self.reshard([self.any_rank()], 1)

    def reshard(self, ranks: Iterable[str], tp: int) -> None:
        most = self.chance.choice([None, 1, 2])
        self.fleet.reshard(list(dict.fromkeys(ranks)), tp=tp, layers_per_step=most, timeout_s=SOON_S)

    def merge(self) -> None:
        self.fleet.merge(*self.two_ranks())

    def split(self) -> None:
        self.fleet.split(self.any_rank(), timeout_s=SOON_S)

    def migrate(self) -> None:
        home, rank = self.two_ranks()
        self.fleet.migrate(home, self.some_layers(), rank, timeout_s=SOON_S)

    def replicate(self) -> None:
        home, rank = self.two_ranks()
        self.fleet.replicate(home, self.some_layers(), rank, timeout_s=SOON_S)

    def evict(self) -> None:
        self.fleet.evict(self.any_rank(), timeout_s=SOON_S)

    def move(self) -> None:
        self.fleet.move(self.any_request(), self.any_rank())

    def cancel(self) -> None:
        name = self.any_request()
        self.traffic.cancelled.add(name)
        self.fleet.cancel(name)

    def resize(self) -> None:
        """Lower or raise a limit, never below one that the longest request has room under: it could not be served."""
        pages = self.chance.randint(LONGEST_PAGES, MOST_PAGES)
        self.resize_to(self.any_rank(), None if self.chance.random() < 0.3 else pages * PAGE)

    def resize_to(self, rank: str, nbytes: int | None) -> None:
        self.fleet.apply(rank, ResizeKV(self.fleet.look(rank).status.places[0].name, nbytes))

    def swap(self) -> None:
        """Of layers that stay: one that was dropped is refused."""
        self.fleet.apply(self.any_rank(), Swap(tuple(self.some_layers()), "half"))

    def swap_back(self) -> None:
        self.fleet.apply(self.any_rank(), Restore(tuple(self.some_layers())))

    def stand_still(self) -> None:
        """Stop a process for less than it takes to be given up, beside what comes next."""
        pids, seconds = sorted(self.pids().values()), self.chance.uniform(0.02, 0.5)
        pid = self.chance.choice(pids) if pids else None  # all may just have been killed
        if pid is not None and pid not in self.killed:  # or it would live on
            signal_to(pid, signal.SIGSTOP)
            self._later(seconds, pid, signal.SIGCONT)

    def wait_a_little(self) -> None:
        name = self.any_request()
        if name not in self.traffic.asked:  # there is room for none now
            return
        have = len(self.traffic.tokens.get(name, ()))
        wait_until(lambda: name in self.traffic.ends or len(self.traffic.tokens.get(name, ())) > have, timeout_s=30)

    def kill(self) -> None:
        """Kill a process at some moment of what comes next, while another one is there; or have it stand still."""
        pids = self.pids()
        if len(pids) > 1:
            how = signal.SIGSTOP if self.chance.random() < 0.2 else signal.SIGKILL
            pid = self.chance.choice(sorted(pids.values()))
            for timer in self._timers:
                timer.join()  # one that stands still goes on before
            self.killed.add(pid)
            self._later(self.chance.uniform(0.0, 0.4), pid, how)

    def any_request(self) -> str:
        return self.chance.choice(self.traffic.live() or ["nothing"])

    def _later(self, seconds: float, pid: int, what: signal.Signals) -> None:
        timer = threading.Timer(seconds, signal_to, (pid, what))
        self._timers.append(timer)
        timer.start()


def signal_to(pid: int, what: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has gone meanwhile
        os.kill(pid, what)


@contextmanager
def machine(
    launcher: SharedLauncher, ranks: int, seed: int, policy: Overload | None = None, *, sharded: bool = False
) -> Iterator[ProcessMachine]:
    """Give a machine over a fleet of processes, of which nothing is left in the end.

    A policy has less memory, and no variant, which it would rather take. With `sharded` layers are cut, and requests
    share what they begin with.
    """
    named, before = NamedMemory(), held()
    engine = ENGINE | {"share_prefixes": sharded}
    options: dict[str, Any] = {"engine": engine, "launch": launcher, "policy": policy, "shards": 1 + sharded}
    options |= {"places": [PLACE], "wrap": {"variants": [HALF]}} if policy is None else {"places": [TIGHT]}
    with Fleet(checkpoint(), ranks=ranks, beat_timeout_s=BEAT_S, **options) as fleet:
        one = ProcessMachine(fleet, seed, sharded=sharded)
        yield one
        pids, addresses = one.pids().values(), list(fleet._groups.ranks._addresses.values())
    wait_until(lambda: not any(map(alive, pids)), "a rank is left")
    assert not [address for address in addresses if is_listening(address)]
    assert named.left() == set()
    wait_until(lambda: not held() - before - FORKSERVER, "memory files, sockets or processes are left")


def is_listening(address: tuple[str, int]) -> bool:
    with suppress(OSError), socket.create_connection(address, timeout=5):
        return True
    return False
