"""What is cut in a decoder layer: the parts of every architecture's networks add up to the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from elastic.errors import ConfigError
from elastic.planning.sharding.cut_plan import CutPlan, FFNCut, cut_layer
from elastic.planning.sharding.ffn import tp_styles
from elastic.weights.decoder import find_decoder
from support.architectures import CONFIGS, build, prompt
from support.planning.cut_models import Outputs, parameters_of, plan_of

SUMMED = {  # architecture -> the modules whose outputs are added up, in its first two layers
    "phi": {"mlp.fc2"},
    "gpt2": {"mlp.c_proj"},
    "gpt-neox": {"mlp.dense_4h_to_h"},
    "falcon": {"mlp.dense_4h_to_h"},
    "bloom": {"mlp.dense_4h_to_h"},
    "opt": {"fc2"},
    "qwen3-moe": {"mlp.experts"},
    "mixtral": {"mlp.experts"},
    "gpt-oss": {"mlp.experts"},
    "deepseek-v3": {"mlp.down_proj", "mlp.experts", "mlp.shared_experts.down_proj"},
    "qwen3-next": {"mlp.experts", "mlp.shared_expert.down_proj"},
}
WITHOUT_PLAN = {"gpt2", "falcon", "opt", "bloom", "gpt-oss"}
AMBIGUOUS = {"phi3": "seems to hold two matrices in one"}
EXACT = 1e-13  # of the largest element: some roundings of float64


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("parts", [2, 4])
@torch.no_grad()
def test_parts_add_up_to_the_whole(name: str, parts: int) -> None:
    model = build(name, torch.float64)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the stock kernel knows no float64
    layers = find_decoder(model).layers
    summed = set()
    for index in (0, 1):
        outputs = Outputs(model, layers[index], **prompt(length=12))
        for ffn in plan_of(model, index, parts).ffns:
            whole = outputs.of(ffn.summed, {})
            shares = [outputs.of(ffn.summed, parameters_of(layers[index], ffn, part)) for part in range(parts)]
            assert (torch.stack(shares).sum(0) - whole).abs().max() <= EXACT * whole.abs().max()
            assert all((share - whole).abs().max() > 1e-3 * whole.abs().max() for share in shares)
            assert ffn.source == ("structure" if name in WITHOUT_PLAN else "plan")
            summed.add(ffn.summed)
    assert summed == SUMMED.get(name, {"mlp.down_proj"})


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_alone_say_the_same_as_the_plan(name: str) -> None:
    model = build(name)
    for index in (0, 1):
        if name in AMBIGUOUS:
            with pytest.raises(ConfigError, match=AMBIGUOUS[name]):
                plan_of(model, index, 2, planned=False)
            continue
        by_shapes, by_plan = (plan_of(model, index, 2, planned=planned) for planned in (False, True))
        assert by_shapes.cuts == by_plan.cuts
        assert {ffn.source for ffn in by_shapes.ffns} == {"structure"}


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_everything_but_the_networks_stays_whole(name: str) -> None:
    model = build(name)
    layer = find_decoder(model).layers[1]
    plan = plan_of(model, 1, 4)
    once = {parameter for ffn in plan.ffns for parameter in ffn.once}
    assert not any("attn" in parameter or "norm" in parameter for parameter in (*plan.cuts, *once))
    sizes = {parameter: tensor.numel() for parameter, tensor in layer.named_parameters()}
    cut = sum(sizes[parameter] for parameter in plan.cuts)
    assert plan.elements == sum(sizes.values())
    assert cut > 0.3 * plan.elements
    kept = [plan.kept(part) for part in range(4)]
    assert kept == [plan.elements - cut + cut // 4] * 4


def test_a_fused_matrix_is_cut_in_both_halves() -> None:
    cut = plan_of(build("phi3"), 0, 2).cuts["mlp.gate_up_proj.weight"]
    assert cut.rows == ((range(24), range(48, 72)), (range(24, 48), range(72, 96)))
    assert (cut.dim, cut.row_elements, cut.elements(0)) == (0, 32, 48 * 32)


def test_the_last_matrix_is_stored_by_the_rows_that_are_cut() -> None:
    cut = plan_of(build("llama-gqa"), 0, 2).cuts["mlp.down_proj.weight"]
    assert (cut.shape, cut.dim, cut.row_elements) == ((32, 48), 1, 32)


def test_groups_of_a_quantized_matrix_are_not_cut_apart() -> None:
    model = build("llama-gqa")
    assert plan_of(model, 0, 2, unit=16).cuts["mlp.down_proj.weight"].rows == ((range(16),), (range(16, 48),))
    with pytest.raises(ConfigError, match=r"mlp: 48 rows in units of 16, which may not be cut, cannot be cut into 4"):
        plan_of(model, 0, 4, unit=16)
    assert plan_of(build("mixtral"), 0, 4, unit=16).parts == 4, "experts are whole, so are their groups"


def test_experts_are_not_cut_further_than_one_each() -> None:
    with pytest.raises(ConfigError, match=r"mlp.experts: 4 rows cannot be cut into 8 parts; 4 is the most"):
        plan_of(build("mixtral"), 0, 8)


# -- plans

GATED = {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}
PLAN = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
ATTENTION: dict[str, tuple[int, ...]] = {"self_attn.q_proj.weight": (64, 32), "self_attn.o_proj.weight": (32, 64)}


def shapes(matrices: Mapping[str, tuple[int, ...]], module: str = "mlp.") -> dict[str, tuple[int, ...]]:
    return {f"{module}{name}.weight": shape for name, shape in matrices.items()}


def cut(own: Mapping[str, tuple[int, ...]], styles: Mapping[str, str] | None = None, **options: Any) -> CutPlan:
    planned = {f"mlp.{name}": style for name, style in (styles or {}).items()}
    return cut_layer({**ATTENTION, **own}, 32, 2, styles=planned, **options)


def only(plan: CutPlan) -> FFNCut:
    (ffn,) = plan.ffns
    return ffn


def test_styles_are_those_of_the_layer_and_numbers_in_names_are_no_wildcards() -> None:
    plan = {
        "layers.*.mlp.fc1": "colwise",
        "layers.*.mlp.fc2": "rowwise",
        "layers.*.mlps.*.up": "colwise",
        "layers.*.mlp.experts.down": "rowwise",
        "vision.*.mlp.fc1": "rowwise",
        "norm": "replicate",
    }
    names = ["mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight", "mlps.1.up.weight", "mlp.experts.down", "scale"]
    styles = {"mlp.fc1": "colwise", "mlp.fc2": "rowwise", "mlps.1.up": "colwise", "mlp.experts.down": "rowwise"}
    assert tp_styles(plan, "layers.11", names) == tp_styles(plan, "model.layers.11", names) == styles
    assert tp_styles(plan, "vision.0", names) == {"mlp.fc1": "rowwise"}
    assert tp_styles(None, "layers.0", names) == {}


def test_a_plan_decides_where_shapes_cannot() -> None:
    square = shapes({"gate_proj": (32, 32), "up_proj": (32, 32), "down_proj": (32, 32)})
    with pytest.raises(ConfigError, match=r"any of mlp.gate_proj, mlp.up_proj, mlp.down_proj may be the last"):
        cut(square)
    assert only(cut(square, PLAN)).summed == "mlp.down_proj"


def test_matrices_of_a_module_that_a_plan_gathers_stay_whole() -> None:
    more = {**GATED, "router": (7, 32), "post": (32, 32)}
    ffn = only(cut(shapes(more), {**PLAN, "router": "colwise_gather_output", "post": "rowwise_split_input"}))
    assert {one.name for one in ffn.cuts} == set(shapes(GATED))


def test_a_plan_that_names_no_network_cuts_none_by_shapes() -> None:
    """A pair beside the network that takes more than its input, as gemma3n's per-layer inputs, is in no plan."""
    beside = {"per_layer_gate.weight": (8, 32), "per_layer_projection.weight": (32, 8)}
    assert only(cut({**shapes(GATED), **beside}, PLAN)).module == "mlp"
    with pytest.raises(ConfigError, match="the layer itself, mlp all look like feed-forward networks"):
        cut({**beside, **shapes(GATED)})


@pytest.mark.parametrize(
    ("matrices", "styles", "words"),
    [
        (
            {"up": (48, 32), "down": (32, 40)},
            {"up": "colwise", "down": "rowwise"},
            "mlp.up has 48 outputs and mlp.down 40",
        ),
        (
            {"a": (48, 32), "b": (32, 48), "c": (32, 48)},
            {"a": "colwise", "b": "rowwise", "c": "rowwise"},
            "the plan cuts mlp.a, mlp.b, mlp.c together",
        ),
        ({"up": (48, 32), "down": (32, 40)}, None, "no feed-forward network can be cut.*mlp.up.weight .48, 32."),
        ({"w": (48, 32), "x": (48, 48), "y": (48, 48), "z": (32, 48)}, None, "no feed-forward network can be cut"),
        ({"gate_up": (96, 32), "down": (32, 48)}, None, "mlp.gate_up seems to hold two matrices in one"),
    ],
)
def test_what_is_no_network_is_refused_in_words(
    matrices: dict[str, tuple[int, ...]], styles: dict[str, str] | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        cut(shapes(matrices), styles)


@pytest.mark.parametrize("styles", [None, PLAN])
def test_a_norm_of_the_size_inside_is_refused(styles: dict[str, str] | None) -> None:
    """BitNet has one between the product of gate and up, and down: it needs all of it."""
    with pytest.raises(ConfigError, match=r"mlp.ffn_sub_norm.weight has the 48 elements of the size inside"):
        cut({**shapes(GATED), "mlp.ffn_sub_norm.weight": (48,)}, styles)


def test_blocks_of_a_matrix_that_is_no_expert_stay_whole() -> None:
    """RecurrentGemma's gates are [heads, width, width]."""
    gates = {"rg_lru.input_gate": (4, 8, 8), "rg_lru.recurrent_gate": (4, 8, 8)}
    assert only(cut({**gates, **shapes(GATED)})).module == "mlp"


def test_experts_with_a_parameter_of_another_size_are_refused() -> None:
    experts = {"mlp.experts.gate_up_proj": (4, 96, 32), "mlp.experts.down_proj": (4, 32, 48)}
    assert only(cut({**experts, "mlp.experts.scale": (4,)})).cuts[2].rows == ((range(2),), (range(2, 4),))
    with pytest.raises(ConfigError, match=r"mlp.experts has 4 experts, and mlp.experts.scale of shape \(32,\)"):
        cut({**experts, "mlp.experts.scale": (32,)})


def test_a_transposed_matrix_is_cut_along_its_other_dimension() -> None:
    own = {"mlp.c_fc.weight": (32, 48), "mlp.c_fc.bias": (48,), "mlp.c_proj.weight": (48, 32), "mlp.c_proj.bias": (32,)}
    ffn = only(cut(own, transposed=("mlp.c_fc", "mlp.c_proj")))
    assert {one.name: one.dim for one in ffn.cuts} == {"mlp.c_fc.weight": 1, "mlp.c_fc.bias": 0, "mlp.c_proj.weight": 0}
    assert (ffn.summed, ffn.once) == ("mlp.c_proj", ("mlp.c_proj.bias",))
