"""Layers and modules of them on another device than the model was loaded on (CoCoServe; laws 1, 3, 4)."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import elastic
from elastic import ConfigError, StateError
from elastic.engines.base import Request
from elastic.engines.continuous import ContinuousEngine
from elastic.hooks.device_transfer import TransferRouter
from elastic.quant.formats.base import KernelTarget
from elastic.quant.formats.kernel_table import paths
from elastic.weights.proxy.remote_tensor import RemoteTensor
from support.architectures import CONFIGS, VOCAB, build, in_turn, prompt
from support.second_device import HERE, THERE, SecondDevice, place_there, second_device
from support.serving.generations import continuation, prompts, serve
from support.wrapped_model import assert_same_bits, bits, modules_of, small, written_while_copied

ROOMY = 64 << 20
MLP = "model.layers.1.mlp"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SecondDevice]:
    """The kernels of packed products that are chosen by time may use scratch memory, which it takes for the first's."""
    with second_device(monkeypatch) as mode, paths.forced("reference"):
        yield mode


def here_and_there() -> list[elastic.Place]:
    return [small(ROOMY, "cpu#a"), place_there()]


def brought(model: Any) -> dict[str, torch.Tensor]:
    """The state dict, all of it here."""
    return {name: tensor.to(HERE) for name, tensor in model.state_dict().items()}


def assert_unchanged(model: Any, before: dict[str, torch.Tensor]) -> None:
    after = brought(model)
    assert list(after) == list(before)
    assert [name for name, tensor in before.items() if not torch.equal(after[name], tensor)] == []


def test_what_is_on_two_devices_is_refused_and_results_stay_where_they_are(device: Any) -> None:
    here = torch.ones(3)
    there = here.to(THERE)
    assert [t.device for t in (here, there, there + 1, there[1:], torch.ones(2, device=THERE))] == [HERE, *[THERE] * 4]
    with pytest.raises(RuntimeError, match="cpu:0"):
        here + there
    assert torch.equal((there + 1).to(HERE), here + 1)


@pytest.mark.parametrize("moves", [4, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_logits_are_bit_equal_whichever_device_has_the_modules(
    architecture: str, moves: int, device: Any, wrapped: Any
) -> None:
    model, choose = build(architecture), random.Random(architecture)
    before, expected = bits(model), model(**prompt(2)).logits
    rt = wrapped(model, here_and_there()).elastic
    modules = [name for layer in range(3) for name in modules_of(model, layer)]
    for _ in range(moves):
        rt.migrate(choose.choice(modules), choose.choice(["cpu#a", "there", "there"]), kv=choose.random() < 0.5)
        assert torch.equal(model(**prompt(2)).logits, expected)
        rt.check()
    assert_unchanged(model, before)
    elastic.unwrap(model)
    assert_same_bits(model, before)
    assert torch.equal(model(**prompt(2)).logits, expected)


class Moving(LogitsProcessor):
    """Has modules elsewhere after every few tokens of `generate`."""

    def __init__(self, rt: Any, modules: list[str]) -> None:
        self.rt, self.modules, self.choose = rt, modules, random.Random(2)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.choose.random() < 0.5:
            self.rt.migrate(self.choose.choice(self.modules), self.choose.choice(["cpu#a", "there"]))
        if self.choose.random() < 0.2:
            self.rt.migrate_kv(self.choose.randrange(3), self.choose.choice(["cpu#a", "there"]))
        return scores


@pytest.mark.parametrize(("architecture", "beams"), in_turn(["llama-gqa", "gpt2", "mixtral", "gpt-oss"], [3, 1]))
def test_generate_writes_the_same_while_modules_change_devices(
    architecture: str, beams: int, device: Any, wrapped: Any
) -> None:
    model = build(architecture)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "num_beams": beams}
    expected = model.generate(**prompt(2), **options)
    rt = wrapped(model, here_and_there()).elastic
    moving = Moving(rt, [name for layer in range(3) for name in modules_of(model, layer)])
    found = model.generate(**prompt(2), **options, logits_processor=LogitsProcessorList([moving]))
    assert torch.equal(found, expected)
    rt.check()


@pytest.mark.parametrize("target", ["model.layers.1.self_attn", MLP, 1])
def test_an_engine_serves_with_weights_on_another_device(target: str | int, device: Any, wrapped: Any) -> None:
    model = build("llama-gqa")
    texts = prompts([5, 9, 14], VOCAB)
    expected = [continuation(model, text, 10) for text in texts]
    rt = wrapped(model, here_and_there()).elastic
    engine = ContinuousEngine(model)
    engine.start()
    rt.migrate(target, "there", kv=False)
    requests = [Request(text, 10) for text in texts]
    heard = serve(engine, requests)
    engine.stop()
    assert [heard.tokens[request.id] for request in requests] == expected


# -- what travels


def travelled(device: SecondDevice, model: Any, inputs: dict[str, torch.Tensor]) -> list[tuple[int, ...]]:
    """The shapes of what has travelled in a forward pass, without a cache."""
    device.moved.clear()
    model(**inputs, use_cache=False)
    return sorted(device.moved)


def test_a_module_exchanges_its_input_and_its_result(device: Any, wrapped: Any) -> None:
    model, inputs = build("llama-gqa"), {"input_ids": prompt(2)["input_ids"]}
    rt, hidden = wrapped(model, here_and_there()).elastic, (2, 24, 32)
    rt.migrate(MLP, "there")
    assert travelled(device, model, inputs) == [hidden, hidden]
    rt.migrate("model.layers.2.self_attn.o_proj", "there")
    assert travelled(device, model, inputs) == [hidden] * 4
    rt.migrate("model.layers.2.self_attn.q_proj", "there")
    rt.migrate("model.layers.2.self_attn.v_proj", "there")
    assert travelled(device, model, inputs) == sorted([hidden] * 6 + [(2, 24, 16)])


def test_attention_and_mlp_on_one_device_are_the_layer(device: Any, wrapped: Any) -> None:
    model, inputs = build("llama-gqa"), {"input_ids": prompt(2)["input_ids"]}
    rt = wrapped(model, here_and_there()).elastic
    expected = model(**prompt(2)).logits
    rt.migrate("model.layers.1.self_attn", "there")
    rt.migrate(MLP, "there")
    assert rt.status().residencies["model.layers.1"] == (elastic.Residency("there", "float32"),)
    alone = travelled(device, model, inputs)
    assert alone.count((2, 24, 32)) == 2
    rt.migrate(2, "there")
    assert travelled(device, model, inputs).count((2, 24, 32)) == 2  # nothing between the layers
    assert len(travelled(device, model, inputs)) == len(alone)  # rotary embeddings too came once
    assert torch.equal(model(**prompt(2)).logits, expected)
    rt.migrate([MLP, "model.layers.1.self_attn"], "cpu#a")
    assert rt.status().residencies["model.layers.1"] == (elastic.Residency("cpu#a", "float32"),)


def test_what_modules_are_given_is_not_mistaken_for_what_it_was(device: Any, wrapped: Any) -> None:
    model = wrapped(build("llama-gqa"), here_and_there())
    model.elastic.migrate([MLP + ".up_proj", MLP + ".gate_proj"], "there")
    up, gate = model.model.layers[1].mlp.up_proj, model.model.layers[1].mlp.gate_proj
    x = torch.ones(2, 32)
    first = up(x).clone()
    assert torch.equal(gate(x), x @ gate.weight.T)
    x.mul_(2)
    assert torch.equal(up(x), 2 * first)
    with torch.inference_mode():
        model(**prompt(2))
        x = torch.ones(2, 32)
        up(x)
        assert torch.equal(up(x.mul_(2)), 2 * first)


def test_results_elsewhere_are_tensors_like_any_other(device: Any) -> None:
    plain = torch.arange(6.0).view(2, 3)

    def away() -> RemoteTensor:
        return RemoteTensor(plain.to(THERE), HERE)

    assert torch.equal(away() + plain, plain + plain)
    assert (away().device, away().shape, away().sum().item()) == (HERE, plain.shape, 15)
    assert torch.equal(copy.deepcopy(away()), plain)
    assert repr(away()) == repr(plain)
    assert (away().tolist(), away().numpy().tolist()) == (plain.tolist(), plain.tolist())
    torch.save(away(), file := io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.load(file), plain)
    seen, other = away(), away()
    seen += 1
    other[0, 0] = 7
    assert (seen[1, 2].item(), other[0, 0].item(), seen.data_ptr() != 0) == (6, 7, True)
    stayed = torch.nn.functional.gelu(away() * 2) * away()
    assert isinstance(stayed, RemoteTensor)
    assert stayed.value.device == THERE
    assert torch.equal(stayed.view(-1), (torch.nn.functional.gelu(plain * 2) * plain).view(-1))


# -- variants


@pytest.fixture
def other_kernels(monkeypatch: pytest.MonkeyPatch) -> KernelTarget:
    """The second device takes packed matrices as a GPU does. Products are those of the codes."""
    target, known = KernelTarget("cuda", "sm90"), KernelTarget.of
    monkeypatch.setattr(KernelTarget, "of", staticmethod(lambda device: target if device == THERE else known(device)))
    monkeypatch.setattr("elastic.quant.variants.pack_model.measure", lambda *args, **options: None)
    return target


@pytest.mark.parametrize(
    ("architecture", "variant"), in_turn(["llama-gqa", "gpt2", "mixtral"], ["2:4", "int8", "int4"])
)
def test_packed_modules_go_to_devices_with_other_kernels(
    architecture: str, variant: str, other_kernels: KernelTarget, device: Any, wrapped: Any
) -> None:
    model, choose = build(architecture), random.Random(architecture)
    before, plain = bits(model), model(**prompt(2)).logits
    rt = wrapped(model, here_and_there(), variants=("int8", "int4", "2:4")).elastic
    rt.swap(1, variant)
    quantized = model(**prompt(2)).logits
    modules = modules_of(model, 1)
    for step in range(4):
        rt.migrate(choose.choice(modules), choose.choice(["cpu#a", "there", "there"]))
        assert torch.equal(model(**prompt(2)).logits, quantized)
        if step % 2:
            rt.restore(1)
            assert torch.equal(model(**prompt(2)).logits, plain)
            rt.migrate(choose.choice(modules), choose.choice(["cpu#a", "there"]))
            rt.swap(1, variant)
            assert torch.equal(model(**prompt(2)).logits, quantized)
        rt.check()
    assert_unchanged(model, before)
    rt.migrate(1, "cpu#a")
    assert torch.equal(model(**prompt(2)).logits, quantized)
    elastic.unwrap(model)
    assert_same_bits(model, before)


def test_a_packed_layer_lies_as_the_kernels_of_its_place_want_it(
    other_kernels: KernelTarget, device: Any, wrapped: Any
) -> None:
    model = wrapped(build("llama-gqa"), here_and_there(), variants=("int4",))
    rt, weight = model.elastic, model.model.layers[1].mlp.up_proj
    rt.swap(1, "int4")
    home = weight.weight.source.packed
    rt.migrate(1, "there")
    away = weight.weight.source.packed
    assert (away.format.target, away.parts["packed"].device) == (other_kernels, THERE)
    assert torch.equal(away.value().to(HERE), home.value())
    rt.migrate(1, "cpu#a")
    assert all(torch.equal(part, home.parts[name]) for name, part in weight.weight.source.packed.parts.items())


# -- writing, saving, refusing


def test_modules_elsewhere_are_read_copied_and_written_like_any_other(device: Any, wrapped: Any) -> None:
    model = build("llama-gqa")
    expected = model(**prompt(2)).logits
    rt = wrapped(model, here_and_there(), variants=("int8",)).elastic
    rt.migrate(MLP, "there")
    weight, before = model.model.layers[1].mlp.up_proj.weight, bits(model)
    assert weight.device == HERE
    assert torch.equal(copy.deepcopy(model)(**prompt(2)).logits, expected)
    with torch.no_grad():
        weight.copy_(weight * 2)
    changed = model(**prompt(2)).logits
    assert not torch.equal(changed, expected)
    rt.swap(1, "int8")
    rt.restore(1)
    assert torch.equal(model(**prompt(2)).logits, changed)
    with pytest.raises(StateError, match=r"which is at there, on another device than its layer"):
        weight.add_(1)
    model.load_state_dict(before)
    rt.migrate(MLP, "cpu#a")
    assert torch.equal(model(**prompt(2)).logits, expected)


def test_gradients_flow_through_modules_elsewhere(device: Any, wrapped: Any) -> None:
    model, x = build("llama-gqa"), torch.randn(2, 32)
    mlp = model.model.layers[1].mlp

    def gradient() -> torch.Tensor:
        inputs = x.clone().requires_grad_()
        mlp(inputs).sum().backward()
        assert inputs.grad is not None
        return inputs.grad

    expected = gradient()
    wrapped(model, here_and_there()).elastic.migrate(MLP, "there")
    assert torch.equal(gradient(), expected)
    mlp.requires_grad_(True)
    with pytest.raises(StateError, match="on another device than its layer, gets no gradient"):
        gradient()


def test_gradients_of_a_layer_that_was_elsewhere_come_home_with_it(device: Any, wrapped: Any) -> None:
    model = build("llama-gqa").requires_grad_(True)
    model(**prompt()).logits.sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    wrapped(model, here_and_there()).elastic.migrate(1, "there")
    model(**prompt()).logits.sum().backward()
    assert model.model.layers[1].mlp.up_proj.weight.grad.device == THERE
    elastic.unwrap(model)
    assert {p.grad.device for p in model.parameters()} == {p.device for p in model.parameters()} == {HERE}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


@pytest.mark.parametrize("architecture", ["llama-gqa", "gpt2", "mixtral"])
def test_packed_modules_elsewhere_compute_in_a_model_that_is_not_frozen(
    architecture: str, device: Any, wrapped: Any
) -> None:
    """As models are that were loaded, and called without `no_grad`: a weight is expanded where it is."""
    model = build(architecture).requires_grad_(True)
    rt = wrapped(model, here_and_there(), variants=("int8",)).elastic
    rt.swap(1, "int8")
    with torch.no_grad():
        expected = model(**prompt(2)).logits
    rt.migrate(next(name for name in modules_of(model, 1) if name.endswith(".mlp")), "there")
    out = model(**prompt(2)).logits
    torch.testing.assert_close(out.detach(), expected)
    with pytest.raises(StateError, match="gets no gradient there"):
        out.sum().backward()


def test_a_layer_with_shared_parameters_stays_but_its_own_modules_go(device: Any, wrapped: Any) -> None:
    model = build("llama-gqa")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[2].mlp.up_proj.weight
    expected = model(**prompt(2)).logits
    rt = wrapped(model, here_and_there()).elastic
    with pytest.raises(ConfigError, match=r"used elsewhere too, or adapters .* cannot go to another device"):
        rt.migrate(1, "there")
    for module in ("self_attn", "mlp"):
        rt.migrate(f"model.layers.1.{module}", "there")
        assert torch.equal(model(**prompt(2)).logits, expected)
    assert [where.part for where in rt.status().residencies["model.layers.1"]] == ["", "self_attn", "mlp"]


@pytest.mark.parametrize("module", ["model.layers.1", MLP, MLP + ".up_proj"])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_migration_that_fails_at_the_safe_point_is_undone(
    module: str, swapped: bool, device: Any, wrapped: Any, monkeypatch: Any
) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, here_and_there(), variants=("int8",)).elastic
    rt.migrate(MLP + ".down_proj", "there")
    if swapped:
        rt.swap(1, "int8")
    before, expected, where = brought(model), model(**prompt(2)).logits, rt.status().residencies
    update, failures = TransferRouter.update, [RuntimeError("no")]

    def fail_once(routes: TransferRouter) -> None:
        if failures:
            raise failures.pop()
        update(routes)

    monkeypatch.setattr(TransferRouter, "update", fail_once)
    with pytest.raises(RuntimeError, match="no"):
        rt.migrate(module, "there")
    assert rt.status().residencies == where
    assert torch.equal(model(**prompt(2)).logits, expected)
    rt.check()
    rt.migrate(module, "there")
    assert torch.equal(model(**prompt(2)).logits, expected)
    assert_unchanged(model, before)


def test_weights_written_on_their_way_to_another_device_are_not_lost(device: Any, wrapped: Any) -> None:
    model = build("llama-gqa")
    rt = wrapped(model, here_and_there()).elastic
    rt.migrate(MLP, "there")
    refused = pytest.raises(StateError, match=r"model\.layers\.1 were written while they were on their way")
    with written_while_copied(model.model.layers[1].mlp.up_proj.weight), refused:
        rt.migrate(MLP, "cpu#a")
    changed = bits(model)
    rt.migrate(MLP, "cpu#a")
    assert_same_bits(model, changed)


def test_pages_of_modules_elsewhere_are_given_back(device: Any, wrapped: Any) -> None:
    model = build("mixtral")
    rt = wrapped(model, here_and_there(), variants=("int8",)).elastic

    def owners() -> list[dict[str, int]]:
        return [{o: size for o, size in place.owners.items() if o != "kv"} for place in rt.status().places]

    at_first = owners()
    for variant in (None, "int8"):
        rt.migrate(modules_of(model, 1)[2:5], "there")
        if variant:
            rt.swap(1, variant)
        model(**prompt(2))
        rt.restore(1)
        assert rt.migrate(1, "cpu#a").retained_bytes == 0
        assert owners() == at_first


# -- replicas, and models that accelerate dispatched


def dispatched(architecture: str, devices: list[str]) -> Any:
    """A model whose layers accelerate has put on these devices, as `dispatch_model` does on GPUs."""
    from accelerate.hooks import attach_align_device_hook_on_blocks

    model = build(architecture)
    names = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    where = dict.fromkeys(names, "cpu") | {f"model.layers.{i}": device for i, device in enumerate(devices)}
    attach_align_device_hook_on_blocks(model, where, offload=dict.fromkeys(where, False))
    return model


@pytest.mark.parametrize(
    ("devices", "architecture"),
    in_turn([None, ["cpu"] * 3, ["cpu", "cpu", "cpu:0"], ["cpu:0", "cpu", "cpu:0"]], ["mixtral", "llama-gqa"]),
)
def test_layers_have_replicas_and_neighbours_on_any_device_dispatched_or_not(
    architecture: str, devices: list[str] | None, device: Any, wrapped: Any
) -> None:
    inputs, choose = prompt(4), random.Random(str(devices))
    expected = build(architecture)(**inputs).logits
    model = dispatched(architecture, devices) if devices else build(architecture)
    before = brought(model)
    rt = wrapped(model, [small(ROOMY, "cpu#a"), place_there(), small(ROOMY, "cpu#b"), place_there(name="far")]).elastic
    for _ in range(4):
        layers, place = choose.sample(range(3), choose.randint(1, 3)), choose.choice(["cpu#b", "far"])
        there = [i for i in layers if place in [r.place for r in list(rt.status().residencies.values())[i]]]
        if there:
            rt.evict(there, place)
        else:
            rt.replicate(layers, place)
        torch.testing.assert_close(model(**inputs).logits, expected)
        alone = [i for i in range(3) if i not in rt.replicated]
        if alone:
            rt.migrate(choose.choice(alone), choose.choice(["cpu#a", "there"]))
        torch.testing.assert_close(model(**inputs).logits, expected)
        rt.check()
    assert len(rt.passes()) > 0
    elastic.unwrap(model)
    assert_unchanged(model, before)
    torch.testing.assert_close(model(**inputs).logits, expected)


def test_a_forward_that_is_put_over_accelerates_is_still_refused(wrapped: Any) -> None:
    model = dispatched("llama-gqa", ["cpu"] * 3)
    rt = wrapped(model, [small(ROOMY, "cpu#a"), small(ROOMY, "cpu#b")]).elastic
    inner = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    with pytest.raises(ConfigError, match=r"mlp has a forward method of its own, put there by another library"):
        rt.replicate(1, "cpu#b")
    rt.replicate(0, "cpu#b")
    model.model.layers[1].mlp.forward = inner
    rt.replicate(1, "cpu#b")


@torch.no_grad()
def test_a_run_of_replicas_ends_where_the_layers_are_on_another_device(device: Any, wrapped: Any) -> None:
    model, inputs, token = build("llama-gqa"), prompt(4), torch.full((4, 1), 7)
    expected = model(**inputs)
    after = model(token, past_key_values=expected.past_key_values).logits
    rt = wrapped(model, [*here_and_there(), small(ROOMY, "cpu#b")]).elastic
    rt.migrate(1, "there")
    rt.replicate(range(3), "cpu#b")
    found = model(**inputs)
    torch.testing.assert_close(found.logits, expected.logits)
    assert len(rt.passes()) == 3
    torch.testing.assert_close(model(token, past_key_values=found.past_key_values).logits, after)


@pytest.mark.parametrize("variant", ["int8", "int4", "2:4"])
def test_packed_layers_have_replicas_on_another_device(
    variant: str, other_kernels: KernelTarget, device: Any, wrapped: Any
) -> None:
    model, inputs = build("llama-gqa"), prompt(4)
    rt = wrapped(model, here_and_there(), variants=(variant,)).elastic
    rt.swap([0, 1], variant)
    quantized = model(**inputs).logits
    rt.replicate(range(3), "there")
    torch.testing.assert_close(model(**inputs).logits, quantized)
    assert len(rt.passes()) > 0
    rt.evict(range(3), "there")
    assert torch.equal(model(**inputs).logits, quantized)


def test_a_layer_with_modules_elsewhere_has_replicas(device: Any, wrapped: Any) -> None:
    model, inputs = build("llama-gqa"), prompt(4)
    expected = model(**inputs).logits
    rt = wrapped(model, [*here_and_there(), small(ROOMY, "cpu#b")]).elastic
    rt.migrate(MLP, "there")
    rt.replicate(range(3), "cpu#b")
    torch.testing.assert_close(model(**inputs).logits, expected)
    assert len(rt.passes()) > 0


def act_at_random(rt: Any, choose: random.Random, modules: list[str]) -> None:
    """Some action. What is refused is refused with nothing changed."""
    layer, place = choose.randrange(3), choose.choice(["cpu#a", "there", "far"])
    if rt.replicated and choose.random() < 0.6:  # most else is refused
        layer = choose.choice(rt.replicated)
        rt.evict(layer, list(rt.status().residencies.values())[layer][-1].place)
    acts: list[Any] = [
        *[lambda: rt.migrate(choose.choice(modules), place, kv=choose.random() < 0.5)] * 4,
        *[lambda: rt.swap(choose.choice([layer, choose.choice(modules)]), choose.choice(["int8", "2:4"]))] * 2,
        lambda: rt.restore(choose.choice([None, layer])),
        lambda: rt.release(layer),
        lambda: rt.migrate_kv(layer, place),
        lambda: rt.replicate([layer], place),
    ]
    with suppress(StateError):
        choose.choice(acts)()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 20))])
def test_any_actions_in_any_order_on_three_places_of_two_devices(
    seed: int, other_kernels: KernelTarget, device: Any, wrapped: Any
) -> None:
    model, choose, inputs = build(["llama-gqa", "mixtral"][seed % 2]), random.Random(seed), prompt(3)
    before, found = bits(model), {frozenset[Any](): model(**inputs).logits}
    rt = wrapped(model, [*here_and_there(), place_there(name="far")], variants=("int8", "2:4")).elastic
    modules = [name for layer in range(3) for name in modules_of(model, layer)]
    rt.swap(0, "int8")
    for _ in range(16):
        act_at_random(rt, choose, modules)
        units = [unit for layer in range(3) for unit in rt.weights.units(layer)]
        forms = tuple(sorted((unit.index, *unit.precision.key) for unit in units if unit.precision.variants))
        logits = model(**inputs).logits
        expected = found.setdefault(_merged(forms), logits)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        rt.check()
    assert len(found) > 1
    elastic.unwrap(model)
    assert_same_bits(model, before)


def _merged(forms: tuple[Any, ...]) -> frozenset[Any]:
    """Which parameter is in which variant, whatever units the layers consist of."""
    return frozenset((index, *one) for index, *key in forms for one in key)


# -- on a GPU


@pytest.mark.cuda
@pytest.mark.parametrize("architecture", ["llama-gqa", "gpt2", "mixtral"])
def test_modules_go_between_a_cpu_and_a_gpu(architecture: str, wrapped: Any) -> None:
    model, choose = build(architecture), random.Random(architecture)
    before, expected = bits(model), model(**prompt(2)).logits
    rt = wrapped(model, [small(ROOMY, "cpu"), "cuda:0=1GiB"], variants=("int4",)).elastic
    modules = [name for layer in range(3) for name in modules_of(model, layer)]
    with paths.forced("reference"):
        for step in range(12):
            rt.migrate(choose.choice(modules), choose.choice(["cpu", "cuda:0", "cuda:0"]), kv=choose.random() < 0.5)
            torch.testing.assert_close(model(**prompt(2)).logits, expected, rtol=1e-3, atol=1e-3)
            rt.check()
            if step == 6:
                rt.swap(1, "int4")
                expected = model(**prompt(2)).logits
    rt.restore()
    rt.migrate(range(3), "cpu")
    assert_same_bits(model, before)
    rt.migrate(choose.choice(modules), "cuda:0")
    elastic.unwrap(model)
    assert_same_bits(model, before)


@pytest.mark.cuda
def test_packed_layers_have_replicas_on_a_gpu(wrapped: Any) -> None:
    model, inputs = build("llama-gqa"), prompt(4)
    rt = wrapped(model, [small(ROOMY, "cpu"), "cuda:0=1GiB"], variants=("int8",)).elastic
    with paths.forced("reference"):
        rt.swap([0, 1], "int8")
        expected = model(**inputs).logits
        rt.replicate(range(3), "cuda:0")
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-3, atol=1e-3)
    assert len(rt.passes()) > 0


@pytest.mark.cuda
def test_layers_that_accelerate_dispatched_to_a_gpu_have_replicas_on_a_cpu(wrapped: Any) -> None:
    inputs = prompt(4)
    expected = build("llama-gqa")(**inputs).logits
    model = dispatched("llama-gqa", ["cpu", "cuda:0", "cuda:0"])
    rt = wrapped(model, [small(ROOMY, "cpu#a"), "cuda:0#a=1GiB", small(ROOMY, "cpu#b"), "cuda:0#b=1GiB"]).elastic
    for layers, place in (([0, 1, 2], "cpu#b"), ([0, 1], "cuda:0#b")):
        rt.replicate(layers, place)
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-3, atol=1e-3)
    assert len(rt.passes()) > 0
