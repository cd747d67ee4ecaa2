"""Changes of the model's scores before a token is chosen: bias, penalties, end tokens, grammar."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from elastic.engines.sampling.state import SamplingState
from elastic.errors import ConfigError

_MOST_BIAS = 1e30  # of float32, so that an endless bias leaves finite scores
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_ALLOWED = torch.from_numpy(np.where(_BITS, np.float32(0), np.float32(-np.inf)))
"""float32 [256, 8]: by eight bits of a mask, what is added to the scores of their tokens."""

Rows = list[tuple[int, SamplingState]]


def adjust(logits: torch.Tensor, states: Sequence[SamplingState]) -> dict[int, str]:
    """Change logits [answers, vocabulary], float32, in place by what each answer asks for.

    Returns for rows whose grammar cannot be followed any further why.
    """
    rows = list(enumerate(states))
    if biased := [(row, state) for row, state in rows if state.rule.logit_bias]:
        _add_biases(logits, biased)
    if penalized := [(row, state) for row, state in rows if state.counts is not None]:
        _penalize(logits, penalized)
    if short := [(row, state) for row, state in rows if state.too_short and state.matcher is None]:
        _forbid_end(logits, short)
    if matched := [(row, state) for row, state in rows if state.matcher is not None]:
        return _forbid_unmatched(logits, matched)
    return {}


def _add_biases(logits: torch.Tensor, rows: Rows) -> None:
    """Add the biases of each row; several of one token are summed."""
    pairs = [(row, token, bias) for row, state in rows for token, bias in state.rule.logit_bias]
    places, tokens, biases = zip(*pairs, strict=True)
    values = np.clip(np.array(biases), -_MOST_BIAS, _MOST_BIAS).astype(np.float32)
    where = _on(logits, np.array(places)), _on(logits, np.array(tokens))
    logits.index_put_(where, _on(logits, values), accumulate=True)


def _penalize(logits: torch.Tensor, rows: Rows) -> None:
    """Penalize the tokens of each answer, and by repetition those of its prompt too."""
    penalized = [(row, state.rule, *state.counts.views()) for row, state in rows if state.counts]
    sizes = [len(tokens) for _, _, tokens, _ in penalized]
    counts = np.concatenate([counts for *_, counts in penalized])
    repetition, presence, frequency = (
        np.repeat(np.array([getattr(rule, name) for _, rule, *_ in penalized], np.float32), sizes)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    )
    where = (
        _on(logits, np.repeat(np.array([row for row, *_ in penalized]), sizes)),
        _on(logits, np.concatenate([tokens for _, _, tokens, _ in penalized])),
    )
    scores, factor = logits[where], _on(logits, repetition)
    scores = torch.where(scores > 0, scores / factor, scores * factor)
    logits[where] = scores - _on(logits, (frequency * counts + presence * (counts > 0)).astype(np.float32))


def _forbid_end(logits: torch.Tensor, rows: Rows) -> None:
    """Forbid the stop tokens of answers that may not end yet."""
    vocabulary = logits.shape[-1]
    pairs = [(row, token) for row, state in rows for token in state.request.stop_tokens if token < vocabulary]
    if pairs:
        places, tokens = zip(*pairs, strict=True)
        logits[_on(logits, np.array(places)), _on(logits, np.array(tokens))] = -torch.inf


def _forbid_unmatched(logits: torch.Tensor, rows: Rows) -> dict[int, str]:
    """Forbid what the grammar of each row forbids; return why, where that cannot be told."""
    vocabulary, errors = logits.shape[-1], {}
    masks = torch.zeros(len(rows), -(-vocabulary // 32), dtype=torch.int32)
    for mask, (row, state) in zip(masks, rows, strict=True):
        assert state.matcher is not None
        try:
            state.matcher.fill_mask(mask)
        except ConfigError as error:
            errors[row] = str(error)
        if state.too_short:
            _without_end(mask.numpy().view(np.uint32), state.request.stop_tokens)
    eights = masks.to(logits.device).view(torch.uint8).int()
    scores = torch.embedding(_ALLOWED.to(logits.device), eights).flatten(1)[:, :vocabulary]  # no branch for each token
    if len(rows) == len(logits):
        logits.add_(scores)
    else:
        logits.index_add_(0, torch.tensor([row for row, _ in rows], device=logits.device), scores)
    return errors


def _without_end(mask: npt.NDArray[np.uint32], stop_tokens: Sequence[int]) -> None:
    """Take stop tokens out of a mask; none if it has nothing else, as a complete text cannot be made longer."""
    before = mask.copy()
    for token in stop_tokens:
        if token // 32 < len(mask):
            mask[token // 32] &= ~np.uint32(1 << token % 32)
    if not mask.any():
        mask[:] = before


def _on(like: torch.Tensor, values: npt.NDArray[np.generic]) -> torch.Tensor:
    """Bring an array to the device of a tensor."""
    return torch.from_numpy(values).to(like.device)
