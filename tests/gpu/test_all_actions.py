"""Everything that a wrapped model can be told to do, on one GPU and on two: tokens and weights stay what they were."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import elastic
from elastic import Release, Restore, Swap
from elastic.controller.decision import Plan
from elastic.engines.base import Request
from elastic.engines.continuous import ContinuousEngine
from support.architectures import VOCAB, build, prompt
from support.child_process import in_child
from support.lossless_variant import HALF, exact
from support.serving.generations import Collector, prompts, same_unless_close
from support.wrapped_model import assert_same_bits, bits

pytestmark = pytest.mark.cuda
TWO_DEVICES = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="there is one CUDA device")
HERE, MLP, ATTENTION = "cuda:0", "model.layers.1.mlp", "model.layers.0.self_attn"
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


@pytest.fixture(params=["cuda:0#b", pytest.param("cuda:1", marks=TWO_DEVICES)])
def there(request: pytest.FixtureRequest) -> str:
    """The place beside `HERE`: on the same device, or on another one."""
    return str(request.param)


def two_places(there: str) -> list[elastic.Place]:
    return [elastic.Place.parse(f"{name}=512MiB") for name in (HERE, there)]


Step = Callable[[], object]


def every_action(rt: Any, there: str, *, kv: bool = True) -> list[Step]:
    """All verbs and their inverses. kv: whether caches travel too, which those of an engine do not."""
    caches: list[Step] = [lambda: rt.migrate_kv([0, 2], there), lambda: rt.migrate_kv([0, 2], HERE)]
    return [
        lambda: rt.kv.resize(128 << 20, place=HERE),
        lambda: rt.release([1]),
        lambda: rt.swap([0, 1], "half"),
        lambda: rt.migrate([0], there, kv=kv),
        lambda: rt.restore([0]),
        lambda: rt.restore(),
        lambda: rt.migrate([MLP, ATTENTION], there),
        lambda: rt.swap([MLP], "half"),
        lambda: rt.migrate([0, 1, 2], HERE, kv=kv),
        lambda: rt.restore([MLP]),
        *(caches if kv else ()),
        lambda: rt.replicate([0, 1], there),
        lambda: rt.apply([Swap((2,), "half"), elastic.Evict((1,), there)]),
        lambda: rt.evict([0], there),
        lambda: rt.restore([2]),
        lambda: rt.kv.trim(),
        lambda: rt.kv.resize("max"),
    ]


def test_between_generations(there: str, wrapped: Any) -> None:
    model, inputs = exact(build("llama-gqa", device=HERE)), prompt(3, device=HERE)
    before, logits = bits(model), model(**inputs).logits
    tokens = model.generate(**inputs, **GREEDY, max_new_tokens=6)
    rt = wrapped(model, two_places(there), variants=[HALF]).elastic
    for step in every_action(rt, there):
        step()
        assert torch.equal(model.generate(**inputs, **GREEDY, max_new_tokens=6), tokens)
        tolerance = 1e-4 if rt.replicated else 0  # batches of other sizes round otherwise
        torch.testing.assert_close(model(**inputs).logits, logits, rtol=tolerance, atol=tolerance)
        rt.check()
    assert rt.form() == ("float32",) * 3
    assert_same_bits(model, before)
    elastic.unwrap(model)
    assert_same_bits(model, before)
    assert torch.equal(model(**inputs).logits, logits)


class Acting(LogitsProcessor):
    """Takes the next step after each token of `generate`."""

    def __init__(self, steps: Iterator[Step]) -> None:
        self.steps = steps

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        next(self.steps)()
        return scores


@pytest.mark.parametrize("beams", [1, 2])
def test_in_the_middle_of_a_generation(beams: int, there: str, wrapped: Any) -> None:
    model, inputs = exact(build("llama-gqa", device=HERE)), prompt(2, device=HERE)
    before = bits(model)
    rt = wrapped(model, two_places(there), variants=[HALF]).elastic
    steps = every_action(rt, there)
    options = {**GREEDY, "max_new_tokens": len(steps), "num_beams": beams}
    tokens = model.generate(**inputs, **options)
    found = model.generate(**inputs, **options, logits_processor=LogitsProcessorList([Acting(iter(steps))]))
    assert torch.equal(found, tokens)
    rt.check()
    elastic.unwrap(model)
    assert_same_bits(model, before)


def test_under_continuous_batching(there: str, wrapped: Any) -> None:
    model = exact(build("llama-gqa", device=HERE))
    before, asked = bits(model), prompts([5, 21, 40], VOCAB)
    rt = wrapped(model, two_places(there), variants=[HALF]).elastic
    heard, requests = Collector(), []
    with ContinuousEngine(model, block_tokens=8, max_batch_tokens=64) as engine:
        for i, step in enumerate(every_action(rt, there, kv=False)):
            requests.append(Request(asked[i % 3], 12))
            engine.submit(requests[-1], heard)
            heard.wait_for_tokens(requests[-1].id, 2)
            step()
        heard.wait([request.id for request in requests])
    assert {end.finish for end in heard.ends.values()} == {"length"}
    rt.check()
    elastic.unwrap(model)
    assert_same_bits(model, before)
    assert all(same_unless_close(model, request.prompt, heard.tokens[request.id]) for request in requests)


class Restless:
    """A policy that does one thing after another."""

    def __init__(self, *actions: elastic.types.Action) -> None:
        self.actions = actions

    def decide(self, snapshot: Any, state: int | None) -> Plan:
        done = state or 0
        return Plan(() if snapshot.busy else self.actions[done : done + 1], "restless", done + (not snapshot.busy))


def test_a_controller_acts(there: str, wrapped: Any) -> None:
    model, inputs = exact(build("llama-gqa", device=HERE)), prompt(2, device=HERE)
    before, tokens = bits(model), model.generate(**inputs, **GREEDY, max_new_tokens=24)
    actions: tuple[elastic.types.Action, ...] = (
        Swap((0, 2), "half"),
        Release((1,)),
        elastic.Migrate((2,), there),
        Restore((1,)),
        Restore((0, 2)),
    )
    actions += elastic.Replicate((0,), there), elastic.Evict((0,), there)
    rt = wrapped(model, two_places(there), variants=[HALF], policy=Restless(*actions), controller=False).elastic

    def tick() -> None:
        rt.controller.tick()

    acting = LogitsProcessorList([Acting(iter([tick] * 24))])
    found = model.generate(**inputs, **GREEDY, max_new_tokens=24, logits_processor=acting)
    for _ in actions:
        rt.kv.resize("max")  # comes after what was asked for
        tick()
    rt.kv.resize("max")
    assert [event.action for event in rt.events() if event.why == "restless"] == list(actions)
    assert all(event.ok for event in rt.events())
    assert rt.health().faults == ()
    assert torch.equal(found, tokens)
    elastic.unwrap(model)
    assert_same_bits(model, before)


TWO_MODELS = """
    import sys, threading
    import torch
    sys.path[:0] = {paths!r}
    import elastic
    from gpu.test_all_actions import GREEDY, HERE, every_action, two_places
    from support.architectures import build, prompt
    from support.lossless_variant import HALF, exact
    from support.wrapped_model import assert_same_bits, bits

    torch.set_num_threads(1)
    models = [exact(build(name, device=HERE)) for name in ("llama-gqa", "qwen2-sliding")]
    inputs, before = prompt(2, device=HERE), [bits(model) for model in models]
    expected = [model.generate(**inputs, **GREEDY, max_new_tokens=5).tolist() for model in models]
    rts = [elastic.wrap(model, places=two_places({there!r}), variants=[HALF]).elastic for model in models]
    started, stop, found = threading.Barrier(3), threading.Event(), [[], []]
    torch.cuda.synchronize()

    def generate(which, stream):
        with torch.cuda.stream(stream):
            while not stop.is_set() or not found[which]:
                tokens = models[which].generate(**inputs, **GREEDY, max_new_tokens=5).tolist()
                found[which].append(tokens)
                if len(found[which]) == 1:
                    started.wait()

    streams = torch.cuda.default_stream(), torch.cuda.Stream()
    threads = [threading.Thread(target=generate, args=(i, stream)) for i, stream in enumerate(streams)]
    for thread in threads:
        thread.start()
    started.wait()
    try:
        for steps in zip(*(every_action(rt, {there!r}) for rt in rts), strict=True):
            for step in steps:
                step()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    for which, model in enumerate(models):
        assert [tokens for tokens in found[which] if tokens != expected[which]] == []
        rts[which].check()
        elastic.unwrap(model)
        assert_same_bits(model, before[which])
    print("generated", min(map(len, found)) > 1)
"""


def test_two_models_on_the_same_places_in_two_threads(there: str) -> None:
    """They share the ledgers, and one generates on a stream of its own."""
    paths = [str(Path(__file__).parents[1])]
    out = in_child(textwrap.dedent(TWO_MODELS).format(paths=paths, there=there))
    assert out.strip() == "generated True"
