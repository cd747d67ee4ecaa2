"""Full matrices that lie in their pages in oneDNN's order: bits, ledger, and every way out of the pages and back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elastic.engines.vllm import assembly
from elastic.engines.vllm.assembly import ElasticModel
from elastic.engines.vllm.client.settings import EngineSettings
from elastic.weights.prepacked import choice, joined, onednn, padding
from elastic.weights.prepacked.joined import JoinedProduct, join
from elastic.weights.prepacked.onednn import OneDNNLayout, find_layout, multiply
from elastic.weights.prepacked.source import ResidentSource
from elastic.weights.proxy.tensor import WeightProxy

SHAPES = [(256, 128), (128, 384), (1024, 512)]
_numbers = itertools.count()


class Linear(nn.Module):
    """A linear layer that is no `nn.Linear`, as vLLM's are."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(Linear(256, 128), nn.SiLU(), Linear(128, 256)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def layout_of(weight: torch.Tensor) -> OneDNNLayout:
    layout = find_layout((weight.shape[0], weight.shape[1]), weight.dtype)
    assert layout is not None
    return layout


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def packed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def choice_of(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "prepacked_layout", lambda weight: layout_of(weight) if packed else None)


def make_elastic(model: Model, settings: EngineSettings) -> ElasticModel:
    return ElasticModel(
        model,
        settings,
        torch.device("cpu"),
        instance=f"prepacked-{next(_numbers)}",
        is_packable=lambda module, parameter: isinstance(module, Linear),
        own_worker=None,
        find_files=str,
    )


@pytest.fixture
def elastic_model(choice_of: None) -> Iterator[tuple[Model, ElasticModel]]:
    model = Model()
    elastic = make_elastic(model, EngineSettings(16 << 20, variants=("int4",)))
    yield model, elastic
    elastic.runtime.check()
    elastic.detach()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_matrix_takes_the_plain_ones_bytes_and_returns_bit_for_bit(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = torch.randn(shape).to(dtype)
    layout = find_layout(shape, dtype)
    if layout is None:  # full precision is packed on all CPUs
        assert dtype is torch.bfloat16
        with pytest.raises(RuntimeError, match="bf16"):
            torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        return
    packed = layout.pack(weight)
    assert packed.shape == weight.shape
    assert packed.nbytes == weight.nbytes
    assert torch.equal(layout.unpack(packed), weight)


@pytest.mark.parametrize("rows", [0, 1, 7, 64])
@pytest.mark.parametrize("bias", [None, torch.randn(1024)])
def test_products_are_as_exact_as_a_sum_can_be(rows: int, bias: torch.Tensor | None) -> None:
    weight, x = torch.randn(1024, 512), torch.randn(2, rows, 512)
    layout = layout_of(weight)
    packed = layout.pack(weight)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    most = F.linear(x.abs().double(), weight.abs().double(), None if bias is None else bias.abs().double())
    error = (multiply(x, layout.view(packed), bias) - exact).abs()
    assert (error <= 513 * torch.finfo(torch.float32).eps * most).all()  # of a sum in any order


def test_a_view_shows_what_its_memory_has_now() -> None:
    one, other, x = torch.randn(256, 128), torch.randn(256, 128), torch.randn(4, 128)
    layout = layout_of(one)
    memory = layout.pack(one)
    matrix = layout.view(memory)
    memory.copy_(layout.pack(other))
    torch.testing.assert_close(multiply(x, matrix, None), F.linear(x, other))


def test_matrices_that_would_need_padding_stay_plain() -> None:
    weight = torch.randn(100, 60)
    padded = torch.ops.mkldnn._nbytes(onednn._reorder(weight)) != weight.nbytes  # not by that of torch 2.11
    assert (find_layout((100, 60), torch.float32) is None) is padded
    assert find_layout((256, 128), torch.float16) is None


def test_what_is_faster_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for ratio, packed in ((0.9, True), (1.1, False)):
        choice._faster_layout.cache_clear()
        monkeypatch.setattr(choice, "packed_time_ratios", lambda *_, ratio=ratio: [ratio] * 4)
        assert (choice.prepacked_layout(torch.randn(512, 256)) is not None) is packed
    choice._faster_layout.cache_clear()
    monkeypatch.setattr(choice, "ROTATED_BYTES", 1 << 18)
    assert choice.prepacked_layout(torch.randn(256, 512).t()) is None
    monkeypatch.undo()
    layout, state = layout_of(torch.randn(256, 128)), torch.get_rng_state()
    assert all(ratio > 0 for ratio in choice.packed_time_ratios(layout))
    assert torch.equal(torch.get_rng_state(), state), "random numbers of the program are its own"


def test_layers_leave_and_return_in_their_order(elastic_model: tuple[Model, ElasticModel], packed: bool) -> None:
    model, elastic = elastic_model
    x, runtime = torch.randn(5, 128), elastic.runtime
    expected, plain = model(x), Model()(x)
    torch.testing.assert_close(expected, plain)
    for layers in ([1], [0, 2], [0, 1, 2]):
        runtime.release(layers)
        assert torch.equal(model(x), expected)  # streamed in their order, too
        runtime.restore()
        assert torch.equal(model(x), expected)
    runtime.swap([0, 1], "int4")
    assert not torch.equal(model(x), expected)
    runtime.release([1])
    runtime.restore()
    assert torch.equal(model(x), expected)
    assert runtime.form() == ("float32",) * 3
    assert isinstance(model.layers[0][0].weight, WeightProxy) is packed


def test_what_is_written_into_a_full_matrix_is_what_returns(elastic_model: tuple[Model, ElasticModel]) -> None:
    model, elastic = elastic_model
    x, fresh = torch.randn(5, 128), torch.randn(256, 128)
    elastic.runtime.release([0])
    elastic.runtime.restore()
    with torch.no_grad():
        model.layers[0][0].weight.copy_(fresh)
    expected = model(x)
    torch.testing.assert_close(model.layers[0][0](x), F.linear(x, fresh))
    elastic.runtime.release([0])
    assert torch.equal(model(x), expected)
    elastic.runtime.restore()
    assert torch.equal(model(x), expected)


def test_a_joined_product_is_of_what_its_matrices_are_when_they_are_multiplied() -> None:
    weights, one, memory = joined_product()
    parts = memory.view(-1).split([weight.numel() for weight in weights])
    sources = [
        ResidentSource("it", layout_of(weight), part.view(weight.shape), lambda: None)
        for weight, part in zip(weights, parts, strict=True)
    ]
    for number, source in enumerate(sources):
        source.joined = one, number
    x, fresh = torch.randn(3, 128), torch.randn_like(weights[1])
    torch.testing.assert_close(sources[0].product(x), F.linear(x, weights[0]), rtol=1e-4, atol=1e-4)
    sources[1].write(fresh)
    torch.testing.assert_close(sources[1].product(x), F.linear(x, fresh), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sources[2].product(x), F.linear(x, weights[2]), rtol=1e-4, atol=1e-4)


def test_what_is_written_while_a_matrix_is_away_is_what_returns(elastic_model: tuple[Model, ElasticModel]) -> None:
    model, elastic = elastic_model
    x, fresh = torch.randn(5, 128), torch.randn(256, 128)
    elastic.runtime.release([0])
    with torch.no_grad():
        model.layers[0][0].weight.copy_(fresh)
    torch.testing.assert_close(model.layers[0][0](x), F.linear(x, fresh))
    elastic.runtime.swap([0], "int4")
    error = (model.layers[0][0](x) - F.linear(x, fresh)).abs().mean()
    assert error < 0.3 * F.linear(x, fresh).abs().mean()  # of the weights that were written, not of the first ones
    elastic.runtime.restore()
    assert torch.equal(model.layers[0][0].weight.detach(), fresh)


def test_the_ledger_counts_as_many_bytes(elastic_model: tuple[Model, ElasticModel]) -> None:
    _, elastic = elastic_model
    (place,) = elastic.runtime.status().places
    layers = sum(nbytes for owner, nbytes in place.owners.items() if owner.startswith("layer:"))
    pages = -(-(2 * 256 * 128 * 4) // place.page_bytes)
    assert layers == 3 * pages * place.page_bytes


@pytest.mark.usefixtures("choice_of")
def test_a_model_that_is_detached_has_its_weights_bit_for_bit() -> None:
    model = Model()
    elastic = make_elastic(model, EngineSettings(16 << 20))
    elastic.runtime.release([2])
    elastic.detach()
    for mine, other in zip(model.parameters(), Model().parameters(), strict=True):
        assert type(mine) is nn.Parameter
        assert torch.equal(mine, other)


@pytest.mark.usefixtures("choice_of")
def test_layers_that_find_no_room_begin_in_host_memory() -> None:
    model, x = Model(), torch.randn(5, 128)
    elastic = make_elastic(model, EngineSettings(11 << 16))
    assert elastic.runtime.form() == ("absent",) * 3
    torch.testing.assert_close(model(x), Model()(x))
    elastic.detach()
    assert torch.equal(model(x), Model()(x))


def test_a_bias_is_added_as_for_a_matrix_alone() -> None:
    """In bfloat16 a sum that is rounded before it has its bias has other bits."""
    weights, one, _memory = joined_product()
    layout, bias, x = layout_of(weights[0]), torch.randn(256), torch.randn(3, 128)
    source = ResidentSource("layer", layout, packed := layout.pack(weights[0]), lambda: None)
    source.joined = one, 0
    assert torch.equal(source.product(x, bias), multiply(x, layout.view(packed), bias))
    assert one.product(x, 1) is None, "it was computed alone"


def test_other_functions_see_the_plain_matrix() -> None:
    weight, x = torch.randn(256, 128), torch.randn(3, 128)
    layout = layout_of(weight)
    proxy = WeightProxy(weight, ResidentSource("layer", layout, layout.pack(weight), lambda: None))
    assert torch.equal(x @ proxy.T, x @ weight.T)
    assert torch.equal(proxy.detach(), weight)
    assert torch.equal(proxy.clone(), weight)
    assert F.linear(x.double(), proxy).dtype == torch.float64


def test_small_matrices_stay_plain_whatever_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "packed_time_ratios", lambda *_: [0.5])
    choice._faster_layout.cache_clear()
    assert choice.prepacked_layout(torch.randn(512, 256)) is not None
    assert choice.prepacked_layout(torch.randn(512, 256).bfloat16()) is None
    choice._faster_layout.cache_clear()


def test_matrices_of_the_same_inputs_are_packed_together_where_one_product_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed: list[tuple[tuple[int, int], list[int]]] = []

    def ratios(layout: OneDNNLayout, outputs: Sequence[int] = ()) -> list[float]:
        timed.append((layout.shape, list(outputs)))
        return [together_s if outputs else 1.2]

    monkeypatch.setattr(choice, "packed_time_ratios", ratios)
    q, k = torch.randn(512, 256), torch.randn(128, 256)
    if joined.joined_layout((layout_of(q), layout_of(k)), torch.get_num_threads()) is None:
        pytest.skip("this build of oneDNN orders joined matrices otherwise than each")
    for together_s in (0.9, 1.1):
        choice._faster_layout.cache_clear()
        choice._faster_together.cache_clear()
        timed.clear()
        packed = [choice.prepacked_layout(weight, (q, k)) for weight in (q, k)]
        assert packed == ([layout_of(q), layout_of(k)] if together_s < 1 else [None, None])
        assert timed[0] == ((640, 256), [512, 128])
    assert choice.prepacked_layout(q, (q, torch.randn(100, 256))) is None, "one cannot be packed"
    choice._faster_layout.cache_clear()
    choice._faster_together.cache_clear()


def test_of_a_very_large_matrix_a_part_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[OneDNNLayout] = []
    monkeypatch.setattr(choice, "TIMED_BYTES", 256 * 128 * 4)
    monkeypatch.setattr(choice, "packed_time_ratios", lambda layout, *_: timed.append(layout) or [0.5])
    choice._faster_layout.cache_clear()
    large = layout_of(torch.empty(1024, 128))
    assert choice.prepacked_layout(torch.empty(1024, 128)) == large
    assert [layout.shape for layout in timed] == [(256, 128)]
    choice._faster_layout.cache_clear()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The outputs of each product that was computed of several matrices."""
    computed: list[int] = []

    def count(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        computed.append(matrix.shape[0])
        return multiply(x, matrix, bias)

    monkeypatch.setattr(padding, "multiply", count)
    return computed


OUTPUTS = (256, 64, 64)


def joined_product() -> tuple[list[torch.Tensor], JoinedProduct, torch.Tensor]:
    """Return three matrices, a product with all of them, and the memory that they lie in."""
    whole = torch.randn(sum(OUTPUTS), 128)
    memory = layout_of(whole).pack(whole)
    return list(whole.split(OUTPUTS)), JoinedProduct(layout_of(whole).view(memory), OUTPUTS), memory


@pytest.mark.parametrize("rows", [0, 1, 16, 100])
def test_matrices_with_the_same_inputs_are_multiplied_at_once(rows: int, products: list[int]) -> None:
    weights, one, memory = joined_product()
    x = torch.randn(2, rows, 128)
    for number, weight in enumerate(weights):
        torch.testing.assert_close(one.product(x, number), F.linear(x, weight), rtol=1e-4, atol=1e-4)
    assert products == [384]
    assert one.product(x, 2) is None, "nothing is kept once all have their part"
    memory.copy_(layout_of(memory).pack(fresh := torch.randn_like(memory)))
    with torch.inference_mode():
        inputs = torch.randn(3, 128)
        torch.testing.assert_close(one.product(inputs, 0), F.linear(inputs, fresh[:256]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.product(inputs, 2), F.linear(inputs, fresh[320:]), rtol=1e-4, atol=1e-4)


def test_a_joined_product_is_of_the_inputs_it_is_given(products: list[int]) -> None:
    """Not of others that another thread brings meanwhile, nor of what was written since."""
    weights, one, _memory = joined_product()
    x, other = torch.randn(2, 3, 128).unbind()
    steps = ((1, x, False), (0, x, True), (1, other, False), (1, x, True), (0, other, True), (1, x, False))
    for number, inputs, known in (*steps, (1, other.clone(), False), (2, other, True), (1, other, False)):
        product = one.product(inputs, number)
        assert (product is not None) is known
        if product is not None:
            torch.testing.assert_close(product, F.linear(inputs, weights[number]), rtol=1e-4, atol=1e-4)
    one.product(x, 0)
    x.mul_(2)
    assert one.product(x, 1) is None
    one.product(other, 0)
    assert one.product(x, 2) is None
    assert one.product(other, 1) is None, "nothing is kept behind the last matrix, whatever its inputs"
    assert products == [384] * 4


def test_matrices_are_one_where_they_lie_so_and_multiply_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(sum(OUTPUTS), 128)
    weights = whole.split(OUTPUTS)
    layouts = tuple(layout_of(weight) for weight in weights)
    memory = torch.cat([layout.pack(weight).view(-1) for layout, weight in zip(layouts, weights, strict=True)])
    packed = tuple(part.view(-1, 128) for part in memory.split([weight.numel() for weight in weights]))
    one = join(layouts, packed)
    if one is None:
        pytest.skip("this CPU orders these, or adds them up, otherwise than one by one")
    x = torch.randn(5, 128)
    for number, (layout, part) in enumerate(zip(layouts, packed, strict=True)):
        product = one.product(x, number)
        assert product is not None
        assert torch.equal(product, multiply(x, layout.view(part), None))
    assert join(layouts[1:], packed[:0:-1]) is None, "not one behind the other"
    narrow = layout_of(torch.empty(256, 64))
    assert join((*layouts[:2], narrow), packed) is None, "other inputs"
    monkeypatch.setattr(joined, "LARGEST_BYTES", 384 * 128 * 4 - 1)
    joined.joined_layout.cache_clear()
    assert join(layouts, packed) is None, "too large"
    monkeypatch.undo()
    other = multiply
    monkeypatch.setattr(joined, "multiply", lambda x, matrix, bias: other(x, matrix, bias) * (1 + matrix.shape[0]))
    joined.joined_layout.cache_clear()
    assert join(layouts, packed) is None, "other bits"
    joined.joined_layout.cache_clear()
