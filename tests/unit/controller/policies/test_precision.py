"""The policy of the modes by tables, and as a state machine over snapshots."""

from __future__ import annotations

import dataclasses
import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic import SLO, Policy, Restore, Swap
from elastic.controller.decision import Plan
from elastic.controller.policies.precision import PrecisionPhase, PrecisionPolicy, PrecisionState
from elastic.controller.policies.precision_steps import LayerSize, PrecisionStep
from elastic.controller.policies.pressure import PressureReading, alone, entry, exit_wish, missed
from elastic.controller.sensors.gpu_headroom import growth_bytes, reachable
from elastic.controller.snapshot import DeviceStats, MemoryStats, Quantiles, RequestStats, Snapshot
from elastic.errors import IntegrityError
from support.nvml_agreement import require_agreement

FULL, INT8, INT4 = 100, 60, 40
SIZE = LayerSize("float32", FULL, {"int8": INT8, "int4": INT4})
BUSY = RequestStats(running=4, arrived=9)


def reading(use: float, **changes: Any) -> PressureReading:
    base = PressureReading(use * 1000, 1000, 1000, 0.0, False, BUSY)
    return replace(base, **changes)


SLOW = Quantiles(9, 3.0, 3.0, 3.0, 3.0)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (reading(0.84), None),
        (reading(0.85), "nearly full"),
        (reading(0.2, capacity_bytes=0), "nearly full"),
        (reading(0.3, stalled=True), "no KV block"),
        (reading(0.6, queue_s=0.1), "wait for KV"),
        (reading(0.6, queue_s=0.09), None),
        (reading(0.4, queue_s=5.0), None),  # what they wait for is not KV
        (reading(0.99, traffic=RequestStats(arrived=9)), None),  # nobody waits for what caches keep
        (reading(0.99, traffic=RequestStats()), "nearly full"),  # nobody counts requests
        (reading(0.6, queue_s=0.05, traffic=replace(BUSY, ttft_s=SLOW)), "an SLO is missed"),
        (reading(0.6, queue_s=0.01, traffic=replace(BUSY, ttft_s=SLOW)), None),
        (reading(0.6, queue_s=0.05, traffic=replace(BUSY, running=1, ttft_s=SLOW)), None),  # alone
    ],
)
def test_entry(seen: PressureReading, expected: str | None) -> None:
    found = entry(seen, Policy(), SLO(ttft_s=2.0))
    assert found is None if expected is None else expected in str(found)


def test_a_tight_promise_makes_waiting_pressure_sooner() -> None:
    assert entry(reading(0.6, queue_s=0.03), Policy()) is None
    assert entry(reading(0.6, queue_s=0.03), Policy(), SLO(ttft_s=0.05)) == "requests wait for KV"


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (reading(0.65), True),
        (reading(0.66), False),
        (reading(0.5, base_bytes=700), False),  # the swapped layers' memory is needed
        (reading(0.0, base_bytes=-5), True),
        (reading(0.1, base_bytes=0), False),
        (reading(0.6, queue_s=0.03), False),
        (reading(0.6, queue_s=0.025), True),
        (reading(0.4, queue_s=9.0), True),  # they wait for something else
        (reading(0.1, stalled=True), False),
    ],
)
def test_exit(seen: PressureReading, expected: bool) -> None:
    assert exit_wish(seen, Policy()) is expected


def test_what_is_slow_alone() -> None:
    assert missed(RequestStats(ttft_s=SLOW, tpot_s=SLOW), SLO(ttft_s=2.0, tpot_s=4.0)) == ("ttft_s",)
    assert missed(RequestStats(ttft_s=SLOW), None) == missed(RequestStats(), SLO(ttft_s=2.0)) == ()
    assert alone(RequestStats(running=1))
    assert not alone(RequestStats(running=2))
    assert not alone(RequestStats(running=1, waiting=1))


class Case:
    """Ticks of a policy over a model that does what it asks for at once."""

    def __init__(
        self,
        layers: int = 6,
        levels: tuple[str, ...] = ("int4",),
        order: Any = None,
        slo: SLO | None = None,
        **fields: Any,
    ) -> None:
        self.settings = Policy(**{"cooldown_s": 0.0, "ema_alpha": 1.0, **fields})
        self.order = tuple(order or range(layers))
        self.policy = PrecisionPolicy(self.settings, self.order, levels, [SIZE] * layers, slo)
        self.layers = ["float32"] * layers
        self.state: PrecisionState | None = None
        self.now = 100.0
        self.obeys = True
        self.refuses: set[int] = set()
        """Layers with which no action is done."""
        self.said: list[Plan] = []

    def tick(
        self,
        used: int,
        traffic: RequestStats = BUSY,
        base: int = 1000,
        busy: bool = False,
        residencies: tuple[tuple[str, ...], ...] = (),
        **kv: Any,
    ) -> Plan:
        capacity = base + sum(FULL - SIZE.nbytes(variant) for variant in self.layers if variant != "absent")
        memory = MemoryStats(used, capacity, capacity, **kv)
        snapshot = Snapshot(self.now, traffic, memory, tuple(self.layers), busy, residencies=residencies)
        plan = self.policy.decide(snapshot, self.state)
        self.state, self.now = plan.state, self.now + self.settings.tick_s
        if self.obeys:
            for action in plan.actions:
                assert isinstance(action, Swap | Restore)
                for layer in () if self.refuses.intersection(action.layers) else action.layers:
                    self.layers[layer] = action.variant if isinstance(action, Swap) else "float32"
        self.said.append(plan)
        return plan

    def until_acts(self, used: int, most: int = 200, **options: Any) -> Plan:
        return next(plan for _ in range(most) if (plan := self.tick(used, **options)).actions)


def test_pressure_must_last_and_then_the_next_layers_of_the_order_are_swapped() -> None:
    case = Case(order=(5, 1, 3, 0, 2, 4))
    assert [case.tick(900).actions for _ in range(3)] == [(), (), (Swap((5, 1), "int4"),)]
    assert case.said[0].reason == "the KV cache is nearly full, but not for long yet"
    assert case.said[2].reason == "the KV cache is nearly full"
    case.tick(500)
    assert [case.tick(1100).actions for _ in range(3)][2] == (Swap((3, 0), "int4"),)


@pytest.mark.parametrize(
    ("fields", "phase"),
    [
        ({"acted_s": 99.8, "pressed_s": 99.0}, PrecisionPhase.COOLING),
        ({"pressed_s": 99.0}, PrecisionPhase.NEEDED),
        ({"pressed_s": 99.0, "eased": 9}, PrecisionPhase.DWELLING),
        ({"eased": 9}, PrecisionPhase.RESTORING),
        ({"eased": 9, "done": ()}, PrecisionPhase.WELL),
    ],
)
def test_the_first_phase_whose_condition_holds_decides(fields: dict[str, Any], phase: PrecisionPhase) -> None:
    policy = PrecisionPolicy(Policy(), range(3), ("int4",), [SIZE] * 3)
    snapshot = Snapshot(100.0, BUSY, MemoryStats(100, 1060, 1060), ("int4", "float32", "float32"))
    state = PrecisionState(**{"done": (PrecisionStep(0, "float32", "int4", FULL, INT4),), **fields})
    plan = policy.decide(snapshot, state)
    assert plan.reason == phase.value
    assert bool(plan.actions) == (phase is PrecisionPhase.RESTORING)
    assert policy.decide(replace(snapshot, busy=True), state).reason == PrecisionPhase.BUSY.value


def test_a_lull_begins_the_count_anew() -> None:
    case = Case()
    assert not any(case.tick(used).actions for used in (900, 900, 800, 900, 900, 800))


def test_the_last_layers_return_first_after_dwell_and_recovery() -> None:
    case = Case(order=(5, 1, 3, 0, 2, 4), dwell_s=2.0)
    while case.layers.count("int4") < 4:
        case.tick(2000)
    since = case.now
    assert case.until_acts(100).actions == (Restore((0, 3)),)
    assert case.now - since >= 2.0
    assert case.until_acts(100).actions == (Restore((1, 5)),)
    assert case.tick(100).reason == "all is well"


def test_several_levels_go_all_layers_to_the_first_before_the_second_and_back() -> None:
    case = Case(layers=3, levels=("int8", "int4"), layers_per_action=2, dwell_s=0.0)
    down = []
    for _ in range(30):
        down += case.tick(5000).actions
    assert down == [Swap((0, 1), "int8"), Swap((2,), "int8"), Swap((0,), "int4"), Swap((1, 2), "int4")]
    assert case.said[-1].reason.endswith("all layers that may be swapped are")
    up = []
    for _ in range(60):
        up += case.tick(10).actions
    assert up == [Swap((2, 1), "int8"), Swap((0,), "int8"), Restore((2,)), Restore((1, 0))]


def test_max_layers_and_the_bytes_of_an_action_bound_it() -> None:
    case = Case(max_layers=3, layers_per_action=2, dwell_s=0.0)
    for _ in range(40):
        case.tick(3000)
    assert case.layers == ["int4"] * 3 + ["float32"] * 3
    case = Case(layers_per_action=4, action_bytes=2 * INT4, dwell_s=0.0)
    assert case.until_acts(900).actions == (Swap((0, 1), "int4"),)
    assert case.until_acts(10).actions == (Restore((1,)),)  # two full layers would be too much, one always goes
    case = Case(layers=2, max_layers=99, layers_per_action=9)
    assert case.until_acts(900).actions == (Swap((0, 1), "int4"),)


def test_the_wish_to_restore_is_apart_from_whether_it_is_possible() -> None:
    case = Case(layers=4, layers_per_action=2, dwell_s=0.0, ema_alpha=0.05)
    case.until_acts(900)
    case.state = replace(case.state, used_bytes=50.0, pressed=0, eased=9)  # type: ignore[type-var]
    plan = case.tick(200, base=100)  # of 220: on the average there is room, at this moment there is not
    assert plan.actions == ()
    assert plan.reason == "layers could return; waits until enough KV memory is free"
    assert plan.figures == "needs 60 bytes, 20 are free"
    case.state = replace(plan.state, eased=9)
    assert case.tick(62, base=100).actions == (Restore((1,)),)  # both would need 160 bytes for a moment, 158 are free


def test_a_restore_that_would_bring_the_pressure_back_waits() -> None:
    """Base use is low, but the latest use is not: nothing is smoothed away."""
    case = Case(dwell_s=0.0, ema_alpha=0.05, layers_per_action=1)
    case.until_acts(1000)
    for _ in range(200):
        case.tick(500)
    assert "int4" not in case.layers
    case.until_acts(1000)
    case.state = replace(case.state, used_bytes=500.0, eased=9, pressed=0)  # type: ignore[type-var]
    plan = case.tick(800)
    assert plan.actions == ()
    assert plan.reason == "layers could return; waits until KV use would stay low"
    assert plan.figures == "it would be 80%, not 75%"


def test_zero_traffic_restores_all_at_once() -> None:
    case = Case(layers=6, idle_s=1.0, dwell_s=99.0)
    while case.layers.count("int4") < 6:
        case.tick(3000)
    gone = replace(BUSY, running=0, completed=9)
    began = case.now
    plan = case.until_acts(0, traffic=gone)
    assert plan.actions == (Restore((5, 4, 3, 2, 1, 0)),)
    assert plan.reason == "no requests"
    assert case.now - began < 1.5


def test_nothing_is_done_while_actions_are_under_way() -> None:
    case = Case()
    plans = [case.tick(990, busy=True) for _ in range(9)]
    assert {(plan.actions, plan.reason) for plan in plans} == {((), "an action is under way")}
    assert case.tick(990).actions


def test_a_limit_set_by_hand_is_not_answered_by_swapping() -> None:
    case = Case()
    plans = [case.tick(990, limit_bytes=500) for _ in range(9)]
    assert not any(plan.actions for plan in plans)
    assert "set by hand" in plans[-1].reason


def test_an_action_that_comes_to_nothing_is_tried_again_less_and_less_often() -> None:
    case = Case(cooldown_s=0.5)
    case.obeys = False
    acted = []
    for _ in range(400):
        now = case.now
        if case.tick(990).actions:
            acted.append(now)
    gaps = [round(b - a, 1) for a, b in itertools.pairwise(acted)]
    assert gaps == sorted(gaps)
    assert gaps[0] < 1.2
    assert gaps[-1] > 8
    case.obeys = True
    case.until_acts(990, most=1000)
    case.tick(500)
    assert case.state is not None
    assert case.state.failures == 0


def test_a_layer_that_cannot_be_swapped_does_not_keep_others_from_it() -> None:
    case = Case(dwell_s=0.0)
    case.refuses = {1}
    assert case.until_acts(990).actions == (Swap((0, 1), "int4"),)
    assert case.until_acts(990).actions == (Swap((2, 3), "int4"),)
    assert case.until_acts(1500).actions == (Swap((4, 5), "int4"),)
    assert case.until_acts(1500).actions == (Swap((0,), "int4"),)  # alone: either of the two may be at fault
    for _ in range(300):
        case.tick(1500)
    assert case.layers == ["int4", "float32", *["int4"] * 4]
    assert {plan.actions for plan in case.said[-300:]} == {(), (Swap((1,), "int4"),)}


def test_a_layer_that_cannot_return_does_not_keep_others_from_it() -> None:
    case = Case(dwell_s=0.0)
    for _ in range(40):
        case.tick(1500)
    assert set(case.layers) == {"int4"}
    case.refuses = {5}
    for _ in range(300):
        case.tick(100)
    assert case.layers == [*["float32"] * 5, "int4"]
    case.refuses = set()
    for _ in range(1000):
        case.tick(100, traffic=RequestStats(arrived=9))
    assert set(case.layers) == {"float32"}


def test_layers_with_replicas_are_left_out_until_these_have_left() -> None:
    case, replicated = Case(dwell_s=0.0), (("a", "b"), *[("a",)] * 5)
    assert case.until_acts(990, residencies=replicated).actions == (Swap((1, 2), "int4"),)
    for _ in range(60):
        plan = case.tick(1500, residencies=replicated)
    assert case.layers == ["float32", *["int4"] * 5]
    assert plan.reason.endswith("all layers that may be swapped are, but for those with replicas")
    every = tuple(("a", "b") for _ in range(6))
    for _ in range(60):
        plan = case.tick(100, residencies=every)
    assert plan.reason == "layers could return; waits until their replicas have left"
    assert case.layers[1:] == ["int4"] * 5


def test_what_others_undo_or_take_away_is_not_restored() -> None:
    case = Case(dwell_s=0.0)
    case.until_acts(990)
    case.layers[0] = "float32"  # restored by hand
    case.layers[1] = "absent"
    assert case.tick(100).reason == "all is well"
    assert case.until_acts(990).actions == (Swap((0, 2), "int4"),)


def test_a_restore_that_came_too_early_makes_the_next_one_wait_longer() -> None:
    case, waited = Case(dwell_s=1.0), []
    for _ in range(5):
        case.until_acts(950)
        began = case.now
        case.until_acts(10, traffic=replace(BUSY, running=1))
        waited.append(round(case.now - began))
    assert waited == [1, 2, 4, 8, 8]


def test_an_slo_that_a_request_alone_misses_is_reported_and_not_chased() -> None:
    slow = RequestStats(running=1, arrived=5, ttft_s=SLOW)
    case = Case(slo=SLO(ttft_s=2.0))
    plans = [case.tick(100, traffic=slow) for _ in range(400)]
    assert not any(plan.actions for plan in plans)
    assert plans[0].reason == "all is well"  # the misses may be of busier times
    assert plans[-1].reason == "all is well; ttft_s missed by requests that are alone, which no action would change"
    assert case.tick(100, traffic=replace(slow, running=2)).reason == "all is well"


# -- memory that others use

GPU = DeviceStats("cuda:0", used_bytes=600, total_bytes=1000)


def test_growth_is_what_all_processes_leave() -> None:
    assert growth_bytes([GPU], 100) == 300
    assert growth_bytes([GPU], 500) == 0
    assert growth_bytes([replace(GPU, place="cuda:0#a"), replace(GPU, place="cuda:0#b")], 100) == 300  # one GPU
    assert growth_bytes([GPU, replace(GPU, place="cuda:1")], 100) == 600
    assert (
        growth_bytes([]) is growth_bytes([DeviceStats("cuda:0")]) is growth_bytes([GPU, DeviceStats("cuda:1")]) is None
    )


def test_the_capacity_that_can_be_had_is_bounded_by_others() -> None:
    kv = MemoryStats(200, 5 << 30, 5 << 30, created_bytes=1 << 30)
    free = replace(GPU, total_bytes=80 << 30, used_bytes=78 << 30)
    bounded = reachable(kv, [free])
    assert bounded.capacity_bytes == (1 << 30) + (2 << 30) - (256 << 20)
    assert reachable(kv, []) == kv == reachable(kv, [replace(free, used_bytes=0)])
    assert reachable(replace(kv, created_bytes=None), [free]).capacity_bytes == 5 << 30


def test_the_policy_sees_the_bounded_capacity() -> None:
    policy = PrecisionPolicy(Policy(pressure_ticks=1), range(3), ("int4",), [SIZE] * 3)
    kv = MemoryStats(3 << 30, 5 << 30, 5 << 30, created_bytes=3 << 30)
    full = DeviceStats("cuda:0", used_bytes=80 << 30, total_bytes=80 << 30)
    calm = Snapshot(1.0, BUSY, kv, ("float32",) * 3)
    assert policy.decide(calm).actions == ()
    assert policy.decide(replace(calm, devices=(full,))).actions == (Swap((0, 1), "int4"),)


def test_nvml_and_the_ledger_are_compared() -> None:
    require_agreement(GPU, 600)
    require_agreement(DeviceStats("cuda:0"), 10**12)
    require_agreement(replace(GPU, own_bytes=500), 400, overhead_bytes=100)
    with pytest.raises(IntegrityError, match="601 bytes, NVML sees 600"):
        require_agreement(GPU, 601)
    for own in (399, 501):
        with pytest.raises(IntegrityError, match=f"NVML sees {own} of this process"):
            require_agreement(replace(GPU, own_bytes=own), 400, overhead_bytes=100)


# -- anything may happen


class AnyDay(RuleBasedStateMachine):
    """Random loads, actions that fail, are slow or deferred, and people who swap by hand."""

    @initialize(
        layers=st.integers(1, 6),
        levels=st.sampled_from([("int4",), ("int8", "int4"), ("int8",)]),
        most=st.integers(1, 8),
        each=st.integers(1, 3),
        cooldown=st.sampled_from([0.0, 0.5]),
        seed=st.randoms(use_true_random=False),
    )
    def begin(self, layers: int, levels: tuple[str, ...], most: int, each: int, cooldown: float, seed: Any) -> None:
        self.order = seed.sample(range(layers), layers)
        self.settings = Policy(
            layers_per_action=each,
            max_layers=most,
            cooldown_s=cooldown,
            dwell_s=0.3,
            pressure_ticks=2,
            recovery_ticks=2,
        )
        self.policy = PrecisionPolicy(self.settings, self.order, levels, [SIZE] * layers)
        self.levels = ("float32", *levels)
        self.layers = ["float32"] * layers
        self.ours: dict[int, str] = {}  # what the policy has swapped
        self.state: Any = None
        self.now, self.acted = -100.0, -1000.0
        self.pending: tuple[Any, ...] = ()
        self.failed: set[int] = set()

    @rule(used=st.integers(0, 1600), queue=st.floats(0, 1), requests=st.integers(0, 3), stalls=st.integers(0, 9))
    def tick(self, used: int, queue: float, requests: int, stalls: int) -> None:
        self.ticks(used, queue, requests, stalls, 1)

    @rule(used=st.integers(0, 2000), times=st.integers(2, 12))
    def last(self, used: int, times: int) -> None:
        self.ticks(used, 0.0, 2, 0, times)

    @rule()
    def nobody(self) -> None:
        self.ticks(0, 0.0, 0, 0, 25)

    def ticks(self, used: int, queue: float, requests: int, stalls: int, times: int) -> None:
        for _ in range(times):
            self.now += 0.1
            capacity = 1000 + sum(FULL - SIZE.nbytes(v) for v in self.layers if v in self.levels)
            traffic = RequestStats(running=requests, arrived=9, queue_delay_s=queue, stalls=stalls)
            kv = MemoryStats(min(used, capacity), capacity, capacity)
            snapshot = Snapshot(self.now, traffic, kv, tuple(self.layers), bool(self.pending))
            plan = self.policy.decide(snapshot, self.state)
            assert plan == self.policy.decide(snapshot, self.state), "it is pure"
            assert plan.reason
            self.state = plan.state
            if plan.actions:
                self.judge(plan.actions)
                self.acted, self.pending = self.now, plan.actions

    def judge(self, actions: tuple[Any, ...]) -> None:
        assert not self.pending, "it acts while an action is under way"
        assert self.failed.issuperset(self.state.refused), "it takes a layer for refused that was not"
        assert self.now - self.acted >= self.settings.cooldown_s - 1e-9, "it acts within the cooldown"
        moves = [
            (layer, self.levels.index(a.variant if isinstance(a, Swap) else "float32"))
            for a in actions
            for layer in a.layers
        ]
        assert len({layer for layer, _ in moves}) == len(moves)
        now = {layer: self.levels.index(self.layers[layer]) for layer, _ in moves}  # a released layer would raise
        coarser = [level > now[layer] for layer, level in moves]
        assert all(coarser) or not any(coarser), "it swaps and restores in one plan"
        assert all(level != now[layer] for layer, level in moves)
        allowed = self.order[: self.settings.max_layers]
        if coarser[0]:
            assert len(moves) <= self.settings.layers_per_action
            assert all(layer in allowed and level == now[layer] + 1 for layer, level in moves)
            for level in {level for _, level in moves}:
                candidates = [layer for layer in allowed if self.layers[layer] == self.levels[level - 1]]
                others = [layer for layer in candidates if layer not in self.state.refused]
                mine = [layer for layer, target in moves if target == level]
                in_order = others or sorted(candidates, key=self.state.refused.index)[:1]
                assert mine == in_order[: len(mine)], "the order is not respected"
        else:
            assert all(self.ours.get(layer) == self.layers[layer] for layer, _ in moves), (
                "it restores what it did not swap"
            )

    @precondition(lambda self: self.pending)
    @rule(succeeds=st.booleans(), part=st.booleans())
    def over(self, succeeds: bool, part: bool) -> None:
        """The action under way ends; all of it, nothing, or some layers were gone."""
        if not succeeds:
            self.failed.update(layer for action in self.pending for layer in action.layers)
        for action in self.pending if succeeds else ():
            for layer in action.layers[:1] if part else action.layers:
                self.layers[layer] = action.variant if isinstance(action, Swap) else "float32"
                self.ours[layer] = self.layers[layer]
        self.pending = ()
        self.ticks(700, 0.0, 2, 0, 1)  # what came of it is seen before anything else changes

    @rule(layer=st.integers(0, 5), variant=st.sampled_from(["float32", "int8", "int4", "absent", "float32+int4"]))
    def by_hand(self, layer: int, variant: str) -> None:
        if self.pending or layer >= len(self.layers) or self.layers[layer] == variant:
            return
        self.layers[layer] = variant
        self.ours.pop(layer, None)
        self.ticks(700, 0.0, 2, 0, 1)

    @invariant()
    def no_more_than_allowed_are_swapped(self) -> None:
        if hasattr(self, "settings"):
            assert sum(v != "float32" for v in self.ours.values()) <= self.settings.max_layers


def test_a_layer_that_was_swapped_back_by_hand_to_a_level_of_before_is_not_restored() -> None:
    state = AnyDay()
    state.begin(layers=1, levels=("int8", "int4"), most=1, each=1, cooldown=0.0, seed=random.Random(0))
    state.last(used=946, times=3)
    state.over(part=False, succeeds=True)
    state.last(used=0, times=2)
    state.over(part=False, succeeds=True)
    assert state.layers == ["int4"]
    assert not state.pending
    state.by_hand(layer=0, variant="int8")
    state.nobody()
    assert state.layers == ["int8"]
    assert not state.pending


AnyDay.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyDay = AnyDay.TestCase
TestAnyDay.pytestmark = [pytest.mark.slow]


def test_the_state_is_small_and_frozen() -> None:
    assert dataclasses.fields(PrecisionState)
    with pytest.raises(dataclasses.FrozenInstanceError):
        PrecisionState().pressed = 3  # type: ignore[misc]
