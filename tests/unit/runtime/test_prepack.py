"""`wrap(prepack=True)`: matrices in oneDNN's order do what plain ones do, and are those again at the end."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from safetensors.torch import save_file
from torch import nn

import elastic
from elastic import ConfigError, Place, StateError
from elastic.engines.base import Request
from elastic.engines.continuous import ContinuousEngine
from elastic.runtime import options
from elastic.runtime.options import check_prepack
from elastic.weights.prepacked import joined, padding
from elastic.weights.prepacked.onednn import find_layout, multiply
from elastic.weights.prepacked.source import ResidentSource
from elastic.weights.proxy.tensor import WeightProxy
from support.architectures import build, prompt
from support.serving.generations import prompts, same_unless_close, serve
from support.weights.prepacked import WIDE, any_layout
from support.weights.prepacked import wide_llama as llama
from support.wrapped_model import assert_same_bits, bits, pickled, small

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
ROOM = small(16 << 20)
PLAIN = [name for name, m in llama().named_modules() if isinstance(m, nn.Linear) and any_layout(m.weight) is None]
"""That would need padding: those of the network, by most builds of oneDNN."""
IN_PAGES = 7 * WIDE["num_hidden_layers"] - len(PLAIN)
PACKED = IN_PAGES + 1
"""With the head."""


@pytest.fixture(autouse=True)
def _packed_where_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "prepacked_layout", any_layout)


def packed_names(model: nn.Module) -> list[str]:
    """Of the parameters that lie in oneDNN's order where they are used."""
    found = [(n, getattr(p, "source", None)) for n, p in model.named_parameters() if isinstance(p, WeightProxy)]
    return [name for name, source in found if isinstance(source, ResidentSource)]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    out: torch.Tensor = model(**prompt(3)).logits
    return out


def checkpoint_of(model: Any, path: Path) -> str:
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path / "model.safetensors")
    return str(path)


def test_the_tokens_are_the_plain_models(wrapped: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "elastic")
    model, plain = wrapped(llama(), ROOM, prepack=True), llama()
    assert len(packed_names(model)) == PACKED
    assert f"{IN_PAGES} of {7 * 3} matrices in pages are prepacked" in caplog.text
    assert "the head, [128, 64], is prepacked" in caplog.text
    torch.testing.assert_close(logits(model), logits(plain))
    for row in model.generate(**prompt(1), **OPTIONS).tolist():
        assert same_unless_close(plain, row[:-12], row[-12:])


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums are not shared out among threads, as they are of some shapes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@torch.no_grad()
def test_what_has_the_same_inputs_is_multiplied_at_once(wrapped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four products a layer, also of one that returned."""
    torch.manual_seed(0)
    config = t.LlamaConfig(**{**WIDE, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16})
    plain = t.LlamaForCausalLM(config).eval()
    model, computed = wrapped(copy.deepcopy(plain), ROOM, prepack=True), list[int]()

    def count(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        computed.append(matrix.shape[0])
        return multiply(x, matrix, bias)

    monkeypatch.setattr(padding, "multiply", count)
    layer, rt = [192, 64, 256, 64], model.elastic
    torch.testing.assert_close(logits(model), logits(plain))
    if joined.joined_layout((find_layout((64, 64), torch.float32),) * 3, 1) is None:
        pytest.skip("this CPU orders these matrices, or adds them up, otherwise than one by one")
    assert computed == layer * 3 + [128]
    rt.release([0])
    rt.restore()
    computed.clear()
    torch.testing.assert_close(logits(model), logits(plain))
    assert computed == layer * 3 + [128]


def test_half_precision_is_packed_where_the_cpu_can(wrapped: Any) -> None:
    model, plain = wrapped(llama(torch.bfloat16), ROOM, prepack=True), llama(torch.bfloat16)
    linears = {f"{name}.weight": m for name, m in plain.named_modules() if isinstance(m, nn.Linear)}
    able = [name for name, m in linears.items() if find_layout((m.out_features, m.in_features), torch.bfloat16)]
    assert sorted(packed_names(model)) == sorted(able)  # with AMX smaller ones, too
    exact = logits(llama(torch.bfloat16).float())
    assert (logits(model) - exact).abs().max() <= 2 * (logits(plain) - exact).abs().max()
    elastic.unwrap(model)
    assert_same_bits(model, bits(plain))


def test_without_the_option_all_is_plain(wrapped: Any) -> None:
    model = wrapped(llama(), ROOM)
    assert packed_names(model) == []
    assert torch.equal(logits(model), logits(llama()))


def test_where_nothing_can_be_packed_all_is_plain(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(options, "prepacked_layout", lambda *_: None)
    caplog.set_level(logging.INFO, "elastic")
    model = wrapped(llama(), ROOM, prepack=True)
    assert packed_names(model) == []
    assert "0 of 21 matrices in pages are prepacked" in caplog.text
    assert torch.equal(logits(model), logits(llama()))


@pytest.mark.parametrize("files", [False, True], ids=["host memory", "checkpoint"])
def test_weights_leave_and_return_bit_for_bit(files: bool, wrapped: Any, tmp_path: Path) -> None:
    model = llama()
    before = bits(model)
    given = {"checkpoint": checkpoint_of(model, tmp_path)} if files else {}
    rt = wrapped(model, ROOM, prepack=True, variants=["int4"], **given).elastic
    expected = logits(model)
    for change, form in (
        (lambda: rt.release([0, 2]), ("absent", "float32", "absent")),
        (lambda: rt.kv.resize(1 << 20), ("absent", "float32", "absent")),
        (lambda: rt.restore(), ("float32",) * 3),
        (lambda: rt.swap([0, 1], "int4"), ("int4", "int4", "float32")),
        (lambda: rt.release([1]), ("int4", "absent", "float32")),
        (lambda: rt.restore(), ("float32",) * 3),
        (lambda: rt.kv.resize("max"), ("float32",) * 3),
    ):
        change()
        assert rt.form() == form
        assert_same_bits(model, before)
        assert torch.equal(logits(model), expected) is ("int4" not in form)
        rt.check()
    assert len(packed_names(model)) == PACKED
    rt.release([1])
    rt.swap([2], "int4")
    elastic.unwrap(model)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert_same_bits(model, before)
    assert torch.equal(logits(model), logits(llama()))


def test_layers_that_find_no_room_begin_in_host_memory(wrapped: Any) -> None:
    model = wrapped(llama(), small(480 << 10), prepack=True)
    assert "absent" in model.elastic.form()
    with torch.no_grad():
        torch.testing.assert_close(*(each(**prompt(length=8), use_cache=False).logits for each in (model, llama())))
    assert_same_bits(model, bits(llama()))


@pytest.mark.parametrize("layers", [[], [1]], ids=["resident", "one released"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save_pretrained"])
def test_a_copy_is_a_plain_model(how: str, layers: list[int], wrapped: Any, tmp_path: Path) -> None:
    model = wrapped(llama(), ROOM, prepack=True)
    if layers:
        model.elastic.release(layers)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickled(model)
    else:
        model.save_pretrained(tmp_path)
        other = t.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(type(parameter) is nn.Parameter for parameter in other.parameters())
    assert_same_bits(other, bits(llama()))


@pytest.mark.parametrize("layers", [[], [0, 1]], ids=["resident", "some released"])
def test_what_is_loaded_into_the_model_is_what_it_has(layers: list[int], wrapped: Any) -> None:
    model, other = wrapped(llama(), ROOM, prepack=True), llama()
    if layers:
        model.elastic.release(layers)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(logits(model), logits(other))
    model.elastic.release([0])
    model.elastic.restore()
    torch.testing.assert_close(logits(model), logits(other))
    elastic.unwrap(model)
    assert_same_bits(model, bits(other))


def test_gradients_are_the_plain_models_weights_included(wrapped: Any) -> None:
    model, plain = wrapped(llama(), ROOM, prepack=True), llama()
    for each in (model, plain):
        each(**prompt(3), labels=prompt(3)["input_ids"]).loss.backward()
    assert packed_names(model)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad.any()
        assert torch.equal(ours.grad, theirs.grad), name
    with pytest.raises(StateError, match="has gradients"):
        model.elastic.release([0])
    elastic.unwrap(model)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    wrapped(model, ROOM, prepack=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_first_layer_that_is_trained_by_itself_gets_its_gradients(wrapped: Any) -> None:
    def gradient(model: Any) -> torch.Tensor:
        model.requires_grad_(False)
        trained = model.model.layers[0].self_attn.q_proj.weight.requires_grad_()
        (found,) = torch.autograd.grad(model(**prompt(3)).logits.square().sum(), trained)
        return found

    assert torch.equal(gradient(wrapped(llama(), ROOM, prepack=True)), gradient(llama()))


@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "all at once"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_that_would_write_packed_weights_is_refused(
    optimizer: Callable[..., torch.optim.Optimizer], foreach: bool, wrapped: Any
) -> None:
    model = wrapped(llama(), ROOM, prepack=True)
    model(**prompt(3), labels=prompt(3)["input_ids"]).loss.backward()
    with pytest.raises(StateError, match=r"in oneDNN's order; .* to move, cast or train .* unwrap it first"):
        optimizer(model.model.layers.parameters(), lr=0.1, foreach=foreach).step()


def test_under_autocast_products_are_the_plain_models(wrapped: Any) -> None:
    model, plain = wrapped(llama(), ROOM, prepack=True), llama()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(logits(model), logits(plain))
    torch.testing.assert_close(logits(model), logits(plain))


def test_adapters_work_on_packed_matrices(wrapped: Any) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")

    def adapted() -> Any:
        torch.manual_seed(1)
        return peft.get_peft_model(llama(), config).eval()

    def gradients(model: Any) -> list[torch.Tensor]:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return list(torch.autograd.grad(model(**prompt(3)).logits.square().sum(), trained))

    model, plain = wrapped(adapted(), ROOM, prepack=True), adapted()
    names = packed_names(model)
    assert len(names) == PACKED
    assert not any("lora" in name for name in names)
    torch.testing.assert_close(logits(model), logits(plain))
    assert all(map(torch.equal, gradients(model), gradients(plain)))
    with pytest.raises(StateError, match="unwrap it first"):
        model.merge_adapter()
    elastic.unwrap(model)
    assert torch.equal(logits(model.merge_and_unload()), logits(plain.merge_and_unload()))


def test_what_several_layers_share_stays_plain(wrapped: Any) -> None:
    def tied() -> Any:
        model = llama()
        first, second, third = model.model.layers
        first.mlp.up_proj.weight = second.mlp.up_proj.weight
        third.mlp.up_proj.weight = third.mlp.gate_proj.weight  # two homes in one layer
        return model

    model = wrapped(tied(), ROOM, prepack=True)
    shared = {f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)}
    assert not shared & set(packed_names(model))
    torch.testing.assert_close(logits(model), logits(tied()))
    model.elastic.release([2])
    model.elastic.restore()
    torch.testing.assert_close(logits(model), logits(tied()))
    elastic.unwrap(model)
    assert_same_bits(model, bits(tied()))


def test_a_head_that_is_tied_to_embeddings_stays_plain(wrapped: Any) -> None:
    torch.manual_seed(0)
    tied = t.LlamaForCausalLM(t.LlamaConfig(**WIDE, tie_word_embeddings=True)).eval()
    before = bits(tied)
    model = wrapped(tied, ROOM, prepack=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(packed_names(model)) == IN_PAGES
    assert_same_bits(model, before)


def test_a_head_that_was_replaced_meanwhile_is_left_as_it_is(wrapped: Any) -> None:
    model = wrapped(llama(), ROOM, prepack=True)
    model.lm_head.weight = other = nn.Parameter(torch.randn(128, 64))
    elastic.unwrap(model)
    assert model.lm_head.weight is other


def test_linear_layers_that_compute_otherwise_stay_plain(wrapped: Any) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, 2 * self.weight)

    model = llama()
    model.model.layers[1].mlp.up_proj.__class__ = Scaled
    names = packed_names(wrapped(model, ROOM, prepack=True))
    assert "model.layers.1.mlp.up_proj.weight" not in names
    assert len(names) == PACKED - 1


def test_hooks_see_packed_products(wrapped: Any) -> None:
    model, plain, seen = wrapped(llama(), ROOM, prepack=True), llama(), []
    for each in (model, plain):
        each.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, out: seen.append(out))
        logits(each)
    torch.testing.assert_close(*seen)


def test_dropped_layers_return_from_the_checkpoint(wrapped: Any, tmp_path: Path) -> None:
    model = llama()
    before = bits(model)
    rt = wrapped(model, ROOM, prepack=True, checkpoint=checkpoint_of(model, tmp_path)).elastic
    expected = logits(model)
    rt.drop([0, 1])
    rt.restore()
    assert torch.equal(logits(model), expected)
    assert_same_bits(model, before)
    with pytest.raises(StateError, match=r"layers\.0 is prepacked, which others cannot read; wrap its model without"):
        rt.weights_source([0])


def test_dropped_layers_are_fetched_from_a_plain_model(wrapped: Any) -> None:
    model = llama()
    before = bits(model)
    peer = wrapped(llama(), small(16 << 20, "cpu#peer")).elastic
    rt = wrapped(model, ROOM, prepack=True).elastic
    expected = logits(model)
    assert rt.digests([1]) == peer.digests([1])
    rt.drop([1])
    rt.fetch([1], peer.weights_source([1]))
    assert torch.equal(logits(model), expected)
    assert_same_bits(model, before)


def test_continuous_batches_get_the_plain_models_tokens(wrapped: Any) -> None:
    model, plain = wrapped(llama(), ROOM, prepack=True, variants=["int4"]), llama()
    engine = ContinuousEngine(model, block_tokens=8, max_batch_tokens=64)
    engine.start()
    try:
        for change in (lambda: None, lambda: model.elastic.release([1]), lambda: model.elastic.restore()):
            change()
            asked = [Request(p, 20) for p in prompts([1, 7, 40, 70], 96)]
            heard = serve(engine, asked)
            for request in asked:
                assert same_unless_close(plain, request.prompt, heard.tokens[request.id])
    finally:
        engine.stop(drain=False)


@pytest.mark.parametrize(
    ("places", "more", "words"),
    [
        (["cpu#a", "cpu#b"], {}, r"prepack=True does not go with places=\['cpu#a', 'cpu#b'\].*leave prepack out"),
        (["cuda:0"], {}, r"prepack=True does not go with places=\['cuda:0'\].* one place on a CPU"),
        (["cpu"], {"shards": 2}, "prepack=True does not go with shards=2.*leave prepack out"),
        (["cpu"], {"load_shards": [0]}, r"prepack=True does not go with .*load_shards=\[0\]"),
        (["cpu"], {"prepack": "yes"}, "prepack='yes' cannot be; it must be True or False"),
    ],
)
def test_what_it_does_not_go_with_is_refused(places: list[str], more: dict[str, Any], words: str) -> None:
    given = {"prepack": True, "shards": 1, "load_shards": None, **more}
    with pytest.raises(ConfigError, match=words):
        check_prepack(places=[Place.parse(place) for place in places], **given)
    if places != ["cuda:0"] and "load_shards" not in more:
        model = build("llama-gqa")
        with pytest.raises(ConfigError, match=words):
            elastic.wrap(model, places=[f"{place}=16MiB" for place in places], **{"prepack": True, **more})
        assert not hasattr(model, "elastic")
