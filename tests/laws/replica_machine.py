"""Random actions on replicas while an engine serves random requests; run by test_replicated_batches.py in a child.

    python tests/laws/replica_machine.py --examples 8 --steps 30

A request gets the tokens that the plain model gives it, whatever happens meanwhile, and none is lost; the ledger is
right after each action; no KV leaves the place of the cache.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import elastic
from elastic.engines.base import Request
from elastic.engines.continuous import ContinuousEngine
from elastic.memory import places as opened
from laws.machine_process import machine_parser, prepare_process, run_examples
from support.architectures import VOCAB, build
from support.faulty_backend import CALLS, FaultyBackend
from support.lossless_variant import HALF, exact
from support.serving.generations import Collector, prompts, same_unless_close
from support.wrapped_model import small

MODELS = ["llama-gqa", "gemma3", "mixtral", "gpt2"]
PROMPTS = prompts([1, 5, 9, 30, 64, 100], VOCAB)
MOST = 40
LAYERS = st.sets(st.integers(0, 2), min_size=1).map(sorted)
PLACES = st.sampled_from(["cpu#b", "cpu#c"])
JOURNEY = st.lists(
    st.tuples(st.sampled_from(["replicate", "evict", "swap", "restore", "migrate"]), LAYERS, PLACES),
    min_size=10,
    max_size=10,
)
FAULTS = st.tuples(st.sampled_from(CALLS), st.integers(1, 3), st.booleans())
done: Counter[str] = Counter()
make_backend = opened.make_backend
opened.make_backend = lambda place: FaultyBackend(make_backend(place))


@functools.cache
def plain(name: str) -> Any:
    return exact(build(name))


class Serving(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(MODELS), pages=st.sampled_from([60, 2000]), share=st.booleans(), journey=JOURNEY)
    def begin(self, name: str, pages: int, share: bool, journey: list[tuple[str, list[int], str]]) -> None:
        self.name, self.model = name, exact(build(name))
        places = [small(8 << 20, "cpu#a"), small(8 << 20, "cpu#b"), small(200 << 10, "cpu#c")]
        elastic.wrap(self.model, places=places, variants=[HALF])
        self.rt = self.model.elastic
        self.rt.kv.resize(min(pages * 4096, self.rt.kv.maximum_bytes))
        self.engine = ContinuousEngine(self.model, block_tokens=8, max_batch_tokens=64, share_prefixes=share)
        self.engine.start()
        self.heard, self.requests, self.cancelled = Collector(), list[Request](), set[str]()
        self.travel(journey)

    def travel(self, journey: list[tuple[str, list[int], str]]) -> None:
        """Under requests: hypothesis may leave out of an example any of its rules."""
        self.ask([1, 4, 5], MOST)
        for kind, layers, place in journey:
            if kind == "replicate":
                self.replicate(layers, place, None)
            elif kind == "evict":
                self.evict("cpu#b")
                self.evict("cpu#c")
            elif kind == "migrate":
                self.migrate(layers[0], place)
            else:
                self.swap(layers, kind == "swap")
            self.laws()

    @rule(which=st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, max_size=4), tokens=st.integers(1, MOST))
    def ask(self, which: list[int], tokens: int) -> None:
        for index in which:
            self.requests.append(Request(PROMPTS[index], tokens))
            self.engine.submit(self.requests[-1], self.heard)

    @rule(index=st.integers(0, 99))
    def cancel(self, index: int) -> None:
        if self.requests:
            request = self.requests[index % len(self.requests)].id
            self.cancelled.add(request)
            self.engine.cancel(request)

    @rule(tokens=st.integers(1, MOST))
    def wait(self, tokens: int) -> None:
        """So that actions meet requests in all their states."""
        if self.requests and self.requests[-1].id not in self.cancelled:
            last = self.requests[-1]
            self.heard.wait_for_tokens(last.id, min(tokens, last.max_tokens), 60)

    @rule(layers=LAYERS, place=PLACES, fault=st.none() | FAULTS)
    def replicate(self, layers: list[int], place: str, fault: tuple[str, int, bool] | None) -> None:
        backend = next(pool.backend for pool in self.rt.pools if pool.name == place)
        if fault:
            self.rt.kv.trim()
            call, nth, half_way = fault
            backend.fail(call, nth, half_way=half_way)
        self.act("replicated", lambda: self.rt.replicate(layers, place))
        backend.disarm()

    @rule(place=PLACES)
    def evict(self, place: str) -> None:
        there = [i for i in range(3) if place in self.places_of(i)[1:]]
        if there:
            self.act("evicted", lambda: self.rt.evict(there, place))

    @rule(layers=LAYERS, there=st.booleans())
    def swap(self, layers: list[int], there: bool) -> None:
        self.act("swapped", lambda: self.rt.swap(layers, "half") if there else self.rt.restore(layers))

    @rule(layer=st.integers(0, 2), place=st.sampled_from(["cpu#a", "cpu#b", "cpu#c"]))
    def migrate(self, layer: int, place: str) -> None:
        self.act("migrated", lambda: self.rt.migrate(layer, place, kv=False))

    def act(self, what: str, action: Any) -> None:
        """Do it, or be told why not."""
        try:
            action()
            done[what] += 1
        except elastic.StateError as error:
            done[f"refused: {'replicas' if 'replica' in str(error) else error}"] += 1
        except elastic.CapacityError as error:
            done["failed" if "injected" in str(error) else "refused: no room"] += 1

    def places_of(self, layer: int) -> list[str]:
        return [residency.place for residency in list(self.rt.status().residencies.values())[layer]]

    @invariant()
    def laws(self) -> None:
        if hasattr(self, "rt"):
            self.rt.check()
            assert [kv.used_bytes for kv in self.rt.status().kv[1:]] == [0, 0]

    def teardown(self) -> None:
        if not hasattr(self, "rt"):
            return
        self.heard.wait([request.id for request in self.requests])
        for request in self.requests:
            got = self.heard.tokens.get(request.id, [])
            finish = self.heard.ends[request.id].finish
            assert finish == "length" or (finish == "cancelled" and request.id in self.cancelled), finish
            assert len(got) == request.max_tokens or finish == "cancelled"
            assert same_unless_close(plain(self.name), request.prompt, got), got
            done[finish] += 1
        done["passes"] += len(self.rt.passes())
        assert self.rt.kv.used_bytes == 0
        self.engine.stop()
        elastic.unwrap(self.model)


def main() -> None:
    args = machine_parser(examples=8, steps=30, timeout=240).parse_args()
    prepare_process(args)
    sys.setswitchinterval(1e-4)
    run_examples(Serving, args)
    print(dict(done))
    assert all(done[kind] for kind in ("replicated", "evicted", "swapped", "migrated", "length", "passes")), done


if __name__ == "__main__":
    main()
