"""Continuous batching on elastic pages: the same tokens as alone, nothing lost, whatever happens to the memory."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    DiffLlamaConfig,
    FalconConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MoshiConfig,
    NemotronConfig,
    Phi3Config,
    PretrainedConfig,
)
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

import elastic
from elastic import CapacityError, ConfigError, Overloaded, StateError
from elastic.engines.base import Output, Request, Sampling
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.executor.attention import BlockAttention
from support import architectures
from support.child_process import in_fork
from support.lossless_variant import HALF, exact
from support.processes import wait_until
from support.serving.generations import SERVED, Collector, Continuation, continuation, prompts, same_unless_close, serve
from support.wrapped_model import PAGE, small, tight


@pytest.fixture
def engines(wrapped: Any) -> Iterator[Any]:
    """engine(model, place, wrap options, **engine options), started; stopped when the test ends."""
    made: list[ContinuousEngine] = []

    def engine(model: Any, place: Any = None, *, start: bool = True, wrap: Any = None, **options: Any) -> Any:
        if getattr(model, "elastic", None) is None:
            wrapped(model, place or small(8 << 20), **(wrap or {}))
        made.append(ContinuousEngine(model, **{"block_tokens": 8, "max_batch_tokens": 64, **options}))
        if start:
            made[-1].start()
        return made[-1]

    yield engine
    for each in made:
        each.stop(drain=False)
        if hasattr(each._model, "elastic"):
            each.runtime.check()


@pytest.mark.parametrize("max_requests", [1, 2], ids=["waits", "lives"])
def test_a_request_ends_that_never_fits_any_more_beside_another_model(
    max_requests: int, engines: Any, wrapped: Any
) -> None:
    """The second model takes its pages while the first engine's thread is in a listener."""
    model, prompt = architectures.build("qwen3"), prompts([5], architectures.VOCAB)[0]
    place = tight(model, 48)
    engine, heard = engines(model, place, max_requests=max_requests), Collector()
    inside, go_on = threading.Event(), threading.Event()

    def hold(output: Output) -> None:
        inside.set()
        assert go_on.wait(60)
        heard(output)

    first, large = Request(prompt, 2), Request(prompt, 512 - len(prompt))
    engine.submit(first, hold)
    engine.submit(large, heard)
    before = engine.reports.load().total_blocks
    assert inside.wait(60)
    wrapped(architectures.build("qwen3"), place)
    go_on.set()
    heard.wait([first.id, large.id], 60)
    assert heard.ends[first.id].finish == "length"
    assert "beside the weights of other models" in str(heard.ends[large.id].error)
    assert engine.reports.load().total_blocks < before
    with pytest.raises(CapacityError, match="a larger budget"):
        engine.submit(large, heard)
    serve(engine, [Request(prompt, 8)])


@pytest.mark.slow
@pytest.mark.parametrize("each", [1, 3])
def test_requests_of_two_models_on_one_place_all_end(each: int, engines: Any, wrapped: Any) -> None:
    """Each fits alone, no two of them together: none takes what one that lives elsewhere was promised."""
    models = [wrapped(architectures.build("qwen3", seed=seed), ["cpu#shared=540KiB/4KiB"]) for seed in range(2)]
    both = [engines(model) for model in models]
    heard, tokens = Collector(), int(0.7 * both[0].longest_request(500))
    requests = [Request(p, tokens) for p in prompts([5, 9] * each, architectures.VOCAB)]
    for number, request in enumerate(requests):
        both[number % 2].submit(request, heard)
    heard.wait([request.id for request in requests], 120)
    assert {heard.ends[request.id].finish for request in requests} == {"length"}


def test_layers_that_come_back_wait_for_pages_that_live_requests_of_another_model_need(
    engines: Any, wrapped: Any
) -> None:
    one, other = (architectures.build("qwen3", seed=seed) for seed in range(2))
    wrapped(one, ["cpu#promised=440KiB/4KiB"])
    one.elastic.release([1, 2])
    wrapped(other, ["cpu#promised=440KiB/4KiB"])
    engine, heard = engines(other), Collector()
    begun, may_go = threading.Event(), threading.Event()

    def listen(output: Output) -> None:
        heard(output)
        begun.set()
        assert may_go.wait(60)

    tokens = engine.longest_request(500)
    (prompt,) = prompts([5], architectures.VOCAB)
    request = Request(prompt, tokens - len(prompt), ignore_eos=True)
    engine.submit(request, listen)
    assert begun.wait(60)
    result = one.elastic.restore([1, 2])
    may_go.set()
    assert result.deferred, result
    heard.wait([request.id], 60)
    assert heard.ends[request.id].finish == "length", heard.ends[request.id].error
    owner = f"layer:{result.deferred[-1]}"
    wait_until(lambda: owner in one.elastic.status().places[0].owners)
    one.elastic.check()
    other.elastic.check()


@pytest.mark.parametrize("name", sorted(architectures.CONFIGS))
def test_requests_of_all_lengths_get_the_tokens_that_they_get_alone(name: str, engines: Any) -> None:
    model = architectures.build(name)
    if name not in SERVED:
        with pytest.raises(ConfigError):
            engines(model)
        return
    lengths = [1, 7, 8, 9, 40, 70, 130]
    requests = [Request(p, 20) for p in prompts(lengths, architectures.VOCAB)]
    heard = serve(engines(model), requests)
    assert {end.finish for end in heard.ends.values()} == {"length"}
    plain = architectures.build(name)
    for request in requests:
        assert len(heard.tokens[request.id]) == 20
        assert same_unless_close(plain, request.prompt, heard.tokens[request.id])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (BertConfig(**architectures.SMALL), "see those behind them"),
        (Gemma3TextConfig(**architectures.GQA, head_dim=8, use_bidirectional_attention=True), "see those behind them"),
        (LlamaConfig(**architectures.GQA, is_causal=False), "is_causal=False"),
        (DiffLlamaConfig(**architectures.GQA), "attends several times"),
        (FalconConfig(**architectures.SMALL), "FalconForCausalLM attends by code of its own"),
        (NemotronConfig(**architectures.GQA), "NemotronForCausalLM attends by code of its own"),
        (MoshiConfig(**{**architectures.GQA, "ffn_dim": 48}, sliding_window=16), "sliding_window=16"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PretrainedConfig) else "",
)
def test_a_model_whose_attention_blocks_cannot_give_is_refused(
    config: Any, words: str, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tokens that see later ones, or by values that are kept twice: it would be served other tokens than its own."""
    monkeypatch.setitem(architectures.CONFIGS, "other", lambda: config)
    with pytest.raises(ConfigError, match=words):
        engines(architectures.build("other"))


def test_longrope_has_the_frequencies_of_a_request_alone_in_every_batch(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its longest text decides for a whole batch: what would be longer than the original context is refused."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 3.0, 6.0, 9.0]}
    config = Phi3Config(**architectures.GQA, rope_parameters=rope, original_max_position_embeddings=64)
    monkeypatch.setitem(architectures.CONFIGS, "longrope", lambda: config)
    model, plain = architectures.build("longrope"), architectures.build("longrope")
    requests = [Request(p, 20) for p in prompts([7, 44], architectures.VOCAB)]
    engine = engines(model)
    with pytest.raises(ConfigError, match="more than the 64 of its context"):
        engine.submit(Request(prompts([70], architectures.VOCAB)[0], 20), Collector())
    heard = serve(engine, requests)
    for request in requests:
        assert same_unless_close(plain, request.prompt, heard.tokens[request.id])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_attends_by_its_own_function_beside_its_engine(attention: str, engines: Any) -> None:
    """Which of the two it was loaded with makes no difference to its engine."""
    model, asked = architectures.build("gemma3"), prompts([7, 40], architectures.VOCAB)
    model.set_attn_implementation(attention)
    alone = model(torch.tensor([asked[1]])).logits
    heard = serve(engine := engines(model), requests := [Request(prompt, 20) for prompt in asked])
    assert model.config._attn_implementation == attention
    if attention == "eager":
        assert torch.equal(model(torch.tensor([asked[1]])).logits, alone)
        assert model(torch.tensor([asked[1]]), output_attentions=True).attentions[0].shape == (1, 4, 40, 40)
    engine.stop()
    for request in requests:
        assert same_unless_close(model, request.prompt, heard.tokens[request.id])


@pytest.mark.parametrize(("name", "term"), [("gemma2", "softcap"), ("gpt-oss", "sinks")])
def test_softcaps_and_sinks_are_seen_in_the_tokens(
    name: str, term: str, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that other tests of these models would fail without them: in prompts, and in what follows."""
    asked = prompts([40, 70], architectures.VOCAB)
    plain = architectures.build(name)
    attend = BlockAttention.attend
    for of_prompts in (True, False):
        model = architectures.build(name)

        def attend_without(attention: Any, query: torch.Tensor, *given: Any, of_prompts: bool = of_prompts) -> Any:
            *others, terms = given
            is_prompt = query.shape[1] > len(asked)
            return attend(
                attention, query, *others, replace(terms, **{term: None}) if is_prompt is of_prompts else terms
            )

        monkeypatch.setattr(BlockAttention, "attend", attend_without)
        heard = serve(engines(model), requests := [Request(prompt, 20) for prompt in asked])
        assert not all(same_unless_close(plain, r.prompt, heard.tokens[r.id]) for r in requests)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama-gqa", "head_centric"), ("gemma3", "token_major"), ("opt", None), ("gpt-oss", None), ("deepseek-v3", None)],
)
def test_a_cache_in_parts_gives_the_same_tokens(name: str, layout: str | None, engines: Any) -> None:
    model, asked = architectures.build(name), prompts([7, 40, 70], architectures.VOCAB)
    requests = [Request(prompt, 20) for prompt in asked]
    engine = engines(model, wrap={"shards": 4}, block_layout=layout or "head_centric")
    form, kv_heads = engine.kv_format, {"opt": 4, "deepseek-v3": 4}.get(name, 2)
    assert (engine.shards, form.kv_shards, form.heads) == (4, kv_heads, 1)
    assert sorted(n for layers, _ in form.groups for n in layers) == list(
        range(len(engine.reports.kv_room().sector_pages))
    )
    heard, plain = serve(engine, requests), architectures.build(name)
    for request in requests:
        assert len(heard.tokens[request.id]) == 20
        assert same_unless_close(plain, request.prompt, heard.tokens[request.id])


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_requests_get_the_tokens_that_they_get_alone_on_a_gpu(name: str, engines: Any) -> None:
    model = architectures.build(name, device="cuda:0")
    asked = prompts([1, 9, 40, 130], architectures.VOCAB)
    requests = [Request(p, 20) for p in asked]
    engine = engines(model, elastic.Place("cuda:0", torch.device("cuda:0"), 1 << 30))
    heard = serve(engine, requests)
    engine.stop()
    for request in requests:
        assert len(heard.tokens[request.id]) == 20
        assert same_unless_close(model, request.prompt, heard.tokens[request.id], close=1e-2)


@pytest.mark.parametrize("name", ["gemma", "gemma3", "gemma2", "gpt-oss", "deepseek-v3"])
def test_what_lies_in_blocks_that_nobody_wrote_changes_no_token(name: str, device: str, engines: Any) -> None:
    """Masked slots weigh 0, and 0 times NaN is NaN. Windows of 16 in blocks of 12: some slots are never written."""
    model = architectures.build(name, device=device)
    place = None if device == "cpu" else elastic.Place.parse(device)
    engine = engines(model, place, block_tokens=12, share_prefixes=False)
    asked = [Request(prompt, 20) for prompt in prompts([1, 13, 30], architectures.VOCAB)]
    expected = serve(engine, asked).tokens
    memory = engine._blocks.memory
    for ranges in memory.groups:
        nbytes = ranges.layer_pages * memory.kv.pool.page_bytes
        for layer, sector in itertools.product(ranges.group.layers, ranges.mapped):
            ranges.view(layer, torch.uint8)[sector * nbytes : (sector + 1) * nbytes] = 0xFF
    assert serve(engine, asked).tokens == expected
    engine.stop()
    for request in asked:  # of a NaN too, tokens would be the same again
        assert same_unless_close(model, request.prompt, expected[request.id], close=1e-3 if device == "cpu" else 1e-2)


@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", "gpt-oss", "deepseek-v3"])
def test_a_common_beginning_is_computed_once_and_changes_nothing(
    name: str, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = architectures.CONFIGS[name]()
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * 3  # windows keep no beginning
    monkeypatch.setitem(architectures.CONFIGS, name, lambda: config)
    model = architectures.build(name)
    common = prompts([64], architectures.VOCAB)[0]
    asked = [common + tail for tail in prompts([5, 9, 12], architectures.VOCAB, seed=2)]
    expected = [continuation(model, p, 8) for p in asked]
    engine = engines(model)
    serve(engine, [Request(common, 4)])
    seen: list[int] = []
    handle = model.register_forward_pre_hook(lambda m, a, k: seen.append(k["input_ids"].shape[1]), with_kwargs=True)
    requests = [Request(p, 8) for p in asked]
    heard = serve(engine, requests)
    handle.remove()
    assert sum(seen) < 3 * 64
    assert [heard.tokens[r.id] for r in requests] == expected
    assert engine.runtime.kv.used_bytes == 0, "blocks kept for reuse are not in use"


def test_a_forked_child_is_told_that_the_engine_serves_elsewhere() -> None:
    in_fork("""
        import os
        import elastic
        from elastic import StateError
        from elastic.engines.base import Request
        from elastic.engines.continuous import ContinuousEngine
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        model = elastic.wrap(LlamaForCausalLM(config).eval(), places=["cpu=64MiB"])
        engine = ContinuousEngine(model)
        engine.start()
        child = os.fork()
        if not child:
            try:
                engine.submit(Request((1, 2), 2), print)
            except StateError as error:
                os._exit(0 if "was forked" in str(error) else 2)
            os._exit(3)
        assert os.waitpid(child, 0)[1] == 0
        engine.stop(drain=False)
        elastic.unwrap(model)
    """)


def test_stop_tokens_end_a_request(engines: Any) -> None:
    model = architectures.build("llama-gqa")
    prompt = prompts([12], architectures.VOCAB)[0]
    tokens = continuation(model, prompt, 10)
    request = Request(prompt, 10, stop_tokens=(tokens[4],))
    heard = serve(engines(model), [request])
    assert heard.tokens[request.id] == tokens[: tokens.index(tokens[4]) + 1]
    assert heard.ends[request.id].finish == "stop"


def test_requests_are_sampled_each_by_its_own_rule(engines: Any) -> None:
    model = architectures.build("llama-gqa")
    prompt = prompts([12], architectures.VOCAB)[0]
    rules = [Sampling(), Sampling(1.5, seed=3), Sampling(1.5, seed=3), Sampling(1.5, seed=4), Sampling(9.0, top_k=1)]
    requests = [Request(prompt, 12, rule) for rule in rules]
    heard = serve(engines(model), requests)
    greedy, one, again, other, likeliest = (heard.tokens[r.id] for r in requests)
    assert one == again
    assert greedy == likeliest == continuation(model, prompt, 12)
    assert one not in (greedy, other)


def test_without_a_seed_each_request_is_sampled_anew(engines: Any) -> None:
    engine = engines(architectures.build("llama-gqa"))
    prompt = prompts([12], architectures.VOCAB)[0]
    requests = [Request(prompt, 12, Sampling(1.5)) for _ in range(6)]
    heard = serve(engine, requests)
    assert len({tuple(heard.tokens[request.id]) for request in requests}) == 6


@pytest.mark.parametrize("where", ["generation config", "config", "text config"])
@pytest.mark.parametrize("several", [False, True])
def test_a_models_own_end_tokens_end_a_request(where: str, several: bool, engines: Any) -> None:
    model = architectures.build("llama-gqa")
    prompt = prompts([12], architectures.VOCAB)[0]
    tokens = continuation(model, prompt, 10)
    text = architectures.CONFIGS["llama-gqa"]()
    with_one = model.generation_config if where == "generation config" else model.config
    engine = engines(model)
    if where == "text config":
        model.config.get_text_config = lambda decoder: text
        with_one = text
    with_one.eos_token_id = [tokens[4], 1] if several else tokens[4]
    asked, on = Request(prompt, 10), Request(prompt, 10, ignore_eos=True)
    heard = serve(engine, [asked, on])
    assert heard.tokens[asked.id] == tokens[: tokens.index(tokens[4]) + 1]
    assert heard.ends[asked.id].finish == "stop"
    assert heard.tokens[on.id] == tokens
    assert heard.ends[on.id].finish == "length"


def test_more_requests_than_fit_wait_and_none_is_computed_twice(engines: Any) -> None:
    model = architectures.build("llama-gqa")
    asked = prompts([40] * 12, architectures.VOCAB)
    place = tight(model, kv_pages=18)
    expected = [Continuation(architectures.plain("llama-gqa"), p, 30) for p in asked]
    engine = engines(model, place, share_prefixes=False)
    computed: list[int] = []
    model.register_forward_pre_hook(lambda m, a, k: computed.append(k["input_ids"].shape[1]), with_kwargs=True)
    requests = [Request(p, 30) for p in asked]
    heard = serve(engine, requests)
    assert [heard.tokens[r.id] for r in requests] == expected
    assert sum(computed) == 12 * (40 + 29)
    stats = engine.counters.read()
    assert (stats.step_tokens, sum(stats.steps_by_tokens)) == (sum(computed), len(computed))
    assert any(news.waited_for_kv_s for news in heard.first.values())
    assert all(news.scheduled_s <= news.at_s for news in heard.first.values())
    assert engine.counters.read().preemptions == 0


def test_a_request_that_never_fits_is_refused_and_the_others_go_on(engines: Any) -> None:
    model = architectures.build("llama-gqa")
    engine = engines(model, tight(model, kv_pages=6))
    with pytest.raises(CapacityError, match="300 tokens never fits"):
        engine.submit(Request((3,) * 200, 100), Collector())
    assert serve(engine, [Request((3, 4, 5), 4)]).ends


@pytest.mark.parametrize(
    ("prompt", "tokens", "words"),
    [
        ((), 3, "no token"),
        ((1,), 0, "max_tokens=0"),
        ((96,), 3, "token 96"),
        ((-1,), 3, "token -1"),
        ((1,), 512, "512"),
    ],
)
def test_requests_that_make_no_sense_are_refused_in_words(prompt: Any, tokens: int, words: str, engines: Any) -> None:
    with pytest.raises(ConfigError, match=words):
        engines(architectures.build("llama-gqa")).submit(Request(prompt, tokens), Collector())


def test_outputs_need_somebody_to_listen(engines: Any) -> None:
    with pytest.raises(ConfigError, match="listener=None cannot be"):
        engines(architectures.build("llama-gqa")).submit(Request((1,), 2), None)


def test_what_is_no_request_is_refused_in_words(engines: Any) -> None:
    engine = engines(architectures.build("llama-gqa"))
    for request in (5, None, "request", [1]):
        with pytest.raises(ConfigError, match=r"request=.* cannot be; it must be an elastic.Request"):
            engine.submit(request, Collector())
    with pytest.raises(ConfigError, match=r"request=\[\] cannot be; it must be the id"):
        engine.cancel([])
    with pytest.raises(ConfigError, match=r"most=2.5 cannot be"):
        engine.longest_request(2.5)


@pytest.mark.parametrize("option", ["max_queue", "max_requests", "max_batch_tokens", "block_tokens"])
@pytest.mark.parametrize("count", [0, -1, "16", 1.5, True])
def test_an_engine_that_could_take_no_request_is_not_made(option: str, count: Any) -> None:
    with pytest.raises(ConfigError, match=f"{option}={count!r} cannot be; it must be a whole number, at least 1"):
        ContinuousEngine(None, **{option: count})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("share_prefixes", "it must be True or False"),
        ("enforce_eager", "it must be True or False"),
        ("cuda_graphs", "it must be True or False"),
        ("step_budget", "it must be a StepBudget, or None"),
        ("grammars", "it must be a GrammarCompiler, or None"),
    ],
)
def test_an_engine_with_options_that_are_none_is_not_made(option: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}='off' cannot be; {words}"):
        ContinuousEngine(None, **{option: "off"})  # type: ignore[arg-type]


def test_an_engine_whose_blocks_are_larger_than_its_place_is_not_made(wrapped: Any) -> None:
    model = architectures.build("llama-gqa")
    wrapped(model, small(8 << 20))
    with pytest.raises(ConfigError, match=r"too few .* block_tokens"):
        ContinuousEngine(model, block_tokens=1 << 20)
    ContinuousEngine(model).stop()


@pytest.mark.parametrize(
    "rule",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"seed": 10**30},
    ],
    ids=str,
)
def test_rules_of_sampling_that_make_no_sense_are_refused_in_words(rule: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(rule))):
        Sampling(**rule)


def test_the_queue_is_bounded_if_asked(engines: Any) -> None:
    model = architectures.build("llama-gqa")
    go_on = threading.Event()
    engine = engines(model, max_queue=2, max_requests=1)
    model.register_forward_pre_hook(lambda module, args: go_on.wait(60) and None)
    heard, requests = Collector(), [Request((3, 4), 4) for _ in range(3)]
    engine.submit(requests[0], heard)
    while engine.counters.read().waiting:
        time.sleep(0.001)
    for request in requests[1:]:
        engine.submit(request, heard)
    with pytest.raises(Overloaded) as refused:
        engine.submit(Request((3, 4), 4), heard)
    assert refused.value.retry_after_s >= 1
    stats = engine.counters.read()
    assert (stats.rejected, stats.arrived, stats.prompt_tokens) == (1, 4, 3 * 2)
    go_on.set()
    heard.wait([request.id for request in requests])


def test_parts_of_one_call_are_no_queue_to_each_other(engines: Any) -> None:
    engine = engines(architectures.build("llama-gqa"), max_queue=2, max_requests=1)
    first = Request((3, 4, 5), 500)
    heard, parts = Collector(), [Request((3, 4), 4, parent="a") for _ in range(5)]
    engine.submit(first, heard)
    heard.wait_for_tokens(first.id, 3)
    for request in parts:
        engine.submit(request, heard)
    for refused in (Request((3, 4), 4), Request((3, 4), 4, parent="b")):
        with pytest.raises(Overloaded, match="5 requests wait"):
            engine.submit(refused, heard)
    engine.cancel(first.id)
    heard.wait([request.id for request in parts])


@pytest.mark.parametrize("name", ["llama-gqa", "gemma2"])
def test_the_longest_request_is_one_that_is_taken(name: str, engines: Any) -> None:
    engine = engines(architectures.build(name), small(2 << 20))
    most = engine.longest_request(1_000_000)
    engine.runtime.kv.resize(engine._blocks._sectors_for(40) * engine._memory.sector_pages * PAGE)
    now = engine.longest_request(1_000_000)
    assert 40 <= now < most == engine.longest_request(1_000_000, ever=True)
    assert engine.longest_request(30) == 30
    for tokens, refusal in ((now + 1, Overloaded), (most + 1, CapacityError)):
        with pytest.raises(refusal):
            engine._blocks.require_possible(tokens)
    heard, request = Collector(), Request((3, 4), now - 2, ignore_eos=True)
    engine.submit(request, heard)
    engine.cancel(request.id)
    heard.wait([request.id])


def test_requests_are_cancelled_wherever_they_are(engines: Any) -> None:
    model = architectures.build("llama-gqa")
    engine = engines(model, max_requests=1)
    heard = Collector()
    running, waiting = Request((3, 4, 5), 500), Request((3, 4), 500)
    engine.submit(running, heard)
    heard.wait_for_tokens(running.id, 3)
    engine.submit(waiting, heard)
    for request in (waiting, running):
        engine.cancel(request.id)
    heard.wait([running.id, waiting.id])
    assert {end.finish for end in heard.ends.values()} == {"cancelled"}
    engine.cancel(running.id)
    engine.cancel("unknown")
    assert serve(engine, [Request((3, 4, 5), 4)]).ends
    assert engine.runtime.kv.used_bytes == 0
    assert engine.counters.read().cancelled == 2


def test_a_forward_that_fails_ends_the_requests_in_it_and_no_other(engines: Any) -> None:
    model = architectures.build("llama-gqa")
    expected = continuation(model, (3, 4, 5), 8)
    engine = engines(model)
    faults = [RuntimeError("out of luck")]

    def fail(module: Any, args: Any) -> None:
        if faults:
            raise faults.pop()

    handle = model.register_forward_pre_hook(fail)
    first = Request((3, 4, 5), 8)
    heard = serve(engine, [first])
    assert (heard.ends[first.id].finish, heard.ends[first.id].error) == ("failed", "out of luck")
    handle.remove()
    second = Request((3, 4, 5), 8)
    assert serve(engine, [second]).tokens[second.id] == expected
    assert engine.runtime.kv.used_bytes == 0
    assert engine.serving


@pytest.mark.parametrize(
    "error", [ValueError("mine"), SystemExit(1), GeneratorExit(), asyncio.CancelledError(), KeyboardInterrupt()]
)
def test_a_listener_that_fails_hurts_nobody_else(error: BaseException, engines: Any) -> None:
    engine = engines(architectures.build("llama-gqa"))

    def bad(output: Any) -> None:
        raise error

    engine.submit(Request((3, 4), 4), bad)
    assert serve(engine, [Request((3, 4, 5), 4)]).ends


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_of_the_engine_ends_all_requests_also_where_one_cannot_be_ended(
    engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, heard = engines(architectures.build("llama-gqa"), max_requests=1), Collector()
    requests = [Request((3, 4, 5), 100) for _ in range(3)]
    scheduler = engine._loop.scheduler
    cancel = scheduler.cancel

    def fail(*names: str) -> Any:
        if names in ((), (requests[1].id,)):
            raise ZeroDivisionError("a fault of our own")
        return cancel(*names)

    monkeypatch.setattr(scheduler, "cancel", fail)
    for request in requests:
        engine.submit(request, heard)
    heard.wait_for_tokens(requests[0].id, 2)
    monkeypatch.setattr(scheduler, "schedule", fail)
    wait_until(lambda: not engine._loop.thread.is_alive())
    assert {name: end.finish for name, end in heard.ends.items()} == {
        requests[0].id: "cancelled", requests[2].id: "cancelled"
    }  # fmt: skip
    assert not engine.serving
    monkeypatch.undo()
    scheduler.cancel(requests[1].id)


@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", "gpt-oss", "deepseek-v3"])
def test_tokens_say_which_weights_computed_them_and_swaps_lose_nothing(name: str, engines: Any) -> None:
    model = exact(architectures.build(name))
    prompt = prompts([30], architectures.VOCAB)[0]
    expected = Continuation(exact(architectures.build(name)), prompt, 80)
    engine = engines(model, wrap={"variants": [HALF]})
    heard, request = Collector(), Request(prompt, 80)
    engine.submit(request, heard)
    heard.wait_for_tokens(request.id, 8)
    engine.runtime.swap([0, 2], "half")
    heard.wait_for_tokens(request.id, 24)
    engine.runtime.restore()
    heard.wait([request.id])
    assert heard.tokens[request.id] == expected
    full, half = ("float32",) * 3, ("half", "float32", "half")
    forms = [engine.weights[i] for i in heard.weights[request.id]]
    assert forms[0] == forms[-1] == full
    assert half in forms


def test_weights_migrate_while_requests_run_and_leave_room_for_more(engines: Any) -> None:
    model = exact(architectures.build("llama-gqa"))
    prompt = prompts([30], architectures.VOCAB)[0]
    expected = Continuation(exact(architectures.build("llama-gqa")), prompt, 150)
    engine = engines(model, [small(8 << 20, "cpu#a"), small(8 << 20, "cpu#b")])
    rt, heard, request = engine.runtime, Collector(), Request(prompt, 150)
    before = rt.kv.maximum_bytes
    engine.submit(request, heard)
    for tokens, target in ((20, [1, 2]), (50, "model.layers.0.mlp"), (80, 0)):
        heard.wait_for_tokens(request.id, tokens)
        rt.migrate(target, "cpu#b", kv=False)
        assert rt.kv.maximum_bytes > before
    rt.migrate(range(3), "cpu#a", kv=False)
    heard.wait([request.id])
    assert heard.tokens[request.id] == expected
    assert rt.kv.maximum_bytes == before


def test_swapped_layers_are_room_for_requests_and_return_when_they_can(engines: Any) -> None:
    model = exact(architectures.build("llama-gqa"))
    place = tight(model, kv_pages=12, variants=[HALF])
    engine = engines(model, place, wrap={"variants": [HALF]}, share_prefixes=False)
    before = engine.runtime.kv.maximum_bytes
    engine.runtime.swap(range(3), "half")
    assert engine.runtime.kv.maximum_bytes > before
    heard = Collector()
    requests = [Request(p, 60) for p in prompts([20] * 6, architectures.VOCAB)]
    for request in requests:
        engine.submit(request, heard)
    heard.wait_for_tokens(requests[0].id, 5)
    change = engine.runtime.restore()
    heard.wait([r.id for r in requests])
    assert [len(heard.tokens[r.id]) for r in requests] == [60] * 6
    assert change.status in ("applied", "deferred")
    engine.runtime.restore()
    assert engine.runtime.form() == ("float32",) * 3


def test_a_smaller_limit_lets_requests_in_later_and_ends_none(engines: Any) -> None:
    model = architectures.build("llama-gqa")
    asked = prompts([30] * 8, architectures.VOCAB)
    expected = [Continuation(architectures.plain("llama-gqa"), p, 40) for p in asked]
    engine = engines(model, share_prefixes=False)
    heard, requests = Collector(), [Request(p, 40) for p in asked]
    for request in requests:
        engine.submit(request, heard)
    heard.wait_for_tokens(requests[0].id, 3)
    small_limit = engine._blocks._sectors_for(70) * engine._memory.sector_pages * PAGE
    result = engine.runtime.kv.resize(small_limit)
    assert result.status in ("applied", "deferred")
    heard.wait([r.id for r in requests])
    assert [heard.tokens[r.id] for r in requests] == expected
    assert engine.runtime.kv.used_bytes == 0


def test_a_request_that_the_limit_has_no_room_for_is_told_and_those_before_it_wait(engines: Any) -> None:
    model = architectures.build("llama-gqa")
    (asked,) = prompts([30], architectures.VOCAB)
    expected = Continuation(architectures.plain("llama-gqa"), asked, 40)
    engine = engines(model, share_prefixes=False, max_requests=1)
    heard, (running, waiting) = Collector(), [Request(asked, 40) for _ in range(2)]
    go_on = threading.Event()
    handle = model.register_forward_pre_hook(lambda module, args: go_on.wait(60) and None)
    engine.submit(running, heard)
    while engine.counters.read().waiting:
        time.sleep(0.001)
    engine.submit(waiting, heard)
    limiting = engine.runtime.kv.resize(0, wait=False)
    go_on.set()
    handle.remove()
    assert limiting.result(60)[0].limit_bytes == 0
    heard.wait([running.id])
    with pytest.raises(Overloaded, match=r"limit is 0 now: raise it, kv.resize\(.max.\)") as refused:
        engine.submit(Request(asked, 40), heard)
    assert refused.value.retry_after_s > 0
    assert engine.counters.read().rejected == 1
    assert waiting.id not in heard.tokens
    engine.runtime.kv.resize("max")
    heard.wait([waiting.id])
    assert heard.tokens == {running.id: expected, waiting.id: expected}


def test_a_request_is_admitted_up_to_the_limit_and_not_above(engines: Any) -> None:
    model = architectures.build("llama-gqa")
    engine = engines(model)
    engine.runtime.kv.resize(engine._blocks._sectors_for(40) * engine._memory.sector_pages * PAGE)
    assert serve(engine, [Request((3,) * 30, 10)]).ends
    with pytest.raises(Overloaded, match="a request of 200 tokens needs"):
        engine.submit(Request((3,) * 150, 50), Collector())


def test_a_model_in_use_is_not_unwrapped(engines: Any) -> None:
    model = architectures.build("llama-gqa")
    engine = engines(model)
    with pytest.raises(StateError, match="stop it first"):
        elastic.unwrap(model)
    engine.stop()
    with pytest.raises(StateError, match="stopped"):
        engine.start()
    with pytest.raises(StateError, match="not serving"):
        engine.submit(Request((3, 4), 4), Collector())
    elastic.unwrap(model)


@pytest.mark.parametrize("drain", [True, False])
def test_stop_finishes_or_cancels_what_there_is(drain: bool, engines: Any) -> None:
    engine = engines(architectures.build("llama-gqa"), max_requests=2)
    heard, requests = Collector(), [Request((3, 4, 5), 100) for _ in range(5)]
    for request in requests:
        engine.submit(request, heard)
    heard.wait_for_tokens(requests[0].id, 2)
    engine.stop(drain=drain)
    assert {heard.ends[r.id].finish for r in requests} == {"length" if drain else "cancelled"}
    assert engine.runtime.kv.used_bytes == 0
    traffic = engine.counters.read()
    assert (traffic.waiting, traffic.running) == (0, 0)


def test_a_stop_that_was_interrupted_can_be_called_again(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = architectures.build("llama-gqa")
    engine, heard, request = engines(model), Collector(), Request((3, 4, 5), 100)
    engine.submit(request, heard)

    def interrupt(timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine._loop.thread, "join", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.stop()
    engine.stop(drain=False)
    assert request.id in heard.ends
    elastic.unwrap(model)


def test_a_stop_that_makes_no_sense_changes_nothing(engines: Any) -> None:
    engine = engines(architectures.build("llama-gqa"))
    for options in ({"timeout_s": "5"}, {"timeout_s": -1}, {"drain": "no"}):
        with pytest.raises(ConfigError, match=r"(timeout_s|drain)=.* cannot be"):
            engine.stop(**options)
    serve(engine, [Request((3, 4), 4)])


def test_the_model_generates_beside_its_engine(engines: Any) -> None:
    model = architectures.build("llama-gqa")
    prompt = prompts([20], architectures.VOCAB)[0]
    expected = continuation(model, prompt, 30)
    engine = engines(model)
    heard, request = Collector(), Request(prompt, 30)
    engine.submit(request, heard)
    assert continuation(model, prompt, 30) == expected
    heard.wait([request.id])
    assert heard.tokens[request.id] == expected


def test_a_forward_of_the_engine_leaves_the_config_alone_that_other_threads_read(engines: Any) -> None:
    """transformers writes an `is_causal` that a forward is given to the config, and other threads attend by it."""
    model = architectures.build("llama-gqa")
    engine, seen = engines(model), []
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: seen.append(hasattr(model.config, "is_causal")))
    serve(engine, [Request(prompts([20], architectures.VOCAB)[0], 4)])
    handle.remove()
    assert seen == [False] * 4


def test_no_mask_of_all_tokens_against_all_is_made(engines: Any) -> None:
    model = architectures.build("llama-gqa")
    engine, seen = engines(model), []
    layer = model.model.layers[1]
    handle = layer.register_forward_pre_hook(lambda m, a, k: seen.append(k["attention_mask"].numel()), with_kwargs=True)
    serve(engine, [Request(prompts([20], architectures.VOCAB)[0], 4)])
    handle.remove()
    assert seen == [1] * 4


def test_memory_is_back_at_its_start(engines: Any) -> None:
    model = architectures.build("llama-gqa")
    engine = engines(model)
    before = engine.runtime.status().places[0].owners
    assert engine.counters.read().arrived == 0
    serve(engine, [Request(p, 20) for p in prompts([50] * 10, architectures.VOCAB)])
    engine.stop()
    engine.runtime.kv.trim()
    assert {owner: size for owner, size in engine.runtime.status().places[0].owners.items() if size} == before


def test_many_threads_submit_and_cancel(engines: Any) -> None:
    engine = engines(architectures.build("llama-gqa"), max_requests=8)
    heard, names, lock = Collector(), [], threading.Lock()

    def client(seed: int) -> None:
        for i, prompt in enumerate(prompts([5 + seed, 9, 30], architectures.VOCAB, seed=seed)):
            request = Request(prompt, 12, id=f"{seed}-{i}")
            with lock:
                names.append(request.id)
            engine.submit(request, heard)
            if i == 1:
                engine.cancel(request.id)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    heard.wait(names)
    assert all(len(heard.tokens[name]) == 12 for name in names if not name.endswith("-1"))
    assert {heard.ends[name].finish for name in names if name.endswith("-1")} <= {"cancelled", "length"}


def test_models_that_it_cannot_serve_are_refused(wrapped: Any) -> None:
    model = architectures.build("llama-gqa")
    with pytest.raises(StateError, match="not wrapped"):
        ContinuousEngine(model)
    model.set_attn_implementation("flex_attention")
    wrapped(model, small(8 << 20))
    with pytest.raises(ConfigError, match="'flex_attention': continuous batching needs a model that was loaded with"):
        ContinuousEngine(model)
    assert model.elastic.status().kv[0].used_bytes == 0
    assert model.elastic.status().places[0].page_bytes == PAGE
    model.set_attn_implementation("sdpa")  # the other one would be compiled, for half a minute
    assert torch.is_tensor(model(torch.tensor([[3, 4]])).logits)


def test_an_eager_function_that_does_more_than_is_known_is_refused(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cap that is not in the call, as sinks are read from the module: it would be left out without a word."""
    stock = modeling_llama.eager_attention_forward

    def capped(*args: Any, **kwargs: Any) -> Any:
        return modeling_gemma2.eager_attention_forward(*args, **{**kwargs, "softcap": 50.0})

    for function, refused in ((capped, True), (stock, False)):
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", function)
        model = architectures.build("llama-gqa")
        model.set_attn_implementation("eager")
        wrapped(model, small(8 << 20))
        with pytest.raises(ConfigError, match="eager attention of LlamaAttention is not") if refused else nullcontext():
            ContinuousEngine(model).stop()
        elastic.unwrap(model)


@pytest.mark.parametrize("error", [KeyError("images"), AttributeError("images"), AssertionError("images")])
def test_a_model_that_cannot_be_called_with_tokens_alone_is_refused(error: Exception, wrapped: Any) -> None:
    model = wrapped(architectures.build("llama-gqa"), small(8 << 20))

    def fail(*_: Any) -> None:
        raise error

    model.model.norm.register_forward_pre_hook(fail)
    with pytest.raises(ConfigError, match=r"cannot call this model: .*Error\('images'\); use generate"):
        ContinuousEngine(model)


def test_a_model_that_makes_masks_of_its_own_is_refused(wrapped: Any) -> None:
    model = wrapped(architectures.build("llama-gqa"), small(8 << 20))

    def mask(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "attention_mask": kwargs["attention_mask"] & torch.ones(2, 2, dtype=torch.bool).tril()}

    model.model.layers[1].self_attn.register_forward_pre_hook(mask, with_kwargs=True)
    with pytest.raises(ConfigError, match="masks that the model makes"):
        ContinuousEngine(model)
