"""Scores are those of the paper's formulas, the order is the greedy one, and the model is left as it was."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as t
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import elastic
from elastic import ConfigError, Profile, StateError
from elastic.profiling import token_ids
from elastic.quant.formats.integer import Integers
from elastic.quant.sensitivity import scores
from elastic.quant.sensitivity.fake_quant import dequantized_layer
from elastic.quant.sensitivity.incremental_forward import IncrementalForward
from elastic.quant.sensitivity.layer_trace import LayerTrace
from elastic.weights.decoder import find_decoder
from support.architectures import CONFIGS, GQA, SMALL, VOCAB, build

CONFIG = Integers(3)


def calibration(sequences: int = 2, tokens: int = 12, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, VOCAB, (sequences, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def deep() -> Any:
    torch.manual_seed(0)
    config = t.LlamaConfig(**{**SMALL, "num_hidden_layers": 7})
    model = t.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.mul_(3)
    return model


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return F.cosine_similarity(a.double(), b.double(), dim=-1).mean().item()


class Naive:
    """The formulas word for word: a model of its own for each set of layers, run as a whole."""

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        self._model, self._ids = model, ids
        self._runs: dict[frozenset[int], torch.Tensor] = {}
        self._quantized = cache(lambda p: dequantized_layer(find_decoder(model).layers[p], CONFIG))
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self._runs[frozenset()] = self._run(frozenset(), recording=True)

    def run(self, quantized: set[int]) -> torch.Tensor:
        chosen = frozenset(quantized)
        if chosen not in self._runs:
            self._runs[chosen] = self._run(chosen)
        return self._runs[chosen]

    def _run(self, quantized: frozenset[int], recording: bool = False) -> torch.Tensor:
        model = copy.deepcopy(self._model)
        layers = find_decoder(model).layers
        for module in list(model.modules()):
            if isinstance(module, nn.ModuleList) and module[0] is layers[0]:
                for p in quantized:
                    module[p] = copy.deepcopy(self._quantized(p))
        if recording:
            for layer in layers:
                layer.register_forward_pre_hook(lambda m, a, k: self.inputs.append((a, k)), with_kwargs=True)
                layer.register_forward_hook(lambda m, a, out: self.outputs.append(out))
        with torch.no_grad():
            return model(self._ids, use_cache=False).logits

    def lts(self, p: int) -> float:
        return cosine(self.outputs[p][0] if isinstance(self.outputs[p], tuple) else self.outputs[p], self._hidden(p))

    def lrs(self, p: int) -> float:
        """In a pass of its own, as layers may leave things for one another."""
        model, found = copy.deepcopy(self._model), []
        layer = find_decoder(model).layers[p]
        quantized = copy.deepcopy(self._quantized(p))

        def compare(layer: nn.Module, args: Any, kwargs: Any, full: Any) -> None:
            pair = full, quantized(*args, **kwargs)
            found.append(cosine(*(x[0] if isinstance(x, tuple) else x for x in pair)))

        layer.register_forward_hook(compare, with_kwargs=True)
        with torch.no_grad():
            model(self._ids, use_cache=False)
        return found[0]

    def _hidden(self, p: int) -> torch.Tensor:
        args, kwargs = self.inputs[p]
        return args[0] if args else kwargs["hidden_states"]


@pytest.mark.parametrize("architecture", CONFIGS)
def test_scores_and_order_are_those_of_the_formulas(architecture: str) -> None:
    model, ids = build(architecture), calibration()
    found = elastic.profile(model, ids, variant=CONFIG)
    assert_formulas(found, model, ids)


def assert_formulas(found: Profile, model: Any, ids: torch.Tensor) -> None:
    naive = Naive(model, ids)
    layers = range(len(find_decoder(model).layers))
    lts, lrs = [naive.lts(p) for p in layers], [naive.lrs(p) for p in layers]
    assert found.lts == pytest.approx(lts, abs=1e-6)
    assert found.lrs == pytest.approx(lrs, abs=1e-6)
    chosen: set[int] = set()
    for round_ in found.rounds:
        before = naive.run(chosen)
        expected = {p: cosine(before, naive.run({*chosen, p})) for p in layers if p not in chosen}
        assert round_.mds == pytest.approx(expected, abs=1e-6)
        lis = {p: 0.25 * lts[p] + 0.25 * lrs[p] + 0.5 * mds for p, mds in expected.items()}
        assert round_.lis == pytest.approx(lis, abs=1e-6)
        assert round_.chosen == max(lis, key=lambda p: lis[p])
        chosen.add(round_.chosen)
    assert sorted(found.order) == list(layers)


@contextlib.contextmanager
def calls_of_layers() -> Iterator[list[nn.Module]]:
    kind = t.models.llama.modeling_llama.LlamaDecoderLayer
    plain, called = kind.forward, []

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(self)
        return plain(self, *args, **kwargs)

    kind.forward = recorded
    try:
        yield called
    finally:
        kind.forward = plain


def test_a_candidate_runs_no_layer_before_itself_and_none_whose_result_is_known(deep: Any) -> None:
    full = list(deep.model.layers)
    packed = [dequantized_layer(layer, CONFIG) for layer in full]
    with torch.no_grad(), calls_of_layers() as called:
        walk = IncrementalForward(LayerTrace(deep, full, calibration()), full, lambda p: packed[p])

        def attempt(p: int) -> list[nn.Module]:
            called.clear()
            logits = walk.attempt(p)
            ran = list(called)
            assert torch.equal(logits, walk.trace.whole({q: packed[q] for q in {*walk.chosen, p}}))
            return ran

        for p in range(7):
            assert attempt(p) == [packed[p], *full[p + 1 :]]
        assert attempt(2) == []
        walk.choose(4, walk.attempt(4))
        assert attempt(2) == [packed[4], *full[5:]]
        assert attempt(5) == [packed[5], full[6]]
        walk.choose(5, walk.attempt(5))
        assert attempt(2) == [packed[5], full[6]]
        assert attempt(6) == [packed[6]]
        assert attempt(0) == [packed[4], packed[5], full[6]]


@pytest.mark.parametrize("keeps", [False, True])
def test_layers_run_as_often_as_the_bound_of_exact_reuse(
    deep: Any, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not keeps:
        monkeypatch.setattr("elastic.quant.sensitivity.scores.kept_bytes", lambda trace: scores.MOST_KEPT_BYTES + 1)
    with calls_of_layers() as called:
        order = elastic.profile(deep, calibration(1), variant=CONFIG).order
    runs = len(called) - 3 * 7  # one pass is captured, two check that layers can run alone
    suffixes = sum(7 - p for k in range(7) for p in order[k:])
    local = 7 + 6  # each quantized layer on what it is given, and the check, layer by layer
    assert runs == (7 * 8 * 9 // 6 if keeps else suffixes + local)
    monkeypatch.undo()
    assert elastic.profile(deep, calibration(1), variant=CONFIG).order == order


WEIGHTS = given(
    alphas=st.tuples(*[st.sampled_from([0.0, 0.01, 0.25, 1.0])] * 3),
    batch=st.integers(1, 3),
    seed=st.integers(0, 3),
)


@WEIGHTS
@settings(max_examples=4, deadline=None)
@pytest.mark.slow
def test_a_lazy_search_finds_the_same_order(deep: Any, alphas: tuple[float, ...], batch: int, seed: int) -> None:
    assert_lazy_is_the_same(deep, alphas, batch, seed)


@WEIGHTS
@settings(max_examples=60, deadline=None)
@pytest.mark.long
def test_a_lazy_search_finds_the_same_order_with_many_weights(
    deep: Any, alphas: tuple[float, ...], batch: int, seed: int
) -> None:
    assert_lazy_is_the_same(deep, alphas, batch, seed)


def assert_lazy_is_the_same(deep: Any, alphas: tuple[float, ...], batch: int, seed: int) -> None:
    options: Any = dict(zip(("alpha1", "alpha2", "beta"), alphas, strict=True), batch=batch, variant=CONFIG)
    plain = elastic.profile(deep, calibration(3, seed=seed), **options)
    lazy = elastic.profile(deep, calibration(3, seed=seed), **options, lazy=True)
    assert lazy.order == plain.order
    for fast, full in zip(lazy.rounds, plain.rounds, strict=True):
        assert fast.mds.items() <= full.mds.items()
    if not any(alphas):
        assert plain.order == tuple(range(7))


def state(model: nn.Module) -> dict[str, Any]:
    return {
        "state": {k: (id(v), v._version) for k, v in model.state_dict(keep_vars=True).items()},
        "gradients": [p.requires_grad for p in model.parameters()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "attributes": {n: sorted(vars(m)) for n, m in model.named_modules()},
        "training": [m.training for m in model.modules()],
        "own": [m.__dict__.get("forward") for m in model.modules()],
        "config": model.config.to_json_string(),  # type: ignore[union-attr, operator]
    }


class Stop(Exception):
    pass


def stop_after(candidates: int) -> Any:
    def progress(done: int, total: int) -> None:
        assert total == 28
        if done == candidates:
            raise Stop

    return progress


def fails_at(call: int) -> Any:
    plain, calls = t.models.llama.modeling_llama.LlamaMLP.forward, itertools.count()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if next(calls) == call:
            raise Stop
        return plain(self, x)

    return forward


def test_the_model_is_left_as_it_was_also_by_an_error(deep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(deep).train()
    model.model.layers[1].eval()
    model.model.layers[2].forward = model.model.layers[2].forward
    model.model.layers[3].requires_grad_(False)
    before, gradients = state(model), torch.is_grad_enabled()
    elastic.profile(model, calibration(), variant="int4")
    assert state(model) == before
    with pytest.raises(Stop):
        elastic.profile(model, calibration(), progress=stop_after(9))
    assert state(model) == before
    for broken in (10, 30, 90):
        monkeypatch.setattr(t.models.llama.modeling_llama.LlamaMLP, "forward", fails_at(broken))
        with pytest.raises(Stop):
            elastic.profile(model, calibration())
        monkeypatch.undo()
        assert state(model) == before
    assert torch.is_grad_enabled() == gradients


@pytest.mark.parametrize("lazy", [False, True])
def test_an_interrupted_profile_goes_on_to_the_same_file(deep: Any, tmp_path: Path, lazy: bool) -> None:
    def run(name: str, **more: Any) -> Profile:
        return elastic.profile(deep, calibration(), variant=CONFIG, path=tmp_path / name, lazy=lazy, batch=1, **more)

    whole = run("whole.json")
    for candidates in (3, 9, 20):
        with pytest.raises(Stop):
            run("parts.json", progress=stop_after(candidates))
    with pytest.raises(ConfigError, match=r"unfinished \(\d of 7 layers\)"):
        Profile.load(tmp_path / "parts.json")
    assert run("parts.json") == whole == Profile.load(tmp_path / "parts.json")
    assert (tmp_path / "parts.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["parts.json", "whole.json"]
    with calls_of_layers() as called:
        assert run("whole.json") == whole
    assert not called


def test_another_profile_in_the_file_is_refused(deep: Any, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    elastic.profile(deep, calibration(), path=path)
    other = copy.deepcopy(deep)
    with torch.no_grad():
        other.model.layers[3].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(ConfigError, match="holds another profile \\(another model\\)"):
        elastic.profile(other, calibration(), path=path)
    with pytest.raises(ConfigError, match="another text"):
        elastic.profile(deep, calibration(seed=4), path=path)
    with pytest.raises(ConfigError, match=r"beta=0\.5, not 1"):
        elastic.profile(deep, calibration(), path=path, beta=1)
    with pytest.raises(ConfigError, match="variant=int4, not int3"):
        elastic.profile(deep, calibration(), path=path, variant="int3")


def test_an_order_for_another_model_is_refused(deep: Any, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    elastic.profile(deep, calibration(), path=path, lazy=True)
    found = Profile.load(path)
    found.check(deep.model.layers)
    found.check(copy.deepcopy(deep).bfloat16().model.layers)
    with pytest.raises(ConfigError, match="7 layers, this one has 3"):
        found.check(build("llama-mha").model.layers)
    other = copy.deepcopy(deep)
    with torch.no_grad():
        other.model.layers[2].input_layernorm.weight[0] *= 2
    with pytest.raises(ConfigError, match=r"1 of 7 layers differ \(the first is layer 2\)"):
        found.check(other.model.layers)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("profile") / "profile.json"
    elastic.profile(build("llama-mha"), calibration(), path=path)
    return path


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_file_is_refused_in_words(saved: Path, tmp_path_factory: Any, data: st.DataObject) -> None:
    content = bytearray(saved.read_bytes())
    place = data.draw(st.integers(0, len(content) - 3))
    damaged = saved.with_name("damaged.json")
    if data.draw(st.booleans()):
        damaged.write_bytes(content[:place])
        with pytest.raises(ConfigError, match="no profile, or a damaged one"):
            Profile.load(damaged)
    else:
        content[place] = data.draw(st.integers(0, 255))
        damaged.write_bytes(content)
        with contextlib.suppress(ConfigError):  # a digit of a score may have changed, which nobody can tell
            assert sorted(Profile.load(damaged).order) == [0, 1, 2]


@pytest.mark.parametrize("content", ["", "[]", "3", "{}", '{"format": 1}', '{"format": 2, "setting": []}', "null"])
def test_a_file_that_is_no_profile_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="no profile, or a damaged one"):
        Profile.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        Profile.load(tmp_path / "absent.json")


def left_behind(model: Any) -> None:
    """Layer 5 adds what layer 1 returned when it ran last."""
    early, late = model.model.layers[1], model.model.layers[5]
    own, shared = early.forward, []

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        shared[:] = [own(*args, **kwargs)]
        return shared[0]

    early.forward = forward
    late.register_forward_hook(lambda m, args, out: out + shared[0])


def in_place(model: Any) -> None:
    """Layer 1 changes what the model hands to all layers."""

    def change(layer: nn.Module, args: Any, kwargs: Any, out: torch.Tensor) -> None:
        kwargs["position_embeddings"][0].copy_(out[..., :8].tanh())

    model.model.layers[1].register_forward_hook(change, with_kwargs=True)


@pytest.mark.parametrize("sharing", [left_behind, in_place])
def test_layers_that_share_more_than_hidden_states_are_noticed(deep: Any, sharing: Any, caplog: Any) -> None:
    model = copy.deepcopy(deep)
    sharing(model)
    elastic.profile(model, calibration(), variant=CONFIG, lazy=True)
    assert "because its layers share state" in caplog.text


def sharing_keys_and_values() -> Any:
    """The last two layers use the keys and values of the two before them."""
    config = t.Gemma4TextConfig(
        **{**GQA, "num_hidden_layers": 4},
        head_dim=8,
        global_head_dim=8,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        sliding_window=16,
    )
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    return model


@pytest.mark.parametrize("batch", [1, 2])
def test_a_model_whose_layers_share_state_has_the_scores_of_the_formulas(batch: int, caplog: Any) -> None:
    model = sharing_keys_and_values()
    before = state(model)
    found = elastic.profile(model, calibration(), variant=CONFIG, batch=batch)
    assert "because its layers share state" in caplog.text
    assert_formulas(found, model, calibration())
    assert state(model) == before


def test_what_the_caller_must_change(deep: Any, tmp_path: Path) -> None:
    ids = calibration()
    for options, words in [
        ({"variant": "int5"}, "variant='int5' is not known"),
        ({"alpha1": -1}, "alpha1=-1"),
        ({"beta": float("nan")}, "beta=nan"),
        ({"batch": 0}, "batch=0"),
        ({"path": tmp_path / "no" / "such.json"}, "cannot be written"),
    ]:
        with pytest.raises(ConfigError, match=words):
            elastic.profile(deep, ids, **options)
    for text, words in [("text", "tokenizer"), (torch.zeros(3), "integers"), (ids[:0], "tensor")]:
        with pytest.raises(ConfigError, match=words):
            elastic.profile(deep, text)
    broken = copy.deepcopy(deep)
    broken.lm_head.weight.data[0, 0] = float("inf")
    with pytest.raises(ConfigError, match="not finite"):
        elastic.profile(broken, ids)


def test_weights_that_are_no_numbers_are_named(deep: Any) -> None:
    model = copy.deepcopy(deep)
    name, parameter = next((n, p) for n, p in model.named_parameters() if ".1." in n and p.ndim == 2)
    with torch.no_grad():
        parameter[3, 5] = torch.nan
    with pytest.raises(ConfigError, match=f"{name} holds values that are not finite"):
        elastic.profile(model, torch.ones(2, 8, dtype=torch.long))


@pytest.mark.parametrize("token", [-1, 10**6])
def test_tokens_outside_of_the_vocabulary_are_refused(deep: Any, token: int) -> None:
    with pytest.raises(ConfigError, match=rf"token ids from .*{token}.*the model has 0 to"):
        elastic.profile(deep, torch.tensor([[1, token, 3]]))


def test_a_wrapped_model_is_refused(wrapped: Any) -> None:
    model = wrapped(build("llama-mha"))
    with pytest.raises(StateError, match="unwrap it first"):
        elastic.profile(model, calibration())


class Words:
    """A tokenizer of one token a letter."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}


def test_sequences_are_spread_over_the_text() -> None:
    text = ["ab" * 1000, "yz" * 1000]
    ids = token_ids(text, Words(), 1024)
    assert ids.shape == (2, 512)
    assert {chr(i) for i in ids[0]} == {"a", "b"}
    assert {chr(i) for i in ids[1]} == {"y", "z"}
    assert token_ids("abc", Words(), 2048).tolist() == [[97, 98, 99]]
    assert token_ids("abc" * 300, Words(), 100).shape == (1, 100)
    assert token_ids("abc" * 300, Words(), 700).shape == (1, 512)
    with pytest.raises(ConfigError, match="no text"):
        token_ids("", Words(), 10)
    with pytest.raises(ConfigError, match="tokens=0"):
        token_ids("abc", Words(), 0)


def test_the_order_on_a_device_is_that_on_the_cpu(deep: Any, device: str) -> None:
    found = elastic.profile(copy.deepcopy(deep).to(device), calibration(), variant=CONFIG)
    plain = elastic.profile(deep, calibration(), variant=CONFIG)
    assert found.lts == pytest.approx(plain.lts, abs=1e-4)
    assert found.order == plain.order
    found.check(deep.model.layers)
