"""Measuring in spare time: only where there is little to do and room, and no longer than that is so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from elastic.cluster.deployment import harvest
from elastic.cluster.deployment.choice import Chooser
from elastic.cluster.deployment.deployments import Deployments
from elastic.cluster.deployment.devices import DeviceBook
from elastic.cluster.deployment.harvest import LINKS, REST_S, SPARE_LOAD, Harvester
from elastic.cluster.deployment.hysteresis import Replanning
from elastic.cluster.deployment.status import links_of
from elastic.engines.base import Request
from elastic.errors import CapacityError, ConfigError, StateError
from elastic.estimation.device_list import parse_devices
from elastic.estimation.profile import CostProfile
from elastic.estimation.profiles.guest import SHARE, ProfilingProcess
from elastic.estimation.profiles.store import ProfileStore, merged
from elastic.planning.deployment.placing import Deployment
from elastic.planning.estimate.devices import SHEETS, Device, DeviceKind, of_cpu
from elastic.planning.estimate.intent import Intent
from elastic.planning.estimate.performance import Handovers, Load
from elastic.planning.measured_cost import LinearLatency
from elastic.planning.pipeline.chunk_cost import ChunkCost
from support import architectures
from support.processes import wait_for_end, wait_until
from support.serving.generations import prompts, same_unless_close, serve

NEEDED = 60


LINK = LinearLatency(1e-3, 1e-9)


def profile(form: str) -> CostProfile:
    if form == LINKS:
        return CostProfile("cpu", {}, {}, LINK, contention=0.2, handovers=Handovers(1e-3, 2e-4))
    cost = ChunkCost(0, 0, 1e-5, 1e-4, 0)
    return CostProfile("cpu", {("layer", form): cost}, {form: cost})


@dataclass
class FakeGuest:
    form: str
    device: str
    ended: bool = False
    cancelled: bool = False
    fails: bool = False
    killed: bool = False

    def result(self) -> CostProfile:
        if self.killed:
            raise StateError("the guest that measures was killed by signal 9")
        if self.fails:
            raise ConfigError("the engine cannot serve it")
        return profile(self.form)

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Model:
    path: str
    name: str = "model"
    forms: tuple[str, ...] = ("full", "int8")
    plan: Any = field(default_factory=lambda: SimpleNamespace(links=()))


@dataclass
class World:
    """Devices, whose ranks compute as a test says, second by second."""

    model: Model
    store: ProfileStore
    guests: list[FakeGuest] = field(default_factory=list)
    known: list[tuple[str, CostProfile]] = field(default_factory=list)
    now_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=lambda: {"cpu#a": 0.0, "cpu#b": 0.0})
    kind: DeviceKind = of_cpu(100, 1.0, 1.0, 1.0)  # noqa: RUF009  (frozen)

    def __post_init__(self) -> None:
        self.book = DeviceBook([Device(name, self.kind, 100) for name in self.busy_s])
        self.harvester = Harvester(
            self.book, self.store, lambda *told: self.known.append(told), self.start, lambda *_: NEEDED
        )

    def start(self, path: str, weights: Sequence[str], device: str) -> FakeGuest:
        assert device == "cpu"
        self.guests.append(FakeGuest(*weights, next(iter(self.harvester.at), "")))
        return self.guests[-1]

    def knows(self, *forms: str) -> None:
        for form in forms:
            self.store.save(self.model.path, profile(form))

    others: dict[str, float] = field(default_factory=dict)
    """What NVML says of devices."""

    def run(self, seconds: int, models: Sequence[Model] | None = None, **load: float) -> None:
        for _ in range(seconds):
            self.now_s += 1
            for device in self.busy_s:
                self.busy_s[device] += load.get(device[-1], 0.0)
            told = {(device, "m", "r"): busy for device, busy in self.busy_s.items()}
            self.book.busy.tell(self.now_s, told, self.others)
            self.harvester.tick(self.now_s, [self.model] if models is None else models)


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    architectures.build("llama-gqa").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def world(path: str, tmp_path: Path) -> World:
    return World(Model(path), ProfileStore(tmp_path, beside=False))


def test_all_forms_are_measured_one_after_another_and_kept(world: World) -> None:
    for form in world.model.forms:
        world.run(5)
        guest = world.guests[-1]
        assert guest.form == form
        assert world.harvester.at == {"cpu#a": "model"}
        assert world.book.free()["cpu#a"] == 100 - NEEDED
        guest.ended = True
    world.run(1)
    assert len(world.guests) == 2
    assert world.book.free()["cpu#a"] == 100
    ((path, told),) = world.known
    assert (path, told) == (world.model.path, world.store.load(world.model.path, "cpu"))
    assert told.around.keys() == {"full", "int8"}


def test_then_links_are_measured_between_ranks_that_exchange_and_estimates_are_made_of_them(world: World) -> None:
    world.knows("full", "int8")
    world.model.plan.links = (("cpu#b", "cpu#a"),)
    world.run(5)
    (guest,) = world.guests
    assert (guest.form, [*world.harvester.at]) == (LINKS, ["cpu#b", "cpu#a"])
    assert world.book.free() == {"cpu#a": 100 - NEEDED, "cpu#b": 100 - NEEDED}
    guest.ended = True
    world.run(5)
    ((path, told),) = world.known
    assert path == world.model.path
    assert told == merged(profile("full"), profile("int8")).with_links(profile(LINKS))
    assert world.book.free() == {"cpu#a": 100, "cpu#b": 100}
    assert len(world.guests) == 1


def test_links_are_measured_where_both_devices_have_little_to_do(path: str, tmp_path: Path) -> None:
    model = Model(path, plan=SimpleNamespace(links=(("cpu#a", "cpu#b"),)))
    world = World(model, ProfileStore(tmp_path, beside=False), busy_s=dict.fromkeys(("cpu#a", "cpu#b", "cpu#c"), 0.0))
    world.knows("full", "int8")
    world.run(10, b=0.5)
    assert [*world.harvester.at] == ["cpu#a", "cpu#c"]
    world.run(5, b=0.5, c=0.5)
    assert world.guests[0].cancelled
    assert world.harvester.at == {}
    assert world.harvester.cancelled == 1


def test_links_that_were_measured_for_one_model_are_those_of_others(world: World, tmp_path: Path) -> None:
    other = Model(str(tmp_path / "other"), name="other")
    architectures.build("llama-mha").save_pretrained(other.path)
    world.knows("full", "int8")
    for form in other.forms:
        world.store.save(other.path, profile(form))
    world.run(5)
    world.guests[0].ended = True
    world.run(5, [world.model, other])
    assert len(world.guests) == 1
    assert [(path, told.link) for path, told in world.known] == [(world.model.path, LINK), (other.path, LINK)]


def test_links_that_must_wait_for_a_busy_device_keep_no_model_from_being_measured(world: World, tmp_path: Path) -> None:
    other = Model(str(tmp_path / "other"), name="other")
    architectures.build("llama-mha").save_pretrained(other.path)
    world.knows("full", "int8")
    world.run(10, [world.model, other], b=0.5)
    assert [guest.form for guest in world.guests] == ["full"]
    assert world.harvester.at == {"cpu#a": "other"}


@pytest.mark.parametrize(("kind", "names"), [("h100", ("cuda:0", "cuda:1")), ("cpu", ("cpu#a",))])
def test_links_of_gpus_and_of_a_device_by_itself_are_not_measured(path: str, kind: str, names: tuple[str, ...]) -> None:
    whole = merged(profile("full"), profile("int8"))
    store: Any = SimpleNamespace(load=lambda *_: whole)
    sheet = SHEETS[kind] if kind in SHEETS else of_cpu(100, 1.0, 1.0, 1.0)
    world = World(Model(path), store, busy_s=dict.fromkeys(names, 0.0), kind=sheet)
    world.run(10)
    assert world.guests == []


@pytest.mark.parametrize(("link", "basis"), [(None, "assumed"), (LinearLatency(1e-5, 0.0), "measured")])
def test_what_was_measured_of_links_decides_what_is_chosen(path: str, link: LinearLatency | None, basis: str) -> None:
    devices, load = parse_devices("cpu#a=1GiB,cpu#b=1GiB"), Load(40, 20)
    chooser, states = Chooser(path, devices, ("full",), ("full",)), DeviceBook(devices).states()
    cost = ChunkCost(0, 0, 1e-5, 1e-2, 0)
    layers = {(kind.name, "full"): cost for kind in chooser.layout.kinds}
    chooser.use_profile(CostProfile("cpu", layers, {"full": cost}, link))
    shared = chooser.choose(load, Intent("latency"), states)
    assert isinstance(shared, Deployment)
    assert shared.configuration.tp == 2
    (told,) = links_of(shared, chooser.estimator(load).costs)
    assert (told.devices, told.basis) == (("cpu#a", "cpu#b"), basis)

    slower: list[dict[str, Any]] = [{"link": LinearLatency(1.0, 0.0)}, {"link": link, "handovers": Handovers(1.0, 1.0)}]
    for slow in slower:
        chooser.use_profile(replace(chooser.profile, **slow))
        alone = chooser.choose(load, Intent("latency"), states)
        assert isinstance(alone, Deployment)
        assert alone.configuration.ranks == 1
        assert chooser.now(load, Intent("latency"), shared).latency_s > shared.estimate.latency_s + 1


def test_a_link_without_contention_takes_the_place_of_one_with() -> None:
    earlier, measured = profile(LINKS), CostProfile("cpu", {}, {}, LinearLatency(2e-3, 0.0))
    assert (merged(earlier, measured).link, merged(earlier, measured).contention) == (measured.link, 0.0)
    assert merged(earlier, profile("full")).contention == 0.2


def test_a_busy_device_has_no_guest(world: World) -> None:
    world.run(10, a=0.35, b=0.31)
    assert world.guests == []
    with pytest.raises(StateError, match=r"cpu#a computes 35% of its time; models are measured below 30%"):
        world.harvester.require_spare("cpu#a", NEEDED)
    world.run(10, a=0.35, b=0.0)
    assert world.harvester.at == {"cpu#b": "model"}


def test_a_device_is_looked_at_before_it_has_a_guest(world: World) -> None:
    world.run(2, a=0.9, b=0.9)
    assert world.guests == []
    with pytest.raises(StateError, match="cpu#a was not looked at for long enough"):
        world.harvester.require_spare("cpu#a", NEEDED)


def test_a_full_device_has_no_guest(world: World) -> None:
    world.book.reserve("model", {"cpu#a": 41, "cpu#b": 41})
    world.run(10)
    assert world.guests == []
    with pytest.raises(CapacityError, match="cpu#a has 59 bytes free, and the fingerprint takes 60"):
        world.harvester.require_spare("cpu#a", NEEDED)


def test_a_guest_is_cancelled_when_the_load_rises_and_begins_anew_after_a_rest(world: World) -> None:
    world.run(5, a=0.1, b=0.9)
    world.run(4, a=0.8, b=0.9)
    (guest,) = world.guests
    assert guest.cancelled
    assert world.harvester.cancelled == 1
    assert world.harvester.at == {}
    assert world.book.free()["cpu#a"] == 100
    world.run(int(REST_S) - 5, a=0.0, b=0.9)
    assert len(world.guests) == 1
    world.run(30, a=0.0, b=0.9)
    assert len(world.guests) == 2
    world.harvester.stop()
    assert world.guests[-1].cancelled


def test_a_guest_gives_way_to_a_deployment_that_wants_its_memory(world: World) -> None:
    world.run(5)
    assert world.harvester.at == {"cpu#a": "model"}
    assert world.book.free() == {"cpu#a": 100 - NEEDED, "cpu#b": 100}
    assert [state.free_bytes for state in world.book.states("other")] == [100, 100]
    world.book.reserve("other", {"cpu#a": 100 - NEEDED, "cpu#b": 100})
    assert not world.guests[0].cancelled
    world.book.reserve_all("other", ["cpu#a"])
    assert world.guests[0].cancelled
    assert (world.harvester.at, world.harvester.cancelled) == ({}, 1)
    assert world.book.free() == {"cpu#a": 0, "cpu#b": 0}
    with pytest.raises(CapacityError, match="cpu#a has 0 bytes left for 'third'"):
        world.book.reserve("third", {"cpu#a": 1})


def test_a_guest_gives_way_where_a_device_gets_less_memory(world: World) -> None:
    world.book.reserve("other", {"cpu#a": 100 - NEEDED, "cpu#b": 100})
    world.run(5)
    world.book.resize("cpu#a", 99)
    assert world.book.lacking("other") == ""
    world.run(1)
    assert world.guests[0].cancelled
    world.run(int(REST_S) - 1)
    assert len(world.guests) == 1
    world.book.resize("cpu#a", 100)
    world.run(1)
    assert len(world.guests) == 2


def test_what_other_programs_do_on_a_device_counts_but_not_what_the_guest_does(world: World) -> None:
    world.others = {"cpu#a": 0.35, "cpu#b": 0.1}
    world.run(10)
    assert world.harvester.at == {"cpu#b": "model"}
    world.others["cpu#b"] = 0.1 + SHARE
    world.run(5)
    assert not world.guests[0].cancelled
    world.others["cpu#b"] = SPARE_LOAD + SHARE
    world.run(1)
    assert world.guests[0].cancelled


def test_the_guest_of_a_model_that_has_gone_is_cancelled(world: World) -> None:
    world.run(5)
    world.run(1, models=[])
    assert world.guests[0].cancelled
    assert world.harvester.cancelled == 0


def test_what_cannot_be_measured_is_not_tried_again(world: World) -> None:
    world.run(5)
    world.guests[0].fails = world.guests[0].ended = True
    world.run(3)
    assert [guest.form for guest in world.guests] == ["full", "int8"]
    world.guests[1].ended = True
    world.run(30)
    assert len(world.guests) == 2
    assert world.known == []


def test_what_a_guest_was_killed_over_is_measured_again_each_time_later(world: World) -> None:
    """A guest that is killed from outside says nothing of its form; others are measured meanwhile."""
    world.model.forms = ("full",)
    for rest in (REST_S, 2 * REST_S, 4 * REST_S):
        world.run(5)
        guest = world.guests[-1]
        guest.killed = guest.ended = True
        seen = len(world.guests)
        world.run(int(rest))
        assert (len(world.guests), world.harvester.at) == (seen, {})
        assert world.book.free()["cpu#a"] == 100
        world.run(1)
        assert len(world.guests) == seen + 1
    world.guests[-1].ended = True
    world.run(1)
    ((_, told),) = world.known
    assert told.around.keys() == {"full"}


def test_where_no_process_can_be_started_the_memory_is_free_again_and_others_are_looked_at(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.model.forms = ("full",)
    with monkeypatch.context() as patch:
        patch.setattr(world.harvester, "_start", Mock(side_effect=BlockingIOError("no more processes")))
        world.run(5)
        assert (world.harvester.at, world.book.free()["cpu#a"]) == ({}, 100)
    world.run(int(REST_S) - 3)
    assert world.guests == []
    world.run(3)
    assert [guest.form for guest in world.guests] == ["full"]


def test_what_could_not_be_measured_is_tried_again_when_it_is_deployed_anew(world: World) -> None:
    world.model.forms = ("full",)
    world.run(5)
    world.guests[0].fails = world.guests[0].ended = True
    world.run(60)
    assert len(world.guests) == 1
    world.run(1, models=[])
    world.run(1)
    assert len(world.guests) == 2


def test_looks_read_no_files_and_count_no_bytes_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, counts = list[str](), list[str]()
    load, needs = world.store.load, world.harvester._needs
    monkeypatch.setattr(world.store, "load", lambda path, *rest: [reads.append(path), load(path, *rest)][1])
    monkeypatch.setattr(world.harvester, "_needs", lambda path, *rest: [counts.append(path), needs(path, *rest)][1])
    world.run(30, a=0.9, b=0.9)
    assert (len(reads), len(counts), world.guests) == (1, 1, [])
    for _ in world.model.forms:
        world.run(160)
        world.guests[-1].ended = True
    world.run(30)
    assert world.known[0][1].around.keys() == {"full", "int8"}
    assert len(counts) == 3  # and once for links
    assert len(reads) <= 1 + 2 * len(world.model.forms)  # `save` adds to what is there


def test_what_a_guest_has_measured_is_kept_though_the_load_rises_as_it_ends(world: World) -> None:
    world.run(5)
    world.guests[0].ended = True
    world.run(1, a=0.95, b=0.95)
    assert world.harvester.cancelled == 0
    assert world.store.load(world.model.path, "cpu", ("full",)) is not None


def test_a_model_whose_directory_has_gone_keeps_no_other_from_being_measured(world: World, tmp_path: Path) -> None:
    gone = Model(str(tmp_path / "gone"), name="gone")
    world.run(10, [gone, world.model])
    assert world.harvester.at == {"cpu#a": "model"}


def test_what_is_known_is_not_measured(world: World) -> None:
    world.knows(*world.model.forms, LINKS)
    world.run(10)
    assert world.guests == []


@pytest.mark.slow
def test_a_guest_measures_beside_what_is_served_and_what_is_chosen_next_is_chosen_by_that(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the only device: the guest is a process that ends by itself, and both deployments of the model learn of it."""
    monkeypatch.setattr(harvest, "SHARE", 0.9)  # of its time that it computes: the rest is waited for
    store = ProfileStore(tmp_path, beside=False)
    options: dict[str, Any] = {"launch": "in-process", "fleet": {"engine": {"block_tokens": 8}, "beat_timeout_s": 60}}
    prompt = prompts([30], architectures.VOCAB)[0]
    with Deployments(
        "cpu#a=64MiB", weights=("full",), harvest=True, store=store, replanning=Replanning(tick_s=0.1), **options
    ) as fleet:
        for name in ("one", "two"):
            fleet.deploy(path, load=Load(40, 20), name=name)
        free = fleet.devices()[0].free_bytes
        assert {each.estimate.basis for each in fleet.status()} == {"assumed"}
        harvester = fleet._harvester
        assert harvester is not None
        wait_until(lambda: harvester.at == {"cpu#a": "one"})
        guest = harvester._guest
        assert isinstance(guest, ProfilingProcess)
        assert fleet.devices()[0].free_bytes < free
        heard = serve(fleet["one"], [Request(prompt, 12, id="beside", ignore_eos=True)])
        assert same_unless_close(architectures.build("llama-gqa"), prompt, heard.tokens["beside"])

        wait_until(lambda: {each.estimate.basis for each in fleet.status()} == {"measured"}, timeout_s=120)
        wait_for_end(guest._process.pid)
        (device,) = fleet.devices()
        assert (device.guest, device.free_bytes) == ("", free)
        assert harvester.cancelled == 0
        profile = store.load(path, "cpu", ("full",))
        assert profile is not None
        for name in ("one", "two"):
            assert fleet._named(name).chooser.profile == profile
            best = fleet.plan(name)
            assert isinstance(best, Deployment)
            assert best.estimate.basis == "measured"
        assert fleet.deploy(path, load=Load(40, 20), name="three").estimate.basis == "measured"
        assert harvester.at == {}
