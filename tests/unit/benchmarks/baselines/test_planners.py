"""The planners that the intent's is compared with: static degrees, and AlpaServe with its trace known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baselines.alpaserve import KnownRequest, alpaserve
from baselines.planners import ByIntent, Planned, Static

from elastic.planning.deployment.devices import DeviceState, Stage, after
from elastic.planning.deployment.placing import Refusal
from elastic.planning.estimate.configuration import Configuration, configurations
from elastic.planning.estimate.performance import InstanceCost, Load
from elastic.planning.estimate.ranking import Estimate
from elastic.planning.pipeline.chunk_cost import ChunkCost
from elastic.planning.sharding.share import even_stages

LAYERS = 4
LOAD = Load(prompt=1, new=100)


@dataclass(frozen=True)
class Timed:
    """An option of a model of some bytes, whose steps take 10 ms, or less on more devices."""

    configuration: Configuration
    nbytes: int
    why_not: str = ""
    layers: int = LAYERS

    @property
    def estimate(self) -> Estimate:
        stages = even_stages(LAYERS, self.configuration.pp)
        return Estimate(self.configuration, stages, (), "made up", self.why_not, 8, 1, latency_s=1.0)

    def need(self, layers: range, requests: int) -> int:
        smaller = 4 if self.configuration.compressed else 1
        return self.nbytes * len(layers) // LAYERS // self.configuration.tp // smaller

    def judge(self, stages: Sequence[Stage], requests: int) -> Estimate:
        return self.estimate

    def busy(self, stages: Sequence[Stage], requests: int) -> tuple[float, ...]:
        return (0.0,) * len(stages)

    def cost(self, stages: Sequence[Stage]) -> InstanceCost:
        step = 0.01 / LAYERS / self.configuration.tp
        return InstanceCost(tuple(((ChunkCost(0, 0, 0, step, step), len(stage.layers)),) for stage in stages))


def options(nbytes: int, devices: int = 4) -> list[Timed]:
    """Compressed ones first, as an intent of memory would have them."""
    return [Timed(each, nbytes) for each in configurations(devices, LAYERS, ("int4", "full"))]


def devices(*free: int) -> list[DeviceState]:
    return [DeviceState(f"d{number}", nbytes) for number, nbytes in enumerate(free)]


def test_static_planners_take_their_degrees_and_nothing_else() -> None:
    chosen = {}
    for parallel in ("tp", "pp", "as loaded"):
        placed = Static(parallel).place("m", options(80), devices(100, 100, 100, 100))  # type: ignore[arg-type]
        assert not isinstance(placed, Refusal)
        chosen[parallel] = str(placed[0].configuration)
    assert chosen == {"tp": "TP4 PP1 full", "pp": "TP1 PP4 full", "as loaded": "TP1 PP1 full"}
    full = devices(100, 100, 100, 10)
    assert isinstance(Static("tp").place("m", options(80), full), Refusal)
    intent = ByIntent().place("m", options(80), full)
    assert not isinstance(intent, Refusal)
    assert str(intent[0].configuration) == "TP1 PP1 int4"
    alone = [Timed(Configuration(2), 80, "cannot be cut"), Timed(Configuration(1, 2), 80)]
    only = Static("tp").place("m", alone, full)
    assert not isinstance(only, Refusal)
    assert str(only[0].configuration) == "TP1 PP2 full"
    refused = Static("tp").place("m", alone[:1], full)
    assert isinstance(refused, Refusal)
    assert "cannot be cut" in str(refused)


def trace(count: int, models: Sequence[str], gap_s: float, slo_s: float) -> list[KnownRequest]:
    return [KnownRequest(gap_s * n, models[n % len(models)], LOAD, slo_s) for n in range(count)]


def test_alpaserve_replicates_what_has_most_requests() -> None:
    """A second each, two a second: four devices with a model each serve them in time, one does not."""
    every = {"hot": options(80), "cold": options(80)}
    known = trace(40, ["hot"], 0.4, 1.5)
    placed = alpaserve(every, devices(100, 100, 100, 100), known)
    assert "cold" not in placed
    assert len({name for each in placed["hot"] for name in each.devices}) > 1
    assert all(each.configuration.weights == "full" for each in placed["hot"])


def test_alpaserve_drops_a_model_for_others_unless_it_may_not() -> None:
    """Two devices with room for a model each: the rare one's serves more requests of the other."""
    alone = [Timed(Configuration(), 100)]
    every = {"often": alone, "seldom": alone}
    known = trace(60, ["often"] * 19 + ["seldom"], 0.6, 1.2)
    kept, all_there = (alpaserve(every, devices(100, 100), known, drop=drop) for drop in (True, False))
    assert set(kept) == {"often"}
    assert set(all_there) == {"often", "seldom"}
    for placed in (kept, all_there):
        states: tuple[DeviceState, ...] = tuple(devices(100, 100))
        for instances in placed.values():
            for each in instances:
                states = after(states, each.stages, each.busy)
        assert all(state.free_bytes >= 0 for state in states)


def test_a_plan_made_before_is_what_is_placed() -> None:
    placed = alpaserve({"m": options(80)}, devices(100, 100, 100, 100), trace(4, ["m"], 1.0, 9.0))
    planner = Planned(placed)
    assert planner.place("m", [], []) == placed["m"]
    assert isinstance(planner.place("other", [], []), Refusal)


def test_seconds_of_a_request_alone_are_its_latency() -> None:
    """All stages of an instance together take as long as the estimate of one request says."""
    stages = [Stage(range(2), ("a",), 0), Stage(range(2, 4), ("b",), 0)]
    cost = Timed(Configuration(1, 2), 80).cost(stages)
    load = Load(prompt=1200, new=30)
    expected = cost.ttft_s(load) + (load.new - 1) * cost.pass_s(load.decoding(1))
    assert abs(sum(cost.alone_s(load)) / expected - 1) < 1e-9
    assert cost.busy(Load(1200, 30, rate=2.0), 1) == tuple(2.0 * each for each in cost.alone_s(load))
