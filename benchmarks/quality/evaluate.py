"""The cost in quality of a run's changes of precision: its requests replayed under the weights that computed them.

A server records, for each token, which weights computed it (`Engine.weights`, `Output.weights`). Here the layers of a
wrapped model are really swapped between the tokens, so that each is computed as it was, over a cache whose entries come
from the weights of their time: what was written in int4 is attended in full precision, and the other way round. Two
things are asked of each request, against its *reference*, the greedy continuation in full precision:

    the text        what the recorded weights say greedily; ROUGE-L against the reference, and how likely the text is
                    to the full-precision model
    the likelihood  the reference is forced on the model, token by token, under the recorded weights; the *loss* is the
                    mean negative log-likelihood of its tokens, less that in full precision, in nats per token

The loss is the finer of the two: a text that leaves the reference at one close call is rarely found back, and ROUGE-L
tells such a text, perhaps as good, from a bad one only in the mean over many.

Caveats. Replays are greedy, whatever the requests were, and run for as many tokens as were recorded: a token that would
end the text does not. Both the text and the forced reference are rows of one batch, so packed products go by the paths
for that number of tokens (docs/quantization.md); a server with another number of running requests may have used other
paths of the same precision. The likelihood is of the reference, the model's own favourite: it is higher than that of
text of others, and so is what a disturbance costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.errors import ConfigError
from quality.greedy_replay import GreedyReplayer, PrefixToScore, in_groups
from quality.rouge import rouge_l

Progress = Callable[[int, int], None]
"""Called with the number of requests done and their total."""


@dataclass(frozen=True)
class ReplayedRequest:
    """A request, and the weights that computed it: indices into the forms of the run (`Engine.weights`)."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    weights: tuple[int, ...]
    """The index for each generated token; at least one."""
    prompt_weights: tuple[int, ...] = ()
    """The index for each token of the prompt, if it differs from the first generated one's. The last token of the
    prompt gives the first generated one, so it has the weights of that."""


@dataclass(frozen=True)
class RequestQuality:
    """The quality of one request. Likelihoods are means over its tokens, in nats (negative logarithms)."""

    reference: tuple[int, ...]
    """The greedy continuation in full precision."""
    text: tuple[int, ...]
    """The greedy continuation under the recorded weights."""
    full_nats: float
    """Nats of the reference, in full precision."""
    nats: float
    """Nats of the reference, forced under the recorded weights."""
    text_nats: float
    """Nats of the text, in full precision."""
    agreement: float
    """The share of the reference's tokens that the recorded weights find the likeliest, when it is forced."""
    rouge_l: float
    """ROUGE-L of the text against the reference, by token ids."""

    @property
    def loss(self) -> float:
        """Nats per token that the recorded weights lose on the reference; may be below zero by chance."""
        return self.nats - self.full_nats


@dataclass(frozen=True)
class Quality:
    """The quality of all requests of a run. Means are over tokens, but for `rouge_l`: over requests."""

    requests: tuple[RequestQuality, ...] = field(repr=False)
    """The requests in the order in which they were given."""

    @property
    def tokens(self) -> int:
        """The number of generated tokens of all requests."""
        return sum(len(request.reference) for request in self.requests)

    @property
    def full_nats(self) -> float:
        return self._over_tokens(lambda request: request.full_nats)

    @property
    def text_nats(self) -> float:
        return self._over_tokens(lambda request: request.text_nats)

    @property
    def loss(self) -> float:
        """Nats per token lost on the references; perplexity grows by the factor `exp(loss)`."""
        return self._over_tokens(lambda request: request.loss)

    @property
    def lost_likelihood(self) -> float:
        """The loss as a share: how much of a token's likelihood is lost, in the geometric mean; .01 is one percent."""
        return -math.expm1(-self.loss)

    @property
    def agreement(self) -> float:
        return self._over_tokens(lambda request: request.agreement)

    @property
    def rouge_l(self) -> float:
        return sum(request.rouge_l for request in self.requests) / len(self.requests)

    def summary(self) -> dict[str, float]:
        """Return the figures by name, for a result file."""
        names = ("tokens", "full_nats", "text_nats", "loss", "lost_likelihood", "agreement", "rouge_l")
        return {name: getattr(self, name) for name in names}

    def _over_tokens(self, value: Callable[[RequestQuality], float]) -> float:
        return sum(len(request.reference) * value(request) for request in self.requests) / self.tokens


def share_of_loss(quality: Quality, static: Quality) -> float | None:
    """Return the share of a static variant's loss that a run has; 0 is full precision, 1 the static variant.

    `static` are the same requests with all layers in the variant throughout. None where that loses nothing, so that
    there is nothing to have a share of. Raises `ConfigError` if the requests are not the same.
    """
    if [request.reference for request in quality.requests] != [request.reference for request in static.requests]:
        raise ConfigError("the two qualities are not of the same requests: replay the same ones under both")
    return quality.loss / static.loss if static.loss > 0 else None


class QualityReplayer:
    """A replayer of runs with one wrapped model, which generates each reference once for all runs.

    `model` is wrapped with the variants that the runs had, with pages for a cache of 2 `batch` rows, and used by nobody
    else meanwhile. All its layers are restored before and after. Up to `batch` requests that kept one and the same
    state throughout are replayed at once; those that saw a change, one by one. `batch=1` pads nothing, which models
    without `position_ids` need.
    """

    def __init__(self, model: Any, *, batch: int = 8) -> None:
        if batch < 1:
            raise ConfigError(f"batch={batch} must be at least 1")
        self._player = GreedyReplayer(model)
        self._batch = batch
        self._references: dict[PrefixToScore, tuple[tuple[int, ...], float]] = {}
        self._scored: dict[PrefixToScore, RequestQuality] = {}

    def replay(
        self, requests: Sequence[ReplayedRequest], forms: Sequence[Sequence[str]], *, progress: Progress | None = None
    ) -> Quality:
        """Return the quality of one run. `forms` are the layers' variants, by which requests say what computed them.

        A released layer computes what a full one does, and counts as one. Raises `ConfigError` for a request that makes
        no sense and for variants that the model does not have, `CapacityError` or `StateError` if pages are short.
        """
        if not requests:
            raise ConfigError("requests is empty: there is nothing to replay")
        with self._player:
            jobs = [self._job(request, forms) for request in requests]
            self._refer(dict.fromkeys(self._reference(job) for job in jobs))
            new = list(dict.fromkeys(job for job in jobs if job not in self._scored))
            done = len(jobs) - len(new)
            for group in in_groups(new, self._batch):
                self._scored.update(zip(group, self._measure(group), strict=True))
                done += len(group)
                if progress is not None:
                    progress(done, len(jobs))
        return Quality(tuple(self._scored[job] for job in jobs))

    def _job(self, request: ReplayedRequest, forms: Sequence[Sequence[str]]) -> PrefixToScore:
        _check(request, len(forms))
        before = request.prompt_weights or request.weights[:1] * len(request.prompt)
        used = {index: self._player.form(forms[index]) for index in {*before, *request.weights}}
        return PrefixToScore(request.prompt, tuple(used[index] for index in (*before, *request.weights[1:])))

    def _reference(self, job: PrefixToScore) -> PrefixToScore:
        return PrefixToScore(job.prompt, (self._player.full,) * len(job.forms))

    def _refer(self, jobs: Iterable[PrefixToScore]) -> None:
        """Generate references; in full precision each is its own replay."""
        for group in in_groups([job for job in jobs if job not in self._references], self._batch):
            for job, row in zip(group, self._player.play(group, [None] * len(group)), strict=True):
                self._references[job] = row.tokens, row.nats
                self._scored[job] = RequestQuality(row.tokens, row.tokens, row.nats, row.nats, row.nats, 1.0, 1.0)

    def _measure(self, group: list[PrefixToScore]) -> list[RequestQuality]:
        """Text and forced reference of each job, side by side in one batch."""
        references = [self._references[self._reference(job)] for job in group]
        forced = [None if kind == "text" else tokens for kind in ("text", "forced") for tokens, _ in references]
        rows = self._player.play(group * 2, forced)
        texts, forced_rows = rows[: len(group)], rows[len(group) :]
        self._player.set(self._player.full)
        return [
            RequestQuality(
                reference=tokens,
                text=text.tokens,
                full_nats=nats,
                nats=row.nats,
                text_nats=nats if text.tokens == tokens else self._player.nats(job.prompt, text.tokens),
                agreement=row.likeliest,
                rouge_l=rouge_l(text.tokens, tokens),
            )
            for job, (tokens, nats), text, row in zip(group, references, texts, forced_rows, strict=True)
        ]


def _check(request: ReplayedRequest, forms: int) -> None:
    """Raise `ConfigError` for a request that makes no sense."""
    if not request.prompt or not request.weights:
        raise ConfigError("a request to replay needs a token of prompt and one generated token, at least")
    if request.prompt_weights and (
        len(request.prompt_weights) != len(request.prompt) or request.prompt_weights[-1] != request.weights[0]
    ):
        raise ConfigError(
            f"prompt_weights={request.prompt_weights} must be one for each of the {len(request.prompt)} tokens of the "
            f"prompt, the last as the first generated token ({request.weights[0]})"
        )
    unknown = {index for index in (*request.prompt_weights, *request.weights) if not 0 <= index < forms}
    if unknown:
        raise ConfigError(f"weights {sorted(unknown)} are not recorded: there are {forms} forms")
