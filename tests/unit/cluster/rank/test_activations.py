"""A rank on a GPU keeps free what its steps take beside the pages. Here a CPU's pages are said to be a GPU's."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic import ConfigError
from elastic.cluster.control.stage_questions import SetCap
from elastic.cluster.rank import activations
from elastic.cluster.rank.activations import OWNER, charge, keep_activations, longest_prompt, sector_tokens
from elastic.cluster.rank.stages import Stages, _measure_room
from elastic.engines.continuous.engine import ContinuousEngine
from elastic.estimation.activations import StepBytes
from support.architectures import build
from support.wrapped_model import PAGE, small


@pytest.fixture
def engine(wrapped: Any, tmp_path: Path) -> Any:
    model = build("llama-mha")
    model.save_pretrained(tmp_path)
    made = ContinuousEngine(wrapped(model, small(2 << 20), shards=4, checkpoint=str(tmp_path)), block_tokens=4)
    yield made
    made.stop()


def kept_pages(engine: ContinuousEngine) -> int:
    return engine.runtime.pools[0].pages_of(OWNER)


def sectors(engine: ContinuousEngine) -> int:
    return engine._memory.capacity


@pytest.mark.parametrize(
    "steps",
    [
        StepBytes(10 * PAGE + 1, 0.0, 0.0),
        StepBytes(PAGE, 300.0, 0.0),
        StepBytes(0, 0.0, 150.0),
        StepBytes(7, 90.0, 99.0),
    ],
)
def test_the_place_is_charged_and_what_is_left_fits_all_that_it_holds(engine: Any, steps: StepBytes) -> None:
    rt, before, had = engine.runtime, sectors(engine), engine.runtime.kv.maximum_bytes
    with ExitStack() as stack:
        charge(engine, steps, stack)
        kept = kept_pages(engine)
        assert rt.kv.maximum_bytes == had - kept * PAGE
        assert rt.status().places[0].owners[OWNER] == kept * PAGE
        tokens = sectors(engine) * sector_tokens(engine)
        longest = min(tokens, longest_prompt(engine))
        assert 0 < sectors(engine) < before
        assert kept * PAGE >= steps.fixed + max(steps.prompt * longest, steps.decode * tokens)
        room = _measure_room(engine)
        sector = sum(room.sector_pages)
        assert room.usable_pages // (sector + room.step_pages(len(room.sector_pages))) == sectors(engine)
        rt.check()
        engine.check()
    assert (kept_pages(engine), rt.kv.maximum_bytes, sectors(engine)) == (0, had, before)
    rt.check()


def test_what_the_longest_prompt_needs_is_kept_at_once_where_it_is_little(engine: Any) -> None:
    with ExitStack() as stack:
        charge(engine, StepBytes(0, 10.0, 0.0), stack)
        assert engine.step_pages.of(1.0) == 0
        assert kept_pages(engine) == -(-10 * longest_prompt(engine) // PAGE)
        assert longest_prompt(engine) == 512, "the model has positions for no more"


def test_a_budget_that_leaves_no_cache_beside_steps_is_refused_in_words(engine: Any) -> None:
    with ExitStack() as stack, pytest.raises(ConfigError, match="steps take 4,000,000 bytes besides the pages"):
        charge(engine, StepBytes(4_000_000, 0.0, 0.0), stack)
    assert kept_pages(engine) == 0
    engine.runtime.check()


def test_on_a_cpu_nothing_is_measured_and_nothing_kept(engine: Any) -> None:
    with ExitStack() as stack:
        keep_activations(engine, 64, 4, stack, lambda *_: pytest.fail("it is measured"))
    assert kept_pages(engine) == 0


@pytest.mark.parametrize("beside", [-1, 0])
def test_on_a_gpu_it_is_kept_where_budgets_leave_no_room_for_it(
    engine: Any, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pool,) = engine.runtime.pools
    status, steps = pool.status(), StepBytes(20 * PAGE, 0.0, 0.0)
    outside = sum(nbytes for owner, nbytes in status.owners.items() if owner.startswith("fixed:"))
    to_create = status.budget_bytes - outside - pool.backend.created * PAGE
    monkeypatch.setattr(pool, "device", torch.device("cuda:0"))
    monkeypatch.setattr(activations, "give_back_freed", lambda device: None)
    monkeypatch.setattr(activations, "free_bytes", lambda device: to_create + steps.fixed + beside)
    with ExitStack() as stack:
        keep_activations(engine, 64, 4, stack, lambda *_: steps)
        assert kept_pages(engine) == (20 if beside < 0 else 0)
    monkeypatch.undo()


@pytest.mark.parametrize("steps", [StepBytes(0, 600.0, 0.0), None])
def test_pages_that_weights_have_left_are_the_devices_where_longer_requests_need_some(
    engine: Any, steps: StepBytes | None
) -> None:
    (pool,) = engine.runtime.pools
    pool.ready_pages = 0  # the janitor makes none
    with ExitStack() as stack:
        if steps is not None:
            charge(engine, steps, stack)
        engine.runtime.digests(1)
        engine.runtime.drop(1)
        Stages(engine, "127.0.0.1").answer(SetCap(None))
        place = engine.runtime.status().places[0]
        assert (place.parked_bytes + place.idle_bytes == 0) is (steps is not None)
        engine.runtime.check()
    engine.runtime.restore(1)
