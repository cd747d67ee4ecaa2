"""What the simulator is told of ranks that are stages is what their steps took."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from sim_fit import Fitted, StagedSteps, with_home
from sim_runs import HIDDEN, TimedStep
from sim_shared import replayed
from sim_stages import slowdown, staged_path, with_stages

from elastic.planning.estimate.layer_cost import LayerCost
from elastic.planning.pipeline.chunk_cost import Chunk
from elastic.sim.core.host import HostSharing
from elastic.sim.mechanisms.model import Links

COST = LayerCost(((1, 0.004), (256, 0.024)), chunk=0.0, pair=0.0, prefix=0.0, seen=1e-6, block=1)
FITTED = Fitted(COST, HostSharing(), (), {"run": 1.0})


@pytest.mark.parametrize("more", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("home_s", [0.0, 8e-4])
def test_what_stages_take_from_each_other_is_what_waiting_for_turns_does_not_tell(more: float, home_s: float) -> None:
    home = replace(FITTED, beside_s=home_s)
    true = replace(home, stage_links=Links(1e9, 2e-4, stage_s=4e-4), sharing=HostSharing(stages=more))
    shapes = [(64 * number, 1) for number in range(20)] + [(0, 128), (0, 256)]
    asked = [TimedStep(1, float(i), i + 0.1, (shape,)) for i, shape in enumerate(shapes)]
    asked += [TimedStep(rank, 100.0, 100.1, (shape,)) for shape in shapes for rank in (1, 2)]
    steps = replayed(true, "run", asked, staged_path)
    single, pairs = (
        [replace(step, turn_s=step.seconds - home_s) for step in steps if (step.begin_s < 50.0) is alone]
        for alone in (True, False)
    )
    busy_s = math.fsum(FITTED.costs_s(single)) + (2 * 4e-4 - home_s) * len(single)
    bubbles = 1 - busy_s / math.fsum(2 * step.seconds - home_s for step in single)
    found = with_stages(home, {"run": StagedSteps(single, bubbles, pairs)})
    assert found.sharing.stages == pytest.approx(more, abs=0.02)
    again = [replayed(found, "run", each, staged_path) for each in (single, pairs)]
    told, real = StagedSteps(again[0], bubbles, again[1]), StagedSteps(single, bubbles, pairs)
    assert slowdown(found, {"run": told}) == pytest.approx(slowdown(found, {"run": real}), rel=0.01)


@pytest.mark.parametrize(
    ("stage_s", "hop_s", "home_s"), [(5e-4, 3e-4, 0.0), (0.0, 5e-4, 0.0), (4e-4, 0.0, 0.0), (4e-4, 2e-4, 6e-4)]
)
def test_what_stages_compute_and_what_they_wait_for_is_told_apart_by_their_bubbles(
    stage_s: float, hop_s: float, home_s: float
) -> None:
    token_s = 2e-6
    shapes = [(1, 64 * i) for i in range(20)] + [(128, 0), (256, 0)]
    alone_s = [COST.batch([Chunk("", start, count)]) for count, start in shapes]
    all_s = [
        cost_s + 2 * (stage_s + hop_s + (count - 1) * token_s)
        for (count, _), cost_s in zip(shapes, alone_s, strict=True)
    ]
    steps = [
        TimedStep(1, float(i), i + seconds, ((start, count),), seconds - home_s if home_s else 0.0)
        for i, ((count, start), seconds) in enumerate(zip(shapes, all_s, strict=True))
    ]
    busy_s = sum(alone_s) + (2 * stage_s - home_s) * len(steps)
    bubbles = 1 - busy_s / sum(2 * seconds - home_s for seconds in all_s)  # home waits for nobody meanwhile
    fitted = with_home(FITTED, {"run": steps})
    found = with_stages(fitted, {"run": StagedSteps(steps, bubbles)}).stage_links
    assert fitted.beside_s == pytest.approx(home_s, abs=1e-6)
    assert (found.stage_s, found.hop_s) == pytest.approx((stage_s, hop_s), abs=1e-6)
    assert 4 * HIDDEN / found.bytes_s == pytest.approx(token_s, rel=0.02)
