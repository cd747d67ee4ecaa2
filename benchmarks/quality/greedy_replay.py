"""Greedy generation by a wrapped model whose layers are swapped between the tokens, as a record of them says."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from elastic.errors import ConfigError, StateError
from elastic.runtime.runtime import runtime
from elastic.types import Action, Restore, Swap
from elastic.weights.decoder import cache_argument, returned_cache

ReplayPrecision = tuple[str, ...]
"""The variant of each layer; full precision has the name of its dtype."""
PAD = 0


@dataclass(frozen=True)
class PrefixToScore:
    """A prompt, and the precision for each token fed: those of the prompt, and all generated ones but the last."""

    prompt: tuple[int, ...]
    forms: tuple[ReplayPrecision, ...]

    @property
    def new(self) -> int:
        """The number of tokens that are generated."""
        return len(self.forms) - len(self.prompt) + 1

    @property
    def constant(self) -> bool:
        """True if one precision computes all of it."""
        return all(form is self.forms[0] or form == self.forms[0] for form in self.forms)


@dataclass(frozen=True)
class ScoredRow:
    """The tokens and likelihoods of one row of a batch."""

    tokens: tuple[int, ...]
    nats: float
    """The mean negative log-likelihood of the tokens."""
    likeliest: float
    """The share of the tokens that were the likeliest."""


def in_groups(jobs: Sequence[PrefixToScore], batch: int) -> Iterator[list[PrefixToScore]]:
    """Yield jobs that can be played as one batch, in an order with few swaps and little padding."""
    ordered = sorted(jobs, key=lambda job: (job.constant, job.forms[0], job.new, len(job.prompt)))
    for (constant, _), alike in groupby(ordered, key=lambda job: (job.constant, job.forms[0])):
        same, size = list(alike), batch if constant else 1
        yield from (same[i : i + size] for i in range(0, len(same), size))


class GreedyReplayer:
    """A wrapped model whose layers are swapped between tokens; a context that begins and ends with all of them full."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._runtime = runtime(model)
        takes = inspect.signature(model.forward).parameters
        self._cache_name = cache_argument(model)
        self._last_logits = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self.full: ReplayPrecision = ()
        self._now: ReplayPrecision = ()

    def __enter__(self) -> GreedyReplayer:
        _require_applied(self._runtime.restore().deferred)
        self.full = self._now = tuple(where[0].variant for where in self._runtime.status().residencies.values())
        return self

    def __exit__(self, *error: object) -> None:
        self._runtime.restore()

    def form(self, layers: Sequence[str]) -> ReplayPrecision:
        """Return a recorded precision, with released layers as the full ones that they compute as.

        Raises `ConfigError` for another number of layers.
        """
        if len(layers) != len(self.full):
            raise ConfigError(f"a form of {len(layers)} layers was recorded; the model has {len(self.full)}")
        return tuple(full if name == "absent" else name for name, full in zip(layers, self.full, strict=True))

    def set(self, form: ReplayPrecision) -> None:
        """Swap and restore the layers that differ."""
        wanted: dict[str, list[int]] = {}
        for index, (name, now) in enumerate(zip(form, self._now, strict=True)):
            if name != now:
                wanted.setdefault("" if name == self.full[index] else name, []).append(index)
        if not wanted:
            return
        actions: list[Action] = [Swap(tuple(w), name) if name else Restore(tuple(w)) for name, w in wanted.items()]
        changes = self._runtime.apply(actions, why="quality replay")
        _require_applied([layer for change in changes for layer in change.deferred])
        self._now = form

    @torch.no_grad()
    def play(self, jobs: Sequence[PrefixToScore], forced: Sequence[tuple[int, ...] | None]) -> list[ScoredRow]:
        """Generate for jobs of the same precision, as one batch; a row with forced tokens goes on with those."""
        batch = _Batch(jobs, self._model.device)
        new = max(job.new for job in jobs)
        forms = jobs[0].forms + jobs[0].forms[-1:] * (batch.length + new)  # several jobs keep one form throughout
        rows = [[*(tokens or ()), *[PAD] * (new - len(tokens or ()))] for tokens in forced]
        given = torch.tensor(rows, device=batch.device)
        free = torch.tensor([tokens is None for tokens in forced], device=batch.device)
        logits, cache = self._prompt(batch, forms)
        chosen, nats, likeliest = [], [], []
        for k in range(new):
            best = logits.argmax(-1)
            chosen.append(torch.where(free, best, given[:, k]))
            nats.append(nn.functional.cross_entropy(logits.float(), chosen[-1], reduction="none").double())
            likeliest.append(chosen[-1] == best)
            if k + 1 < new:
                self.set(forms[batch.length + k])
                logits = self._model(chosen[-1][:, None], **{self._cache_name: cache}, **batch.next()).logits[:, -1]
        return _rows(jobs, torch.stack(chosen, 1), torch.stack(nats, 1), torch.stack(likeliest, 1))

    @torch.no_grad()
    def nats(self, prompt: tuple[int, ...], text: tuple[int, ...]) -> float:
        """Return the mean negative log-likelihood of a text after a prompt, by the present weights, in one pass."""
        ids = torch.tensor([[*prompt, *text]], device=self._model.device)
        logits = self._model(ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
        return float(nn.functional.cross_entropy(logits.float(), ids[0, len(prompt) :]).double())

    def _prompt(self, batch: _Batch, forms: tuple[ReplayPrecision, ...]) -> tuple[torch.Tensor, Any]:
        """Return the last logits of the prompts, [rows, vocabulary], and their cache; each precision takes one pass."""
        cache, logits, begin = None, torch.empty(0), 0
        for form, tokens in groupby(forms[: batch.length]):
            end = begin + len(list(tokens))
            self.set(form)
            out = self._model(
                **batch.chunk(begin, end), **{self._cache_name: cache}, use_cache=True, **self._last_logits
            )
            cache, logits, begin = returned_cache(out), out.logits[:, -1], end
        return logits, cache


class _Batch:
    """Prompts, padded on the left if their lengths differ, and the positions of their next tokens."""

    def __init__(self, jobs: Sequence[PrefixToScore], device: torch.device) -> None:
        self.device = device
        self.length = max(len(job.prompt) for job in jobs)
        pads = [self.length - len(job.prompt) for job in jobs]
        rows = [[PAD] * pad + list(job.prompt) for pad, job in zip(pads, jobs, strict=True)]
        self._ids = torch.tensor(rows, device=device)
        self._ends = torch.tensor([[len(job.forms) - 1] for job in jobs], device=device)
        self._mask = torch.tensor([[0] * p + [1] * (self.length - p) for p in pads], device=device)
        self._padded = any(pads)

    def chunk(self, begin: int, end: int) -> dict[str, torch.Tensor]:
        """Return the model's arguments for some tokens of the prompts, each int64 [rows, tokens]."""
        ids = {"input_ids": self._ids[:, begin:end]}
        if not self._padded:
            return ids
        positions = (self._mask.cumsum(-1) - 1).clamp(min=0)[:, begin:end]
        return {**ids, "attention_mask": self._mask[:, :end], "position_ids": positions}

    def next(self) -> dict[str, torch.Tensor]:
        """Return the arguments for one more token: mask, [rows, tokens], and positions, [rows, 1], both int64.

        A row that has all of its own stays at its last position.
        """
        if not self._padded:
            return {}
        self._mask = nn.functional.pad(self._mask, (0, 1), value=1)
        positions = self._mask.sum(-1, keepdim=True) - 1
        return {"attention_mask": self._mask, "position_ids": positions.minimum(self._ends)}


def _rows(
    jobs: Sequence[PrefixToScore], tokens: torch.Tensor, nats: torch.Tensor, likeliest: torch.Tensor
) -> list[ScoredRow]:
    return [
        ScoredRow(
            tuple(tokens[i, : job.new].tolist()),
            float(nats[i, : job.new].mean()),
            float(likeliest[i, : job.new].double().mean()),
        )
        for i, job in enumerate(jobs)
    ]


def _require_applied(deferred: Sequence[int]) -> None:
    if deferred:
        raise StateError(
            f"layers {sorted(deferred)} wait for pages, so quality cannot be replayed; give the place a larger budget, "
            "or a smaller batch"
        )
