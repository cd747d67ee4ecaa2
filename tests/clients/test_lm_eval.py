"""lm-eval's `local-completions`: likelihoods of continuations through `echo` with log-probabilities, and texts."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.assets import MODEL_DIR
from support.serving.fake_engine import FakeEngine, logprobs_at
from support.serving.live_server import FAKE, NAME, TOKENIZER, answer, live

completions = pytest.importorskip("lm_eval.models.openai_completions")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def model(url: str, **options: Any) -> Any:
    kind = completions.LocalCompletionsAPI
    return kind(model=NAME, base_url=f"{url}/v1/completions", tokenizer=str(MODEL_DIR), **{"batch_size": 3, **options})


def test_likelihoods_of_continuations() -> None:
    from lm_eval.api.instance import Instance

    pairs = [("def f", "(x):"), ("import", " os"), ("class A", ":\n    pass"), ("x", " = 1")]
    with live(FakeEngine()) as server:
        requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
        got = model(server.url).loglikelihood(requests)
    for (context, continuation), (likelihood, greedy) in zip(pairs, got, strict=True):
        ids, start = TOKENIZER.encode(context + continuation), len(TOKENIZER.encode(context))
        known = [logprobs_at(token, i, 1) for i, token in enumerate(ids)][start:]
        assert likelihood == pytest.approx(sum(entry.logprob for entry in known))
        assert greedy == all(entry.rank == 1 for entry in known)


def test_texts_until_a_stop() -> None:
    from lm_eval.api.instance import Instance

    options = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    with live(FakeEngine()) as server:
        got = model(server.url).generate_until([Instance("generate_until", {}, ("import os", options), 0)])
    assert got == [answer(FAKE, "import os", 12)[0]]
