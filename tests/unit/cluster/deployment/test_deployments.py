"""Two models on the same devices: each answers as the plain model, and changes its configuration under requests."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers as t

import elastic
from elastic.cluster.deployment.choice import Chooser, FleetOption, settled
from elastic.cluster.deployment.deployed import Deployed
from elastic.cluster.deployment.deployments import Deployments
from elastic.cluster.deployment.devices import DeviceBook
from elastic.cluster.deployment.ranks import forms_in
from elastic.engines.base import Request
from elastic.errors import CapacityError, ConfigError, StateError
from elastic.estimation.device_list import parse_devices
from elastic.estimation.estimate import Estimator
from elastic.estimation.model_layout import layout_of
from elastic.estimation.profile import CostProfile
from elastic.estimation.profiles.store import ProfileStore
from elastic.planning.deployment.placing import Deployment, Refusal, place
from elastic.planning.deployment.replicas import ReplicaRange
from elastic.planning.estimate.configuration import Configuration
from elastic.planning.estimate.intent import Intent
from elastic.planning.estimate.performance import Load
from elastic.planning.pipeline.chunk_cost import ChunkCost
from elastic.types import Swap
from support import architectures
from support.lossless_variant import exact
from support.serving.generations import Collector, continuation, prompts, serve

ENGINE = {"block_tokens": 8, "max_batch_tokens": 64}
OPTIONS: dict[str, Any] = {
    "launch": "in-process",
    "fleet": {"engine": ENGINE, "beat_timeout_s": 60},
    "replanning": None,
}
DEVICES = "cpu#a=12MiB,cpu#b=12MiB,cpu#c=12MiB"
LOAD = Load(64, 64, 1.0)
PROMPTS = prompts([5, 40, 70], architectures.VOCAB)
NEW = 60


@pytest.fixture(scope="module")
def paths(tmp_path_factory: Any) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for name in ("qwen3", "llama-gqa"):
        exact(architectures.build(name)).save_pretrained(folder / name)
    return {name: str(folder / name) for name in ("qwen3", "llama-gqa")}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    models = {name: exact(architectures.build(name)) for name in ("qwen3", "llama-gqa")}
    return {name: [continuation(model, prompt, NEW) for prompt in PROMPTS] for name, model in models.items()}


@pytest.fixture
def fleet() -> Iterator[Deployments]:
    with Deployments(DEVICES, weights=("full", "int8"), **OPTIONS) as running:
        yield running


def requests(count: int = 1) -> list[Request]:
    return [Request(prompt, NEW) for prompt in PROMPTS * count]


def tokens(heard: Collector, sent: list[Request]) -> list[list[int]]:
    return [heard.tokens[request.id] for request in sent]


@pytest.mark.parametrize(("theta", "devices"), [(0.9, {"cpu#a"}), (0.0, {"cpu#a", "cpu#b"})])
def test_theta_says_up_to_which_load_devices_are_packed(theta: float, devices: set[str], paths: Any) -> None:
    """Two models: both on one device, or each on its own."""
    with Deployments(DEVICES, weights=("full",), theta=theta, **OPTIONS) as fleet:
        for name in ("one", "two"):
            fleet.deploy(paths["qwen3"], "memory", load=LOAD, name=name)
        assert {device for each in fleet.status() for stage in each.stages for device in stage.devices} == devices


def test_each_model_answers_as_it_does_by_itself(fleet: Deployments, paths: Any, expected: Any) -> None:
    for name, path in paths.items():
        fleet.deploy(path, "memory", load=LOAD, weights=("full",), name=name.partition("-")[0])
    assert fleet.names() == ("qwen3", "llama")
    for name, path in zip(fleet.names(), paths, strict=True):
        sent = requests()
        assert tokens(serve(fleet[name], sent), sent) == expected[path]
    packed, *others = fleet.devices()
    assert packed.models == ("qwen3", "llama")
    assert not any(device.models for device in others), "hybrid packs what has little to do"
    taken = sum(stage.nbytes for each in fleet.status() for stage in each.stages)
    assert 0.9 * taken < packed.memory_bytes - packed.free_bytes < 1.5 * taken
    fleet.remove("qwen3")
    assert fleet.devices()[0].models == ("llama",)
    with pytest.raises(ConfigError, match="no deployment 'qwen3'; there are: llama"):
        fleet["qwen3"]


@pytest.mark.parametrize("swapped", [(0, 1), (1,), (0,)])
def test_a_swap_by_hand_is_seen_and_undone_by_the_next_change(
    swapped: tuple[int, ...], fleet: Deployments, paths: Any, expected: Any
) -> None:
    intent = Intent("latency", quality_loss=0.0)
    fleet.deploy(paths["qwen3"], intent, load=LOAD, name="model", replicas=2)
    deployed = fleet._named("model")
    assert deployed.plan.configuration.weights == "full"
    rank = list(deployed.ranks.by_device.values())[1]
    fleet["model"].apply(rank, Swap(swapped, "int8"))
    deployed.look(time.monotonic(), deployed.ranks.look())
    seen = deployed.plan
    told = fleet.intend("model", intent, dry_run=True)
    assert (told.status, [step.kind for step in told.steps]) == ("planned", ["restore", "limit"])
    assert deployed.plan is seen
    assert fleet.intend("model", intent).status == "applied"
    assert forms_in(fleet["model"].look(rank)) == {"full"}
    sent = requests()
    assert tokens(serve(fleet["model"], sent), sent) == expected["qwen3"]
    assert fleet.intend("model", intent).status == "unchanged"


def test_status_tells_the_form_that_all_layers_were_swapped_to_by_hand(fleet: Deployments, paths: Any) -> None:
    fleet.deploy(paths["qwen3"], Intent("latency", quality_loss=0.0), load=LOAD, name="model")
    deployed = fleet._named("model")
    layers = tuple(range(fleet["model"].look("r0").status.layers))
    fleet["model"].apply("r0", Swap(layers, "int8"))
    deployed.look(time.monotonic(), deployed.ranks.look())
    (status,) = fleet.status()
    assert (status.configuration, str(status.estimate.configuration)) == ("TP1 PP1 int8", "TP1 PP1 int8")


def test_a_form_that_it_may_not_have_cannot_stay(paths: Any) -> None:
    engine = {**OPTIONS["fleet"], "wrap": {"variants": ("int4",)}}
    with Deployments(DEVICES, **{**OPTIONS, "fleet": engine}) as fleet:
        fleet.deploy(paths["qwen3"], load=LOAD, name="model")
        deployed = fleet._named("model")
        began_s = time.monotonic()
        layers = range(fleet["model"].look("r0").status.layers)
        fleet["model"].apply("r0", Swap(tuple(layers), "int4"))
        assert deployed.look(began_s, deployed.ranks.look()) is None
        assert fleet.status()[0].configuration == "TP1 PP1 int4"
        assert deployed.estimate().why_not == "it may have full"
        done = deployed.look(began_s + 11, deployed.ranks.look())
        assert done is not None
        assert (done.status, done.after) == ("applied", "TP1 PP1 full")
        assert forms_in(fleet["model"].look("r0")) == {"full"}


def test_what_a_stopped_change_had_taken_of_devices_is_given_back(
    fleet: Deployments, paths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.deploy(paths["qwen3"], "latency", load=LOAD, name="model")
    before, ranks = [device.free_bytes for device in fleet.devices()], fleet._named("model").ranks

    def refuse(*_: Any) -> None:
        raise StateError("not now")

    with monkeypatch.context() as patched:
        patched.setattr(ranks, "do", refuse)
        stopped = fleet.intend("model", Intent("latency", quality_loss=0.0))
    assert (stopped.status, stopped.before, stopped.after) == ("partial", "TP1 PP1 int8", "TP1 PP1 int8")
    assert [device.free_bytes for device in fleet.devices()] == before


def test_an_intent_changes_the_configuration_under_requests(fleet: Deployments, paths: Any) -> None:
    fleet.deploy(paths["qwen3"], "latency", load=LOAD, name="model")
    assert fleet._named("model").observed() == Configuration(weights="int8")
    heard, sent = Collector(), requests(3)
    for request in sent:
        fleet["model"].submit(request, heard)
    told = fleet.intend("model", Intent("latency", quality_loss=0.0), dry_run=True)
    assert (told.status, told.before, told.after) == ("planned", "TP1 PP1 int8", "TP1 PP1 full")
    assert [step.kind for step in told.steps] == ["restore", "limit"]
    assert told.seconds > 0
    assert fleet._named("model").observed() == Configuration(weights="int8")
    done = fleet.intend("model", Intent("latency", quality_loss=0.0))
    assert (done.status, done.after) == ("applied", told.after)
    assert fleet._named("model").observed() == Configuration()
    heard.wait([request.id for request in sent])
    assert {len(got) for got in tokens(heard, sent)} == {NEW}
    assert {heard.ends[request.id].finish for request in sent} == {"length"}
    fleet["model"].check()
    assert fleet.intend("model", Intent("latency", quality_loss=0.0)).status == "unchanged"
    back = fleet.intend("model", "latency", dry_run=True)
    seconds = {step.kind: step.seconds for step in back.steps}
    assert seconds["limit"] > 0, "that is known since it was done"
    assert back.seconds == sum(seconds.values())


def to(deployed: Deployed, configuration: Configuration, devices: str) -> Deployment:
    """Return a configuration on these devices, as the placement gives it."""
    states = [state for state in deployed._book.states(deployed.name) if state.name[-1] in devices]
    found = [each for each in deployed.chooser.options(LOAD, Intent()) if each.configuration == configuration]
    placed = place(found, states, "packing")
    assert isinstance(placed, Deployment)
    return settled(found[0], placed, states)


@pytest.mark.slow
def test_ranks_come_go_and_share_layers_and_every_token_is_the_models(
    fleet: Deployments, paths: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.deploy(paths["qwen3"], load=LOAD, weights=("full",), name="model")
    deployed = fleet._named("model")
    heard, sent = Collector(), requests(3)
    for configuration, devices in (
        (Configuration(1, 2), "ab"),
        (Configuration(2, 1), "bc"),
        (Configuration(1, 1), "c"),
    ):
        more = requests(1)
        sent += more
        for request in sent if len(sent) == 12 else more:
            fleet["model"].submit(request, heard)
        wanted = to(deployed, configuration, devices)
        monkeypatch.setattr(Chooser, "choose", lambda *_, wanted=wanted: wanted)
        assert fleet.intend("model").status == "applied"
        assert deployed.observed() == configuration
        assert {device[-1] for device in deployed.ranks.by_device} == set(devices)
    heard.wait([request.id for request in sent])
    assert tokens(heard, sent) == expected["qwen3"] * 6
    fleet["model"].check()
    reserved = {device.name[-1]: device.memory_bytes - device.free_bytes for device in fleet.devices()}
    assert reserved["a"] == reserved["b"] == 0 < reserved["c"]


@pytest.mark.slow
def test_replicas_share_the_requests_and_changes_of_the_intent_keep_them(
    fleet: Deployments, paths: Any, expected: Any
) -> None:
    told = fleet.deploy(paths["qwen3"], load=LOAD, weights=("full", "int8"), name="model", replicas=2)
    assert (told.replicas, len(told.stages)) == (2, 2)
    deployed, heard, sent = fleet._named("model"), Collector(), requests(4)
    assert deployed.estimate().rate * 2 > LOAD.rate > LOAD.shared(2).rate
    for request in sent:
        fleet["model"].submit(request, heard)
    with fleet["model"]._dispatcher.lock:
        assert {len(each.records) for each in fleet["model"]._dispatcher.instances.values()} <= {5, 6, 7}
    done = fleet.intend("model", Intent("latency", quality_loss=0.0))
    assert (fleet.status()[0].replicas, deployed.observed()) == (2, Configuration())
    assert done.status in ("applied", "unchanged")
    assert fleet.intend("model", replicas=3).status == "applied"
    assert len(deployed.ranks.by_device) == fleet.status()[0].replicas == 3
    with pytest.raises(CapacityError, match="replica 4 of 4: 1 devices are needed, of 0"):
        fleet.intend("model", replicas=4)
    assert fleet.intend("model", replicas=1).status == "applied"
    (kept,) = deployed.ranks.by_device
    assert [device.name for device in fleet.devices() if device.free_bytes < device.memory_bytes] == [kept]
    heard.wait([request.id for request in sent])
    assert {len(got) for got in tokens(heard, sent)} == {NEW}
    fleet["model"].check()
    for wrong in (0, True, 1.5, "3-1"):
        with pytest.raises(ConfigError, match="replicas="):
            fleet.intend("model", replicas=wrong)  # type: ignore[arg-type]


@pytest.mark.slow
def test_replicas_that_share_layers_come_and_go_beside_one_that_stays(
    paths: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Chooser.options
    monkeypatch.setattr(
        Chooser,
        "options",
        lambda *args, **how: [each for each in options(*args, **how) if each.configuration == Configuration(2)],
    )
    devices = ",".join(f"cpu#{name}=12MiB" for name in "abcd")
    with Deployments(devices, weights=("full",), **OPTIONS) as fleet:
        fleet.deploy(paths["qwen3"], load=LOAD, name="model", replicas=2)
        deployed, sent = fleet._named("model"), requests()
        assert len(fleet["model"].groups()) == 2
        assert tokens(serve(fleet["model"], sent), sent) == expected["qwen3"]
        heard, sent = Collector(), requests()
        for request in sent:
            fleet["model"].submit(request, heard)
        done = fleet.intend("model", replicas=1)
        assert [step.kind for step in done.steps] == ["part", "remove", "limit"]
        (group,) = fleet["model"].groups()
        assert set(group.members) == set(deployed.ranks.by_device.values())
        heard.wait([request.id for request in sent])
        assert tokens(heard, sent) == expected["qwen3"]
        assert fleet.intend("model", replicas=2).status == "applied"
        assert len(fleet["model"].groups()) == 2
        fleet["model"].check()


@pytest.mark.slow
def test_a_stopped_change_of_replicas_leaves_all_instances_what_they_are(
    paths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that had not gone yet was two single ranks, and one that stayed had the room of two."""
    options = Chooser.options
    monkeypatch.setattr(
        Chooser,
        "options",
        lambda *args, **how: [each for each in options(*args, **how) if each.configuration == Configuration(2)],
    )

    def refuse(*_: Any, **__: Any) -> None:
        raise StateError("not now")

    devices = ",".join(f"cpu#{name}=12MiB" for name in "abcd")
    with Deployments(devices, weights=("full",), **OPTIONS) as fleet:
        fleet.deploy(paths["qwen3"], load=LOAD, name="model", replicas=2)
        deployed = fleet._named("model")
        for verb, replicas in (("reshard", 1), ("add", 2)):
            before, groups = fleet.status()[0].stages, fleet["model"].groups()
            with monkeypatch.context() as patched:
                patched.setattr(deployed.fleet, verb, refuse)
                assert fleet.intend("model", replicas=replicas).status == "partial"
            assert (fleet.status()[0].stages, fleet["model"].groups()) == (before, groups)
            assert fleet.intend("model", replicas=replicas).status == "applied"
            assert fleet.status()[0].replicas == replicas


def test_a_group_reserves_what_it_needs_and_gives_back_the_rest(paths: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Chooser.options
    with Deployments("cpu#a=12MiB,cpu#b=12MiB", weights=("full",), **OPTIONS) as fleet:
        with monkeypatch.context() as patched:
            patched.setattr(
                Chooser,
                "options",
                lambda *args, **how: [each for each in options(*args, **how) if each.configuration == Configuration(2)],
            )
            told = fleet.deploy(paths["qwen3"], load=LOAD, name="model")
        reserved = {device.name: device.memory_bytes - device.free_bytes for device in fleet.devices()}
        (stage,) = told.stages
        assert all(reserved[device] < 1.5 * stage.nbytes < 12 << 20 for device in stage.devices)
        fleet.deploy(paths["llama-gqa"], load=LOAD, name="other")
        sent = requests(2)
        assert {len(got) for got in tokens(serve(fleet["model"], sent), sent)} == {NEW}
        fleet["model"].check()
        for name in ("model", "other"):
            fleet.remove(name)
        assert all(device.free_bytes == device.memory_bytes for device in fleet.devices())


@pytest.mark.slow
def test_stages_are_in_a_variant_and_take_full_weights_back(
    fleet: Deployments, paths: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.deploy(paths["qwen3"], Intent(quality_loss=0.0), load=LOAD, name="model")
    deployed, heard, sent = fleet._named("model"), Collector(), list[Request]()
    for configuration, devices in (
        (Configuration(1, 2, "int8"), "ab"),
        (Configuration(1, 1, "int8"), "b"),
        (Configuration(1, 2, "int8"), "bc"),
        (Configuration(1, 2), "bc"),
    ):
        more = requests(1)
        sent += more
        for request in more:
            fleet["model"].submit(request, heard)
        wanted = to(deployed, configuration, devices)
        monkeypatch.setattr(Chooser, "choose", lambda *_, wanted=wanted: wanted)
        told = fleet.intend("model", dry_run=True)
        done = fleet.intend("model")
        assert (done.status, done.moved_bytes) == ("applied", told.moved_bytes)
        assert deployed.observed() == configuration
        for stage in deployed.plan.stages:
            homes = fleet["model"].look(deployed.ranks.by_device[stage.devices[0]]).status.residencies.values()
            form = "float32" if configuration.weights == "full" else configuration.weights
            assert [home.variant for (home,) in homes if home.place != "dropped"] == [form] * len(stage.layers)
    heard.wait([request.id for request in sent])
    assert {len(got) for got in tokens(heard, sent)} == {NEW}
    sent = requests(2)
    assert tokens(serve(fleet["model"], sent), sent) == expected["qwen3"] * 2
    fleet["model"].check()


@pytest.mark.slow
def test_a_change_that_is_stopped_on_the_way_loses_no_request(
    fleet: Deployments, paths: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.deploy(paths["qwen3"], load=LOAD, weights=("full",), name="model")
    deployed, heard, sent = fleet._named("model"), Collector(), requests(2)
    for request in sent:
        fleet["model"].submit(request, heard)
    wanted = to(deployed, Configuration(2, 1), "ab")
    monkeypatch.setattr(Chooser, "choose", lambda *_: wanted)
    with monkeypatch.context() as patched:

        def refuse(*_: Any, **__: Any) -> None:
            raise StateError("the ranks cannot reach each other")

        patched.setattr(deployed.fleet, "reshard", refuse)
        stopped = fleet.intend("model")
    assert (stopped.status, stopped.why) == ("partial", "the ranks cannot reach each other")
    assert deployed.observed() == Configuration()
    assert len(deployed.ranks.by_device) == 2, "the rank that came stays, and serves"
    assert "stopped on the way to TP2 PP1 full" in fleet.status()[0].reason
    assert fleet.intend("model").status == "applied"
    assert deployed.observed() == Configuration(2)
    heard.wait([request.id for request in sent])
    assert tokens(heard, sent) == expected["qwen3"] * 2


def test_no_configuration_fits_that_a_fleet_cannot_have(paths: Any) -> None:
    """Of eight devices: layers are cut in four parts at the most, and those in a variant in none."""
    devices = parse_devices([f"cpu#{number}=12MiB" for number in range(8)])
    chooser = Chooser(paths["qwen3"], devices, ("full", "int8"), ("full",))
    found = {each.configuration: each.estimate for each in chooser.options(LOAD, Intent("latency"))}
    assert chooser.shards == 4
    assert found[Configuration(4)].fits
    assert "8 ranks share a layer, which deployments cut in 4 parts" in found[Configuration(8)].why_not
    assert "packed matrices are not cut" in found[Configuration(2, 1, "int8")].why_not
    assert all(own.tp == 1 or (own.tp <= 4 and own.weights == "full") for own, each in found.items() if each.fits)


def test_what_does_not_fit_says_why(fleet: Deployments, paths: Any, tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"'qwen3' has no place: none of .*serves .* requests/s at most"):
        fleet.deploy(paths["qwen3"], load=Load(200, 200, 1e6))
    with pytest.raises(CapacityError, match=r"takes .* s, above the 1e-09 s of the intent"):
        fleet.deploy(paths["qwen3"], Intent(latency_s=1e-9), load=LOAD)
    with pytest.raises(ConfigError, match="no model there"):
        fleet.deploy(tmp_path)
    with pytest.raises(ConfigError, match="minimize='speed' is not known"):
        fleet.deploy(paths["qwen3"], "speed")  # type: ignore[arg-type]
    fleet.deploy(paths["qwen3"], load=LOAD, name="model")
    with pytest.raises(ConfigError, match="'model' is deployed; give another name"):
        fleet.deploy(paths["qwen3"], name="model")
    before = fleet.status()
    with pytest.raises(CapacityError, match="above the 1e-09 s of the intent"):
        fleet.intend("model", Intent(latency_s=1e-9))
    with pytest.raises(CapacityError, match=r"serves .* requests/s at most"):
        fleet.intend("model", load=replace(LOAD, rate=1e6))
    assert (fleet.status()[0].intent, fleet.expected("model")) == (before[0].intent, LOAD)
    assert all(device.free_bytes > 0 for device in fleet.devices())
    with pytest.raises(ConfigError, match="no deployment 'other'; there are: model"):
        fleet.intend("other", "cost")


def test_what_is_there_has_room_where_nothing_else_has(
    fleet: Deployments, paths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.deploy(paths["qwen3"], load=LOAD, weights=("full",), name="model")
    monkeypatch.setattr(Chooser, "choose", lambda *_: Refusal(()))
    assert fleet.intend("model", "latency").status == "unchanged"
    with pytest.raises(CapacityError, match="'model' has no place"):
        fleet.intend("model", Intent(latency_s=1e-9))


@pytest.mark.parametrize("kv", ["full", "int8"])
def test_what_was_measured_counts_for_the_keys_and_values_that_it_was_measured_with(
    kv: str, paths: Any, tmp_path: Path
) -> None:
    path, cost, store = paths["qwen3"], ChunkCost(0, 0, 1e-5, 1e-4, 0), ProfileStore(tmp_path, beside=False)
    store.save(path, CostProfile("cpu", {(kind.name, "full"): cost for kind in layout_of(path).kinds}, {"full": cost}))
    devices = parse_devices(DEVICES)
    chooser = Chooser(path, devices, ("full",), (kv,), engine=ENGINE)
    deployed = Deployed(
        "model", path, chooser, DeviceBook(devices), Intent(), LOAD, elastic.Replanning(), {"engine": ENGINE}, store
    )
    assert deployed.estimate().basis == ("measured" if kv == "full" else "assumed")
    assert deployed.estimate().fits


def test_deployments_that_were_not_started_or_have_ended_deploy_nothing(paths: Any) -> None:
    fleet = Deployments(DEVICES, **OPTIONS)
    with pytest.raises(StateError, match="start the deployments first"):
        fleet.deploy(paths["qwen3"])
    with fleet:
        with pytest.raises(StateError, match="started before"):
            fleet.start()
        with pytest.raises(ConfigError, match=r"load=.* cannot be"):
            fleet.deploy(paths["qwen3"], load={"rate": 1})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"weights=\[\] cannot be"):
            fleet.deploy(paths["qwen3"], weights=[])
        with pytest.raises(ConfigError, match="say kv= instead"):
            fleet.deploy(paths["qwen3"], fleet={"engine": {"kv_cache_dtype": "int8"}})
    with pytest.raises(StateError, match="or make new ones"):
        fleet.deploy(paths["qwen3"])
    with pytest.raises(ConfigError, match="devices of kinds"):
        Deployments("cpu#a=1GiB,h100")
    with pytest.raises(ConfigError, match="h100#0 is of a data sheet, on which nothing can be deployed"):
        Deployments("2*h100")
    for losses in ({"int9": 1.0}, {"int4": math.nan}, {"int4": -1.0}, {"KV int4": 0.1}):
        with pytest.raises(ConfigError, match=r"int9|losses: int4=|KV int4"):
            Deployments(DEVICES, losses=losses)
    with pytest.raises(ConfigError, match="policy='nearest'"):
        Deployments(DEVICES, policy="nearest")  # type: ignore[arg-type]
    assert elastic.Deployments is Deployments


def test_a_loss_of_keys_and_values_is_of_no_form_of_weights(paths: Any) -> None:
    with Deployments(DEVICES, losses={"KV int8": 0.1}, **OPTIONS) as fleet:
        assert fleet.deploy(paths["qwen3"], "memory", load=LOAD).configuration == "TP1 PP1 full"


def test_ranks_that_come_to_share_layers_need_room_for_all_of_them_unless_they_begin_so(paths: Any) -> None:
    chooser = Chooser(paths["qwen3"], parse_devices(DEVICES), ("full",), ("full",), engine=ENGINE)
    found: dict[Configuration, FleetOption] = {o.configuration: o for o in chooser.options(LOAD, Intent())}
    alone, shared = found[Configuration(1)], found[Configuration(2)]
    assert shared.need(range(3), 1) >= shared.begin_bytes > shared.estimate.ranks[0].layers
    assert alone.need(range(3), 1) == alone.held(range(3), 1)
    begun = chooser.options(LOAD, Intent(), begins=True)
    assert all(each.need(range(3), 1) == each.held(range(3), 1) for each in begun)


WIDE: dict[str, Any] = {**architectures.GQA, "hidden_size": 64, "num_hidden_layers": 10, "intermediate_size": 1024}
"""Of 8.2 MiB, most of it in what is cut."""


@pytest.mark.parametrize("configuration", [Configuration(2, 1), Configuration(2, 2)])
def test_a_model_that_no_device_holds_is_deployed_over_several(
    configuration: Configuration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(architectures.CONFIGS, "wide", lambda: t.LlamaConfig(**WIDE))
    model = exact(architectures.build("wide"))
    model.save_pretrained(tmp_path)
    load, options = Load(40, 8, 0.1), Chooser.options
    monkeypatch.setattr(
        Chooser,
        "options",
        lambda *args, **how: [each for each in options(*args, **how) if each.configuration == configuration],
    )
    devices = ",".join(f"cpu#{name}=8MiB" for name in "abcd"[: configuration.ranks])
    with Deployments(devices, weights=("full", "int8"), **OPTIONS) as fleet:
        fleet.deploy(tmp_path, load=load, name="model")
        deployed = fleet._named("model")
        assert deployed.observed() == configuration
        (group,) = fleet["model"].groups()
        assert set(group.alone.values()) == {0}, "none has room for all weights"
        sent = [Request(prompt, 8) for prompt in PROMPTS[:2]]
        assert tokens(serve(fleet["model"], sent), sent) == [continuation(model, prompt, 8) for prompt in PROMPTS[:2]]
        assert fleet.intend("model", "latency").status == "unchanged"
        with pytest.raises(ConfigError, match="'1-2': instances of 'model' cannot come and go with the load"):
            fleet.intend("model", replicas="1-2")
        fleet["model"].check()
        swapped = replace(configuration, weights="int4")
        deployed.plan = replace(deployed.plan, configuration=swapped)  # by hand, to a form that it may not have
        best = deployed.best()
        assert isinstance(best, Deployment), best
        assert best.configuration == configuration


@pytest.mark.slow
def test_load_and_memory_change_a_deployment_by_themselves(paths: Any) -> None:
    quick = elastic.Replanning(tick_s=0.05, patience_s=0.2, dwell_s=0.2)
    with Deployments(DEVICES, weights=("full", "int8"), **{**OPTIONS, "replanning": quick}) as fleet:
        fleet.deploy(paths["qwen3"], "latency", load=LOAD, name="model", weights=("full",))
        deployed, heard, sent = fleet._named("model"), Collector(), requests(2)
        for request in sent:
            fleet["model"].submit(request, heard)
        (home,) = deployed.ranks.by_device
        fleet.resize(home, "64KiB")
        wait_until(lambda: fleet.status()[0].changes == 1, fleet)
        assert home not in deployed.ranks.by_device
        heard.wait([request.id for request in sent])
        assert {heard.ends[request.id].finish for request in sent} == {"length"}
        assert not next(device for device in fleet.devices() if device.name == home).models


def wait_until(condition: Callable[[], bool], fleet: Deployments, patience_s: float = 60) -> None:
    until_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < until_s, fleet.status()
        time.sleep(0.05)


def test_a_look_at_what_has_not_changed_estimates_nothing_anew(
    fleet: Deployments, paths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.deploy(paths["qwen3"], load=LOAD, name="model", replicas="1-2")
    deployed, asked = fleet._named("model"), list[Configuration]()
    cost, began_s = Estimator.instance_cost, time.monotonic()

    def counted(self: Estimator, configuration: Configuration, *args: Any) -> Any:
        asked.append(configuration)
        return cost(self, configuration, *args)

    monkeypatch.setattr(Estimator, "instance_cost", counted)
    deployed.look(began_s, deployed.ranks.look())
    first = len(asked)
    looks = [deployed.look(began_s + seconds, deployed.ranks.look()) for seconds in range(1, 4)]
    assert looks == [None] * 3
    assert 0 < first == len(asked)
    deployed.meter.expected = replace(LOAD, rate=1.3)
    deployed.look(began_s + 4, deployed.ranks.look())
    second = len(asked)
    assert second > first, "another load"
    kinds = deployed.chooser.layout.kinds
    costs = {(kind.name, form): ChunkCost(0, 0, 1e-5, 1e-4, 0) for kind in kinds for form in deployed.forms}
    around = {form: ChunkCost(0, 0, 0, 0, 1e-5) for form in deployed.forms}
    deployed.chooser.use_profile(CostProfile("cpu", costs, around))
    assert deployed.estimate().basis == "measured"
    assert len(asked) > second, "other seconds"


@pytest.mark.slow
def test_more_load_gets_more_room_without_another_configuration(fleet: Deployments, paths: Any) -> None:
    fleet.deploy(paths["qwen3"], load=LOAD, weights=("full",), name="model")
    deployed = fleet._named("model")
    before = sum(device.free_bytes for device in fleet.devices())
    deployed.meter.expected = replace(LOAD, prompt=300, new=200)
    looks = (deployed.look(time.monotonic() + seconds, deployed.ranks.look()) for seconds in (0, 20))
    assert [changed and changed.status for changed in looks] == [None, "unchanged"]
    assert sum(device.free_bytes for device in fleet.devices()) < before
    assert deployed.estimate().fits
    heard = serve(fleet["model"], [Request(PROMPTS[2] * 4, 200)])
    assert [len(tokens) for tokens in heard.tokens.values()] == [200]


@pytest.mark.slow
def test_instances_come_and_go_with_the_load(
    fleet: Deployments, paths: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = fleet.deploy(paths["qwen3"], load=LOAD, weights=("full",), name="model", replicas="1-9")
    assert (told.replicas, told.replica_range) == (1, "1-9")
    deployed, heard, sent = fleet._named("model"), Collector(), list[Request]()
    times = itertools.count(int(time.monotonic()) + 1000, 1000)  # the last change rests

    def instances_at(rate: float) -> int:
        deployed.meter.expected = replace(LOAD, rate=rate)
        began_s = next(times)
        assert deployed.look(began_s, deployed.ranks.look()) is None, "not for a moment's load"
        sent.extend(more := requests())
        for request in more:
            fleet["model"].submit(request, heard)
        changed = deployed.look(began_s + 20, deployed.ranks.look())
        assert changed is None or changed.status == "applied", changed
        return fleet.status()[0].replicas

    served = 1.0  # by one instance of one rank that has all of its device
    alone = Configuration(kv=deployed.plan.configuration.kv)
    options = deployed.chooser.options
    monkeypatch.setattr(
        deployed.chooser,
        "options",
        lambda *args, **how: [each for each in options(*args, **how) if each.configuration == alone],
    )
    for more in (2.0, 1.1):
        while isinstance(deployed.best(replace(LOAD, rate=more * served), replicas=ReplicaRange()), Deployment):
            served *= more
    assert instances_at(1.5 * served) == 2
    assert instances_at(0.95 * served) == 2, "one would have nothing to spare"
    assert instances_at(100 * served) == 3, "as many as devices have room for, though they do not serve it"
    assert instances_at(100 * served) == 3
    assert "nothing else fits" in fleet.status()[0].reason
    assert instances_at(0.95 * served) == 2, "with little to do for each, a third one costs more"
    assert instances_at(0.5 * served) == 1
    heard.wait([request.id for request in sent])
    assert tokens(heard, sent) == expected["qwen3"] * 6
    fleet["model"].check()
    assert fleet.intend("model", replicas="2-3").status == "applied"
    assert len(deployed.ranks.by_device) == fleet.status()[0].replicas == 2, "the least that was asked for"


@pytest.mark.slow
def test_a_rank_that_takes_the_place_of_a_lost_stage_gets_its_layers_in_the_variant(
    fleet: Deployments, paths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, wanted = Chooser.options, Configuration(1, 2, "int8")
    monkeypatch.setattr(
        Chooser,
        "options",
        lambda *args, **how: [each for each in options(*args, **how) if each.configuration == wanted],
    )
    fleet.deploy(paths["qwen3"], load=LOAD, name="model")
    deployed = fleet._named("model")
    assert deployed.observed() == wanted
    fleet["model"].kill("r1")
    wait_until(lambda: [r.name for r in fleet["model"].status().ranks if r.state == "serving"] == ["r0", "r2"], fleet)
    told = deployed.look(time.monotonic(), deployed.ranks.look())
    assert told is not None
    assert (told.status, told.why) == ("applied", "a rank was lost, and replaced")
    assert (deployed.observed(), set(deployed.ranks.by_device.values())) == (wanted, {"r0", "r2"})
    sent = requests()
    assert {len(got) for got in tokens(serve(fleet["model"], sent), sent)} == {NEW}
    fleet["model"].check()


@pytest.mark.slow
def test_a_rank_that_takes_the_place_of_a_lost_one_gets_the_configuration(fleet: Deployments, paths: Any) -> None:
    fleet.deploy(paths["qwen3"], "latency", load=LOAD, weights=("int8",), name="model")
    deployed = fleet._named("model")
    limit = fleet["model"].look("r0").status.kv[0].limit_bytes
    fleet["model"].kill("r0")
    wait_until(lambda: [r.name for r in fleet["model"].status().ranks if r.state == "serving"] == ["r1"], fleet)
    told = deployed.look(time.monotonic(), deployed.ranks.look())
    assert told is not None
    assert (told.status, told.why) == ("applied", "a rank was lost, and replaced")
    assert deployed.observed() == Configuration(weights="int8")
    assert deployed.ranks.by_device == {"cpu#a": "r1"}
    assert fleet["model"].look("r1").status.kv[0].limit_bytes == limit
