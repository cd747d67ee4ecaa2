"""Two controlled models, ticked by hand at random between their generations; run by test_controllers.py in a child.

    python tests/laws/controller_machine.py --examples 6 --steps 50

They have a policy that swaps, `scale` in one group, or both under an arbiter. Requests come, go on and end, limits are
resized, sensors tell of pressure that is there or not. After each tick the laws hold: every text is the plain model's,
a refused token can be asked for again, the ledgers are right; in the end no trace is left.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # it is run as a script

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import elastic
from elastic.controller.snapshot import Quantiles, Snapshot
from elastic.memory import places as open_places
from elastic.planning.measured_cost import Calibration, LinearLatency
from laws.machine_process import machine_parser, prepare_process, run_examples
from support.architectures import build
from support.lossless_variant import HALF, exact
from support.wrapped_model import PAGE, assert_same_bits, bits, small

MODELS = ["llama-gqa", "gpt2"]
NAMES = ("cpu#a", "cpu#b")
PROMPTS = [torch.randint(3, 96, (1, 8 + 24 * i), generator=torch.Generator().manual_seed(i)) for i in range(3)]
OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
SWAPS = elastic.Policy(pressure_ticks=1, recovery_ticks=1, cooldown_s=0.2, dwell_s=1.0, ema_alpha=1.0, idle_s=0.5)
SCALE = elastic.Scale(
    pressure_ticks=1, vacancy_ticks=1, cooldown_s=0.2, dwell_s=1.0, t_up=0.1, least_gain=0.0, margin=0.02, group="pair"
)
SLOW = Quantiles(9, 0.4, 0.4, 0.4, 0.4)
both = st.integers(0, 1)
done: Counter[str] = Counter()
reasons: Counter[str] = Counter()


class Plain:
    """A plain model, what it writes from each prompt, and what it takes of a place."""

    known: dict[str, tuple[Any, list[torch.Tensor], int]] = {}

    @classmethod
    def get(cls, name: str, which: int) -> tuple[Any, list[torch.Tensor], int]:
        if f"{name} {which}" not in cls.known:
            model = exact(build(name))
            tokens = [model.generate(prompt, **OPTIONS) for prompt in PROMPTS]
            elastic.wrap(model, places=small(64 << 20, "cpu#probe"), variants=[HALF])
            nbytes = sum(model.elastic.status().places[0].owners.values())
            elastic.unwrap(model)
            cls.known[f"{name} {which}"] = model, tokens, nbytes
        return cls.known[f"{name} {which}"]


class Conversation:
    def __init__(self, model: Any, prompt: int) -> None:
        self.cache, self.prompt, self.seen = elastic.ElasticCache(model), prompt, 0


class Controlled(RuleBasedStateMachine):
    @initialize(
        names=st.tuples(*[st.sampled_from(MODELS)] * 2),
        kv_pages=st.sampled_from([200, 350, 600]),
        policies=st.tuples(*[st.sampled_from([(SWAPS, SCALE), (SWAPS, SCALE), (SCALE,), (SWAPS,)])] * 2),
    )
    def begin(self, names: tuple[str, str], kv_pages: int, policies: Any) -> None:
        plain = [Plain.get(name, which) for which, name in enumerate(names)]
        self.models, self.expected = [p[0] for p in plain], [p[1] for p in plain]
        self.bits = [bits(model) for model in self.models]
        self.hooks = [hooks_of(model) for model in self.models]
        total = sum(p[2] for p in plain) + kv_pages * PAGE
        here = [small(total, name) for name in NAMES]
        self.skew_s, self.pretended = 0.0, [{}, {}]
        self.talks: list[list[Conversation]] = [[], []]
        for which, model in enumerate(self.models):
            elastic.wrap(
                model,
                places=here if which == 0 else here[::-1],
                policy=policies[which],
                variants=[HALF],
                slo=elastic.SLO(tpot_s=0.3),
                controller=False,
            )
            self.pretend_with(which)

    def pretend_with(self, which: int) -> None:
        """Its sensors say what they are told to, and time passes as it is told to."""
        monitor = self.models[which].elastic.monitor
        read = monitor.read

        def pretended() -> Snapshot:
            seen = read()
            said = self.pretended[which]
            running = max(seen.traffic.running, said.get("running", 0))
            times = SLOW if said.get("slow") else seen.traffic.tpot_s
            traffic = replace(seen.traffic, arrived=99, running=running, tpot_s=times)
            kv, places = seen.kv, seen.places
            if said.get("full"):
                kv = replace(kv, used_bytes=max(kv.used_bytes, int(0.9 * kv.capacity_bytes)))
                here = replace(
                    places[0], kv_used_bytes=max(places[0].kv_used_bytes, int(0.9 * places[0].kv_capacity_bytes))
                )
                places = (here, *places[1:])
            return replace(seen, at_s=seen.at_s + self.skew_s, traffic=traffic, kv=kv, places=places)

        monitor.read = pretended

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.skew_s += seconds

    @rule(
        which=both,
        ticks=st.integers(4, 12),
        passes=st.sampled_from([0.1, 0.5, 2.0]),
        running=st.integers(0, 12),
        says=st.sampled_from(["", "", "slow", "full", "full"]),
    )
    def tick(self, which: int, ticks: int, passes: float, running: int, says: str) -> None:
        """Both in turn, while the sensors of one say something."""
        self.pretended[which] = {"running": running, says: True}
        for turn in range(ticks):
            rt = self.models[(which + turn) % 2].elastic
            before = len(rt.events())
            plan = rt.controller.tick()
            assert plan is not None, rt.health().faults
            settle(rt)
            done["ticks"] += 1
            done["asks"] += bool(plan.asks)
            reasons[plan.reason.split(":")[0]] += 1
            for event in rt.events()[before:]:
                done[f"{type(event.action).__name__}{'' if event.ok else ' refused'}"] += 1
            self.laws()
            self.skew_s += passes

    def laws(self) -> None:
        for model in self.models:
            model.elastic.check()
            for place in model.elastic.status().places:
                assert sum(place.owners.values()) + place.free_bytes == place.budget_bytes
        for which in (0, 1):
            for talk in self.talks[which][:1]:
                self.go_on(which, talk)

    @rule(which=both, requests=st.integers(1, 6), prompt=st.integers(0, 2))
    def requests_come(self, which: int, requests: int, prompt: int) -> None:
        for _ in range(requests if len(self.talks[which]) < 16 else 0):
            talk = Conversation(self.models[which], prompt)
            if self.go_on(which, talk):
                self.talks[which].append(talk)

    @rule(which=both, tokens=st.integers(1, 4))
    def requests_go_on(self, which: int, tokens: int) -> None:
        for talk in self.talks[which] * tokens:
            self.go_on(which, talk)

    @rule(which=both, left=st.integers(0, 4))
    def requests_end(self, which: int, left: int) -> None:
        del self.talks[which][left:]
        gc.collect()

    def go_on(self, which: int, talk: Conversation) -> bool:
        """One more token, which is the plain model's; or none, for want of memory, and then nothing is lost."""
        tokens = self.expected[which][talk.prompt]
        stop = talk.seen + 1 if talk.seen else PROMPTS[talk.prompt].shape[1]
        if stop == tokens.shape[1]:
            return True
        try:
            logits = self.models[which](tokens[:, talk.seen : stop], past_key_values=talk.cache).logits[:, -1]
        except elastic.CapacityError:
            assert talk.cache.get_seq_length() == talk.seen
            done["tokens refused"] += 1
            return False
        assert torch.equal(logits.argmax(-1), tokens[:, stop]), f"another token after {talk.seen}"
        talk.seen = stop
        done["tokens"] += 1
        return True

    @rule(which=both, prompt=st.integers(0, 2))
    def generate(self, which: int, prompt: int) -> None:
        try:
            found = self.models[which].generate(PROMPTS[prompt], **OPTIONS)
        except elastic.CapacityError:
            done["generations refused"] += 1
            return
        assert torch.equal(found, self.expected[which][prompt])
        done["generations"] += 1

    @rule(which=both, share=st.sampled_from([0.3, 0.8, 1.0, 1.0, 1.0]))
    def resize(self, which: int, share: float) -> None:
        rt = self.models[which].elastic
        try:
            rt.kv.resize(int(share * rt.kv.maximum_bytes))
        except elastic.CapacityError:  # a layer that waited has taken pages meanwhile
            return
        self.laws()

    def teardown(self) -> None:
        if not hasattr(self, "models"):
            return
        self.talks[1].clear()
        del self.talks[0][2:]
        gc.collect()
        self.take_off(1)
        for talk in self.talks[0]:  # nothing was lost: with the other's memory free, it goes on
            before = talk.seen
            assert self.go_on(0, talk)
            assert talk.seen > before or talk.seen + 1 == self.expected[0][talk.prompt].shape[1]
            done["went on at last"] += 1
        self.talks[0].clear()
        self.take_off(0)
        assert not open_places._open

    def take_off(self, which: int) -> None:
        model = self.models[which]
        model.elastic.check()
        elastic.unwrap(model)
        assert_same_bits(model, self.bits[which])
        assert hooks_of(model) == self.hooks[which]
        assert not hasattr(model, "elastic")


def hooks_of(model: Any) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def settle(rt: Any) -> None:
    """Until what was asked for is done, or deferred."""
    deadline = time.monotonic() + 60
    while rt._executor.unfinished:
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def main() -> None:
    parser = machine_parser(examples=6, steps=50, timeout=600)
    parser.add_argument("--least", type=int, default=0, help="fail with fewer actions of a kind")
    args = parser.parse_args()
    prepare_process(args)
    torch.set_grad_enabled(False)
    known = Calibration(dict.fromkeys(NAMES, LinearLatency(1.0, 1.0)), {NAMES: LinearLatency(0.01, 0.0)})
    sys.modules["elastic.wrap"].measure = lambda *_: known  # type: ignore[attr-defined]
    for name in MODELS:
        Plain.get(name, 0)
        Plain.get(name, 1)
    gc.collect()
    gc.freeze()  # what is imported and built by now stays: a collection then looks only through what an example made
    run_examples(Controlled, args)
    print(dict(done), *reasons.most_common(), sep="\n")
    for kind in ("Swap", "Restore", "Replicate", "Evict", "Migrate", "asks"):
        assert done[kind] >= args.least, f"only {done[kind]} of {kind}"


if __name__ == "__main__":
    main()
