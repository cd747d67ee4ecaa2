"""What serving users ask for besides a continuation: several answers, log-probabilities, grammars, and to move on."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic import ConfigError, StateError
from elastic.engines.base import Grammar, Output, Request, Sampling, TokenLogprobs
from elastic.engines.continuous import ContinuousEngine
from elastic.engines.core.step import SequenceState
from support import architectures
from support.architectures import in_turn
from support.serving.generations import SERVED, Collector, continuation, prompts, same_unless_close, serve
from support.wrapped_model import small


@pytest.fixture
def engines(wrapped: Any) -> Iterator[Any]:
    """engine(model, **options), started over a wrapped copy of its own; stopped when the test ends."""
    made: list[ContinuousEngine] = []

    def engine(model: Any, **options: Any) -> ContinuousEngine:
        if getattr(model, "elastic", None) is None:
            wrapped(model, small(8 << 20))
        made.append(ContinuousEngine(model, **{"block_tokens": 8, "max_batch_tokens": 64, **options}))
        made[-1].start()
        return made[-1]

    yield engine
    for each in made:
        each.stop(drain=False)
        each._blocks.check()
        each.runtime.check()


class Answers(Collector):
    """Keeps all outputs, by answer."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[int, list[Output]] = {}

    def __call__(self, output: Output) -> None:
        with self._news:
            self.outputs.setdefault(output.index, []).append(output)
            self._news.notify_all()

    def wait_for_ends(self, answers: int) -> None:
        def ended() -> bool:
            return sum(outputs[-1].finish is not None for outputs in self.outputs.values()) == answers

        with self._news:
            assert self._news.wait_for(ended, 120), "answers did not end"

    def tokens_of(self, index: int) -> list[int]:
        return [token for output in self.outputs[index] for token in output.tokens]


def answers(engine: ContinuousEngine, request: Request) -> Answers:
    heard = Answers()
    engine.submit(request, heard)
    heard.wait_for_ends(request.n)
    return heard


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
def test_answers_of_one_request_are_those_of_requests_with_their_seeds(name: str, engines: Any) -> None:
    engine = engines(architectures.build(name))
    (asked,) = prompts([40], architectures.VOCAB)
    request = Request(asked, 12, Sampling(1.5, seed=7), n=4)
    first = [answers(engine, request).tokens_of(i) for i in range(4)]
    again = answers(engine, Request(asked, 12, Sampling(1.5, seed=7), n=4))
    assert [again.tokens_of(i) for i in range(4)] == first
    assert len({tuple(tokens) for tokens in first}) > 1


def test_answers_of_one_request_share_the_blocks_of_its_prompt(engines: Any) -> None:
    model = architectures.build("llama-gqa")
    engine, counts = engines(model), []
    handle = model.register_forward_pre_hook(lambda m, a, k: counts.append(k["input_ids"].shape[1]), with_kwargs=True)
    (asked,) = prompts([64], architectures.VOCAB)
    heard = answers(engine, Request(asked, 5, n=4))
    handle.remove()
    expected = continuation(model, asked, 5)
    assert all(heard.tokens_of(i) == expected for i in range(4))
    assert sum(counts) == 64 + 3 * 8 + 4 * 4, "seven of eight blocks are computed once"
    assert [heard.outputs[i][0].cached_tokens for i in range(4)] == [0, 56, 56, 56]


def test_one_answer_is_cancelled_and_the_others_go_on(engines: Any) -> None:
    engine = engines(architectures.build("llama-gqa"))
    heard, request = Answers(), Request(prompts([9], architectures.VOCAB)[0], 200, n=3)
    engine.submit(request, heard)
    with heard._news:
        assert heard._news.wait_for(lambda: len(heard.outputs) == 3, 60)
    engine.cancel(request.id, 1)
    heard.wait_for_ends(3)
    assert [heard.outputs[i][-1].finish for i in range(3)] == ["length", "cancelled", "length"]
    assert engine.counters.read().running == 0


def plain_logprobs(model: Any, text: Sequence[int]) -> torch.Tensor:
    """[tokens - 1, vocabulary]: of each token but the first."""
    return torch.log_softmax(model(torch.tensor([list(text)]), use_cache=False).logits[0, :-1].float(), -1)


def assert_same(given: Sequence[TokenLogprobs | None], plain: torch.Tensor, tokens: Sequence[int], count: int) -> None:
    for each, row, token in zip(given, plain, tokens, strict=True):
        assert each is not None
        assert each.token == token
        assert each.logprob == pytest.approx(row[token].item(), abs=2e-4)
        assert [value for _, value in each.top] == pytest.approx(row.topk(count).values.tolist(), abs=2e-4)
        assert each.rank <= count or each.logprob <= each.top[-1][1] + 1e-4


@pytest.mark.parametrize("name", sorted(SERVED))
def test_log_probabilities_are_those_of_the_plain_model(name: str, engines: Any) -> None:
    model = architectures.build(name)
    engine = engines(model, max_batch_tokens=16)
    (asked,) = prompts([40], architectures.VOCAB)
    request = Request(asked, 6, Sampling(1.0, seed=1), logprobs=3, prompt_logprobs=2, n=2)
    heard = answers(engine, request)
    for index in range(2):
        tokens = heard.tokens_of(index)
        plain = plain_logprobs(model, [*asked, *tokens])
        given = [each for output in heard.outputs[index] for each in output.logprobs]
        assert_same(given, plain[len(asked) - 1 :], tokens, 3)
        prompt = heard.outputs[index][0].prompt_logprobs
        if index:
            assert prompt is None
        else:
            assert prompt is not None
            assert prompt[0] is None
            assert_same(prompt[1:], plain[: len(asked) - 1], asked[1:], 2)


def test_prompt_log_probabilities_are_whole_although_others_share_the_beginning(engines: Any) -> None:
    engine = engines(architectures.build("llama-gqa"))
    (asked,) = prompts([40], architectures.VOCAB)
    serve(engine, [Request(asked, 4)])
    heard = answers(engine, Request(asked, 2, prompt_logprobs=0))
    prompt = heard.outputs[0][0].prompt_logprobs
    assert prompt is not None
    assert len(prompt) == 40


RULES = [Sampling(), Sampling(1.3, seed=5), Sampling(0.9, top_p=0.9, frequency_penalty=0.5, seed=6)]


@pytest.mark.parametrize(("rule", "name"), in_turn(RULES, ["llama-gqa", "gemma3"]))
def test_a_request_goes_on_in_another_engine_with_the_same_tokens(name: str, rule: Sampling, engines: Any) -> None:
    here, there = (engines(architectures.build(name), max_batch_tokens=16) for _ in range(2))
    (asked,) = prompts([30], architectures.VOCAB)
    expected = answers(here, Request(asked, 30, rule, n=2))
    choose = random.Random(name)
    for _ in range(3):
        request, heard = Request(asked, 30, rule, n=2), Answers()
        here.submit(request, heard)
        until = choose.randint(0, 22)
        with heard._news:
            heard._news.wait_for(lambda n=until, h=heard: n == 0 or len(h.outputs.get(0, ())) >= n, 60)
        states = here.export(request.id)
        assert here.export(request.id) == ()
        counts = {state.index: len(state.generated) for state in states}
        assert counts == {i: len(heard.tokens_of(i)) if i in heard.outputs else 0 for i in counts}
        if states:
            there.adopt(states, heard)
        heard.wait_for_ends(2)
        for i in range(2):
            assert heard.tokens_of(i) == expected.tokens_of(i)
    assert here.runtime.kv.used_bytes == there.runtime.kv.used_bytes == 0
    assert here.counters.read().running == there.counters.read().running == 0


@pytest.mark.parametrize("after", [5, 12])
def test_a_request_that_the_listener_of_another_exports_loses_no_token(after: int, engines: Any) -> None:
    """Although its token of the same step, the last one after 12, was not told yet."""
    here, there = (engines(architectures.build("llama-gqa")) for _ in range(2))
    one, other = (Request((3, 4, 5), 12) for _ in range(2))
    told, heard, exported, left = Answers(), Answers(), [], threading.Event()

    def listener(output: Output) -> None:
        told(output)
        if len(told.tokens_of(0)) == after:
            exported.extend(here.export(other.id))
            left.set()

    here.exchange.pause()  # until both are there: they are in the same steps
    here.submit(one, listener)
    here.submit(other, heard)
    here.exchange.resume()
    assert left.wait(60)
    assert [len(state.generated) for state in exported] == [after - 1]
    assert len(heard.tokens_of(0)) == after - 1
    there.adopt(exported, heard)
    for each in (told, heard):
        each.wait_for_ends(1)
    assert heard.tokens_of(0) == told.tokens_of(0)


def test_a_request_that_cannot_be_exported_by_a_listener_goes_on_or_is_told_its_end(engines: Any) -> None:
    """One that the engine's thread has not taken yet, and one of the same failed step."""
    model = architectures.build("llama-gqa")
    engine = engines(model, enforce_eager=True)
    one, other, late = (Request((3, 4, 5), 4) for _ in range(3))
    told, heard, of_late, exported = Answers(), Answers(), Answers(), []

    def listener(output: Output) -> None:
        if not told.outputs:
            engine.submit(late, of_late)
        exported.append(engine.export(other.id if output.finish else late.id))
        told(output)

    def fail(*_: Any) -> None:
        if told.outputs:
            hook.remove()
            raise RuntimeError("no memory")

    engine.exchange.pause()
    engine.submit(one, listener)
    engine.submit(other, heard)
    hook = model.register_forward_pre_hook(fail)
    engine.exchange.resume()
    for each in (told, heard, of_late):
        each.wait_for_ends(1)
    assert exported == [(), ()]
    assert [each.outputs[0][-1].finish for each in (told, heard)] == ["failed"] * 2


class BreakableGrammars:
    """Grammars that allow every token; matchers that are in `broken` cannot be followed any further."""

    def __init__(self) -> None:
        self.broken: set[tuple[str, int]] = set()
        """The text of a grammar, and which of its matchers: the first one is that of `submit`."""
        self._made: Counter[str] = Counter()

    def matcher(self, grammar: Grammar) -> Any:
        self._made[grammar.text] += 1
        return SimpleNamespace(fill_mask=partial(self._fill, (grammar.text, self._made[grammar.text])), accept=id)

    def _fill(self, matcher: tuple[str, int], mask: torch.Tensor) -> None:
        if matcher in self.broken:
            raise ConfigError("too complex")
        mask.fill_(-1)


def test_a_listener_exports_no_request_of_which_an_answer_failed_in_the_same_step(engines: Any) -> None:
    """Its failed answer would be lost: it is told of that, and the other one goes on."""
    grammars, told, heard, exported = BreakableGrammars(), Answers(), Answers(), []
    engine = engines(architectures.build("llama-gqa"), grammars=grammars)
    one, other = (Request((3, 4, 5), 20, n=n, grammar=Grammar("regex", text)) for n, text in ((1, "a"), (2, "b")))

    def listener(output: Output) -> None:
        if output.finish:
            exported.append(engine.export(other.id))
        elif len(heard.outputs) == 2:
            grammars.broken |= {("a", 2), ("b", 3)}
        told(output)

    engine.exchange.pause()
    engine.submit(one, listener)
    engine.submit(other, heard)
    engine.exchange.resume()
    told.wait_for_ends(1)
    heard.wait_for_ends(2)
    assert exported == [()]
    assert [heard.outputs[i][-1].finish for i in range(2)] == ["length", "failed"]


def test_a_request_comes_back_to_the_engine_that_a_listener_exported_it_from(engines: Any) -> None:
    """Its token of the same step, which was not told, is computed anew: it is told once."""
    engine = engines(architectures.build("llama-gqa"))
    one, other = (Request((3, 4, 5), 12) for _ in range(2))
    told, heard = Answers(), Answers()

    def listener(output: Output) -> None:
        told(output)
        if len(told.tokens_of(0)) == 5:
            engine.adopt(engine.export(other.id), heard)

    engine.exchange.pause()
    engine.submit(one, listener)
    engine.submit(other, heard)
    engine.exchange.resume()
    for each in (told, heard):
        each.wait_for_ends(1)
    assert heard.tokens_of(0) == told.tokens_of(0)


def test_a_request_is_cancelled_while_the_engine_drains(engines: Any) -> None:
    model = architectures.build("llama-gqa")
    engine, heard, request = engines(model), Answers(), Request((3, 4, 5), 400)
    engine.submit(request, heard)
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    while engine.serving:
        time.sleep(0.001)
    engine.cancel(request.id)
    stopping.join(60)
    assert not stopping.is_alive()
    assert heard.outputs[0][-1].finish == "cancelled"


def test_an_engine_that_was_not_started_exports_nothing(wrapped: Any) -> None:
    model = architectures.build("llama-gqa")
    wrapped(model, small(8 << 20))
    engine = ContinuousEngine(model)
    with pytest.raises(StateError, match="start it"):
        engine.export("unknown")
    engine.stop()


def test_what_cannot_be_adopted_is_refused_in_words(engines: Any) -> None:
    engine = engines(architectures.build("llama-gqa"))
    with pytest.raises(ConfigError, match="at least one"):
        engine.adopt((), Answers())
    request = Request((3, 4), 5, n=2, id="a")
    state = SequenceState("a[0]", request, 0, 0)
    for twice in (state, SequenceState("a[0]", request, 1, 0), SequenceState("a[1]", request, 0, 0)):
        with pytest.raises(ConfigError, match=r"2 sequences .*a\[0\].* twice"):
            engine.adopt([state, twice], Answers())
    for token in (-1, architectures.VOCAB):
        with pytest.raises(ConfigError, match=f"token {token} is none of the model's"):
            engine.adopt([replace(state, generated=(3, token))], Answers())
    with pytest.raises(ConfigError, match="waited_s='5' cannot be"):
        engine.adopt([state], Answers(), waited_s="5")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="listener=None cannot be"):
        engine.adopt([state], None)  # type: ignore[arg-type]
    heard = Answers()
    engine.adopt([state], heard)
    heard.wait_for_ends(1)
    engine.stop()
    with pytest.raises(StateError):
        engine.export("unknown")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 0}, "n=0"),
        ({"min_tokens": 9}, "min_tokens=9"),
        ({"grammar": Grammar("regex", "a+")}, "grammars="),
        ({"logprobs": 1000}, "logprobs"),
        ({"sampling": Sampling(logit_bias=((96, 1.0),))}, "logit_bias"),
    ],
)
def test_wishes_that_make_no_sense_are_refused_in_words(options: Any, words: str, engines: Any) -> None:
    engine = engines(architectures.build("llama-gqa"))
    with pytest.raises(ConfigError, match=words):
        engine.submit(Request((3, 4), 4, **options), Answers())
    assert engine.counters.read().waiting == 0


@pytest.mark.parametrize("layout", ["head_centric", "token_major"])
def test_cohorts_and_layouts_change_no_token(layout: str, engines: Any) -> None:
    model = architectures.build("llama-gqa")
    asked = prompts([5, 17, 30, 44], architectures.VOCAB)
    expected = [continuation(model, prompt, 12) for prompt in asked]
    requests = [Request(prompt, 12) for prompt in asked]
    heard = serve(engines(model, block_layout=layout, cohorts=2), requests)
    for request, plain in zip(requests, expected, strict=True):
        assert heard.tokens[request.id] == plain or same_unless_close(model, request.prompt, heard.tokens[request.id])
