"""What tests of an engine share: collect what requests are told, and compare with plain generation."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import Any

import torch

from elastic.engines.base import Engine, Output, Request


class Collector:
    """Listens to any number of requests."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.weights: dict[str, list[int]] = {}
        self.ends: dict[str, Output] = {}
        self.first: dict[str, Output] = {}
        self._news = threading.Condition()

    def __call__(self, output: Output) -> None:
        with self._news:
            assert output.request not in self.ends, "news after the end"
            self.first.setdefault(output.request, output)
            self.tokens.setdefault(output.request, []).extend(output.tokens)
            self.weights.setdefault(output.request, []).extend([output.weights] * len(output.tokens))
            if output.finish is not None:
                self.ends[output.request] = output
            self._news.notify_all()

    def wait(self, requests: Sequence[str], timeout_s: float = 120) -> None:
        """Until all of these have ended."""
        with self._news:
            assert self._news.wait_for(lambda: self.ends.keys() >= set(requests), timeout_s), "requests did not end"

    def wait_for_tokens(self, request: str, count: int, timeout_s: float = 120) -> None:
        with self._news:
            assert self._news.wait_for(lambda: len(self.tokens.get(request, ())) >= count, timeout_s)


def serve(engine: Engine, requests: Sequence[Request]) -> Collector:
    """Submit all at once, and wait for their ends."""
    heard = Collector()
    for request in requests:
        engine.submit(request, heard)
    heard.wait([request.id for request in requests])
    return heard


def prompts(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(3, vocabulary, (n,), generator=generator).tolist()) for n in lengths]


_longest: dict[tuple[bytes, tuple[int, ...]], list[int]] = {}
"""What plain models went on with after each prompt."""


def continuation(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """What `generate` goes on with, greedily. Of plain models, which many tests ask for the same, it is remembered."""
    if any(module._forward_pre_hooks or module._forward_hooks for module in model.modules()):
        return _generated(model, prompt, tokens)
    key = identity(model), tuple(prompt)
    if len(_longest.get(key, ())) < tokens:
        _longest[key] = _generated(model, prompt, tokens)
    return _longest[key][:tokens]


def identity(model: Any) -> bytes:
    """A digest of a model's modules, configs and weights."""
    config = f"{model.config}{model.config._attn_implementation}{model.generation_config}"
    said = hashlib.sha1(f"{model}{config}{model.device}".encode())
    for name, tensor in model.state_dict().items():
        said.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        said.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return said.digest()


@torch.no_grad()
def _generated(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    ids = torch.tensor([list(prompt)], device=model.device)
    out = model.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def is_continuation(model: Any, prompt: Sequence[int], tokens: int, got: Sequence[int]) -> bool:
    """Whether these are the `tokens` that `generate` goes on with.

    One pass tells in the time of two steps whether each is the likeliest after those before it. It rounds otherwise
    than `generate` does, so that where it says no, that is asked.
    """
    if len(got) != tokens:
        return False
    logits = model(torch.tensor([[*prompt, *got]], device=model.device), use_cache=False).logits
    likeliest = logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    return likeliest == list(got) or continuation(model, prompt, tokens) == list(got)


class Continuation:
    """What `generate` goes on with, to compare tokens with: as `is_continuation` does, where `continuation` takes a
    step for each. The model must be a plain one, that no engine has.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, model: Any, prompt: Sequence[int], tokens: int) -> None:
        self._model, self._prompt, self._tokens = model, prompt, tokens

    def __eq__(self, got: object) -> bool:
        return isinstance(got, list) and is_continuation(self._model, self._prompt, self._tokens, got)

    def __repr__(self) -> str:
        return repr(continuation(self._model, self._prompt, self._tokens))


@torch.no_grad()
def same_unless_close(model: Any, prompt: Sequence[int], got: Sequence[int], close: float = 1e-3) -> bool:
    """Whether each token is the likeliest after those before it, or nearly: batches round otherwise than one alone.

    The model has to tell so little apart: in half precision it rounds more off, and judges by that.
    """
    assert close >= 4 * torch.finfo(model.dtype).eps, f"{model.dtype} does not tell {close} apart"
    ids = torch.tensor([[*prompt, *got]], device=model.device)
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
    return bool((logits.max(-1).values - chosen <= close).all())


SERVED = {
    "llama-mha", "llama-gqa", "qwen2-sliding", "qwen3", "qwen3-moe", "mistral-sliding", "mixtral", "gemma", "gemma2",
    "gemma3", "phi3", "phi", "gpt2", "gpt-neox", "deepseek-v3", "gpt-oss", "opt",
}  # fmt: skip
