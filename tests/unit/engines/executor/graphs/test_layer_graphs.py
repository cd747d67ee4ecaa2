"""Layers of a pipeline as graphs: which decode steps replay them, and that the tokens are the model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastic.engines.executor.graphs import model_graphs
from elastic.engines.executor.graphs.captured_pass import CapturedPass
from elastic.engines.executor.graphs.layer_graphs import LayerGraphs
from elastic.engines.executor.graphs.model_graphs import ModelGraphs
from support import architectures
from support.cluster.engine_group import EngineGroup, require_plain_tokens
from support.lossless_variant import HALF, exact
from support.serving.generations import SERVED, prompts

TOKENS = 48
Counts = dict[int, int]


@pytest.fixture(autouse=True)
def _captured_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_graphs, "CAPTURE_AFTER", 3)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that were replayed, and not only to be checked."""
    layers: list[int] = []
    run, replay, check = LayerGraphs.call, CapturedPass.replay, ModelGraphs._check
    present: list[int] = []

    def noting(self: LayerGraphs, index: int, *args: Any) -> Any:
        present.append(index)
        return run(self, index, *args)

    def counting(self: CapturedPass, inputs: dict[str, Any]) -> Any:
        layers.append(present[-1])
        return replay(self, inputs)

    def checking(self: ModelGraphs, *args: Any) -> Any:
        output = check(self, *args)
        layers.pop()
        return output

    monkeypatch.setattr(LayerGraphs, "call", noting)
    monkeypatch.setattr(CapturedPass, "replay", counting)
    monkeypatch.setattr(ModelGraphs, "_check", checking)
    return layers


@pytest.fixture
def groups() -> Iterator[Callable[..., EngineGroup]]:
    made: list[EngineGroup] = []

    def make(*args: Any, **options: Any) -> EngineGroup:
        made.append(EngineGroup(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("name", sorted(SERVED))
def test_layers_of_every_architecture_are_replayed_at_the_ranks_that_compute_them(
    name: str, groups: Any, replays: list[int]
) -> None:
    group, asked = groups("ab", name, nbytes=8 << 20), prompts([3, 20], architectures.VOCAB)
    group.join("a", "b")
    group.move("a", [1], "b")
    replays.clear()
    heard = group.submit("a", asked, TOKENS)
    require_plain_tokens(heard, asked, TOKENS, name)
    assert set(replays) == {0, 1, 2}
    assert len(replays) >= 3 * (TOKENS // 2)
    group.check()


def test_instances_replay_each_others_layers_at_a_time(groups: Any, replays: list[int]) -> None:
    """Their steps have the same numbers of tokens, and threads of their own at each rank."""
    group, asked = groups("ab", nbytes=8 << 20), prompts([9, 20, 5], architectures.VOCAB)
    for home, guest in ("ab", "ba"):
        group.join(home, guest)
        group.move(home, [0, 2] if home == "a" else [1], guest)
    replays.clear()
    require_plain_tokens(group.submit("ab", asked, TOKENS), asked, TOKENS, group.architecture)
    assert set(replays) == {0, 1, 2}


def test_graphs_end_with_actions_and_with_layers_that_come_and_go(groups: Any, replays: list[int]) -> None:
    """A weight may be elsewhere behind an action, also one that comes while a step waits for another rank."""
    group = groups("ab", nbytes=8 << 20, wrap={"variants": [HALF]})
    for rank in "ab":
        exact(group.tracked[rank].model)
    (prompt,) = prompts([20], architectures.VOCAB)
    group.join("a", "b")
    group.move("a", [1], "b")
    heard = group.submit("a", [prompt], 160)
    b = group["b"].runtime
    done = 0
    for act, of in (
        (lambda: b.swap([1], "half"), 1),
        (b.restore, 1),
        (lambda: group.move("a", [2], "b"), 2),
        (lambda: group.move("a", [2], "a"), 2),
        (lambda: group["a"].runtime.swap([0], "half"), 0),
    ):
        done += 16
        heard["a"].wait_for_tokens("r0", done)
        act()
        replays.clear()
        done = len(heard["a"].tokens["r0"])
        heard["a"].wait_for_tokens("r0", done + 10)
        assert of in replays
    group.check()
    heard["a"].wait(["r0"])
    assert len(heard["a"].tokens["r0"]) == 160


def test_parts_of_layers_and_prompts_are_called(groups: Any, replays: list[int]) -> None:
    group, asked = groups("ab", nbytes=8 << 20, wrap={"shards": 2}), prompts([9, 20], architectures.VOCAB)
    group.join("a", "b")
    group.move("a", (1, 4, 5), "b")  # half of the first layer, all of the last
    replays.clear()
    require_plain_tokens(group.submit("a", asked, TOKENS), asked, TOKENS, group.architecture)
    assert set(replays) == {1, 2}, "the first is computed by both"


def test_an_eager_engine_replays_nothing(groups: Any, replays: list[int]) -> None:
    group, asked = groups("ab", nbytes=8 << 20, enforce_eager=True), prompts([9], architectures.VOCAB)
    group.join("a", "b")
    group.move("a", [1], "b")
    require_plain_tokens(group.submit("a", asked, 20), asked, 20, group.architecture)
    assert not replays
