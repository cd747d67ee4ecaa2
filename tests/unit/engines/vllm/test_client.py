"""The user's side of a vLLM engine: options, messages, and the proxy over ranks that are simulated here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elastic.config import SLO, Policy
from elastic.engines.vllm.client import settings
from elastic.engines.vllm.client.messages import decode, decode_error, encode, encode_error
from elastic.engines.vllm.client.proxy import AsyncRemoteRuntime, RemoteRuntime, runtime
from elastic.engines.vllm.client.settings import KEY, EngineSettings, options
from elastic.engines.vllm.support import require_known
from elastic.errors import (
    BackendUnavailable,
    CapacityError,
    ConfigError,
    ElasticError,
    Overloaded,
    RankLost,
    StateError,
)
from elastic.types import Change, Event, HostStatus, KVStatus, PlaceStatus, Release, Residency, ResizeKV, Status, Swap

EVENT = Event(0, Swap((1, 2), "int4"), 1.5, "by hand", 10, 20, 0.1, 0.2, 0.3, True, "applied")


def status(name: str) -> Status:
    place = PlaceStatus(name, 4096, 8192, {"kv": 4096}, 4096, 0, 0, 1)
    kv = KVStatus(name, 4096, 4096, 4096, 0, 0, 0, 0)
    return Status(1, (place,), (kv,), {"layers.0": (Residency(name, "float32"),)}, HostStatus(0, 0, 0, 0), 0)


@pytest.mark.parametrize(
    "value", [EVENT, (EVENT, EVENT), status("cpu"), ResizeKV("cpu", None), {"value": None}, "text"]
)
def test_records_come_back_as_they_were(value: object) -> None:
    assert decode(encode(value)) == value


def noted(error: ElasticError) -> ElasticError:
    error.__dict__["seen_by"] = "a caller"
    return error


@pytest.mark.parametrize(
    "error", [noted(ConfigError("a")), StateError("b"), ElasticError("c"), Overloaded("d", retry_after_s=2.0)]
)
def test_errors_come_back_with_their_type(error: ElasticError) -> None:
    again = decode_error(encode_error(error))
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_a_capacity_error_keeps_its_figures() -> None:
    error = CapacityError("full", requested_bytes=3, free_bytes=2, total_bytes=1)
    again = decode_error(encode_error(error))
    assert isinstance(again, CapacityError)
    assert (str(again), again.requested_bytes, again.total_bytes) == (str(error), 3, 1)


def test_a_lost_rank_keeps_its_name() -> None:
    again = decode_error(encode_error(RankLost("rank b ended", rank="b")))
    assert isinstance(again, RankLost)
    assert (str(again), again.rank) == ("rank b ended", "b")


def test_an_error_that_is_not_ours_is_a_runtime_error() -> None:
    assert type(decode_error(encode_error(KeyError("x")))) is RuntimeError


@dataclass
class Ranks:
    """What `collective_rpc` reaches: every rank answers after `delay` questions."""

    answers: list[Any]
    delay: int = 2
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    def __call__(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        self.calls.append((method, args))
        if method == "elastic_change":
            return [7 for _ in self.answers]
        if method == "elastic_result" and self.delay:
            self.delay -= 1
            return [None, *map(encode, self.answers[1:])]
        return [encode(answer) for answer in self.answers]


def change(moved: int, layers: tuple[int, ...] = (3,)) -> dict[str, Any]:
    return {"value": (Change("applied", layers, (), moved, 0, 0),)}


def test_an_action_waits_for_all_ranks_and_adds_their_bytes() -> None:
    ranks = Ranks([change(10), change(11)])
    assert RemoteRuntime(ranks).swap(3, "int4") == Change("applied", (3,), (), 21, 0, 0)
    assert ranks.calls[0] == ("elastic_change", ("swap", encode((([3], "int4"), {}))))
    assert [method for method, _ in ranks.calls[1:]] == ["elastic_result"] * 3
    assert ranks.calls[1][1] == (7,)


def test_an_engine_without_requests_is_stepped_while_an_action_is_under_way() -> None:
    steps: list[int] = []
    RemoteRuntime(Ranks([change(1)]), lambda: steps.append(1)).restore()
    assert len(steps) >= 2


def test_an_engine_of_this_process_is_settled_unless_it_has_requests() -> None:
    """Its user may be about to step it on another thread."""
    settled: list[str] = []
    side = SimpleNamespace(settle=lambda step: settled.append(step()))
    scheduler = SimpleNamespace(connector=SimpleNamespace(scheduler=side))
    core = SimpleNamespace(scheduler=scheduler, step_fn=lambda: "stepped")
    engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core), has_unfinished_requests=lambda: False)
    llm = SimpleNamespace(collective_rpc=Ranks([change(1)]), llm_engine=engine)
    runtime(llm).release([3])
    assert set(settled) == {"stepped"}
    settled.clear()
    engine.has_unfinished_requests = lambda: True
    runtime(llm).release([3])
    assert settled == []


@pytest.mark.parametrize("layers", [np.arange(2), range(2), (np.int64(0), 1)])
def test_layers_are_whatever_counts(layers: Any) -> None:
    ranks = Ranks([change(1)])
    RemoteRuntime(ranks).release(layers)
    assert ranks.calls[0] == ("elastic_change", ("release", encode((([0, 1],), {}))))


def test_a_truth_value_stays_one_for_the_ranks_to_refuse() -> None:
    ranks = Ranks([change(10)])
    RemoteRuntime(ranks).release([True, 2])
    assert decode(ranks.calls[0][1][1])[0] == ((True, 2),)
    assert decode(ranks.calls[0][1][1])[0][0][0] is True


def test_one_action_may_be_applied_without_others() -> None:
    ranks = Ranks([change(1)])
    RemoteRuntime(ranks).apply(Release((1,)))
    assert ranks.calls[0] == ("elastic_change", ("apply", encode((((Release((1,)),),), {"why": "by hand"}))))


def test_what_names_no_layers_or_variant_is_refused_in_words() -> None:
    rt = RemoteRuntime(Ranks([change(1)]))
    with pytest.raises(ConfigError, match="layers=None cannot be"):
        rt.release(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"layers=\[1.5\] cannot be"):
        rt.release([1.5])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="variant=None cannot be"):
        rt.swap([0], None)  # type: ignore[arg-type]


def test_an_error_of_a_rank_is_raised_here() -> None:
    refused = {"error": encode_error(StateError("rank 1: no room"))}
    with pytest.raises(StateError, match="rank 1: no room"):
        RemoteRuntime(Ranks([change(1), refused], delay=0)).release([3])


def test_the_status_of_several_ranks_has_shards() -> None:
    merged = RemoteRuntime(Ranks([{"value": status("a")}, {"value": status("b")}])).status()
    assert [place.name for place in merged.places] == ["a", "b"]
    assert merged.residencies["layers.0"] == (Residency("a", "float32", "0/2"), Residency("b", "float32", "1/2"))


def test_an_async_engine_has_awaited_words() -> None:
    ranks = Ranks([change(5)])

    class Engine:
        async def collective_rpc(self, method: str, timeout: float | None = None, args: Any = ()) -> list[Any]:
            return ranks(method, args=args)

    found = runtime(Engine())
    assert isinstance(found, AsyncRemoteRuntime)
    assert asyncio.run(found.release("layers.3")).moved_bytes == 5


def test_what_is_no_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match="int is no vLLM engine"):
        runtime(3)


# -- options


@pytest.fixture
def known_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic.engines.vllm import support

    monkeypatch.setattr(support, "require_vllm", lambda: "0.32.0")
    monkeypatch.setattr(support, "worker_name", lambda: "worker")


@pytest.mark.usefixtures("known_vllm")
def test_settings_reach_the_workers_as_they_were_given() -> None:
    asked = Policy.named("balanced")
    made = options("30GiB", policy=asked, variants=("int4",), slo=SLO(ttft_s=2.0), page_bytes=4096)
    again = EngineSettings.from_json(made["additional_config"][KEY])
    assert again.to_policy() == asked
    assert SLO(**again.slo or {}) == SLO(ttft_s=2.0)
    assert (again.budget_bytes, again.variants, again.page_bytes) == (30 * 2**30, ("int4",), 4096)
    assert (made["quantization"], made["worker_cls"]) == ("elastic", "worker")
    assert made["scheduler_cls"].endswith("ElasticScheduler")
    assert made["kv_transfer_config"]["kv_connector_extra_config"] == {"promise": True, "move_blocks": True}


@pytest.mark.usefixtures("known_vllm")
def test_a_connector_of_the_user_comes_after_ours() -> None:
    theirs = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    config = options("1GiB", connector=theirs, move_blocks=False)["kv_transfer_config"]
    assert config["kv_connector"] == "MultiConnector"
    children = config["kv_connector_extra_config"]["connectors"]
    names = [child["kv_connector"] for child in children]
    assert children[0]["kv_connector_extra_config"]["move_blocks"] is False
    assert names == [settings.CONNECTOR["kv_connector"], "OffloadingConnector"]


def several(connectors: Any) -> dict[str, Any]:
    """vLLM's connector over others."""
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": connectors}}


@pytest.mark.usefixtures("known_vllm")
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"budget": "much"}, "budget"),
        ({"policy": "scale"}, "'scale'"),
        ({"policy": "balanced"}, "variants"),
        ({"variants": ("int5",)}, "int5"),
        ({"variants": (3,)}, "round the weights"),
        ({"variants": ("int4", "2:4")}, "'2:4' is pruned, which cannot be used in vLLM"),
        ({"connector": {"kv_connector": "NixlConnector"}}, "NixlConnector"),
        ({"connector": "OffloadingConnector"}, "connector='OffloadingConnector' cannot be"),
        ({"connector": {}}, "connector={} cannot be"),
        ({"connector": {"kv_connector": "ElasticConnector"}}, "a kv_connector of yours"),
        ({"connector": several([5])}, "connector=5 cannot be"),
        ({"connector": several(5)}, "connectors=5 cannot be"),
        ({"budget": 0}, "budget=0 cannot be"),
        ({"page_bytes": 0}, "page_bytes=0 cannot be"),
        ({"variants": None}, "variants=None cannot be"),
        ({"variants": ("int4", "int4")}, "names a variant twice"),
        ({"order": "upwards"}, "order='upwards' is not known"),
        ({"order": "none.json"}, "order='none.json' cannot be"),
        ({"copy_rate": "fast"}, "copy_rate='fast' is not a size"),
        ({"copy_rate": 0}, "would never end"),
        ({"slo": {"ttft_s": 1}}, "slo={'ttft_s': 1} cannot be"),
        ({"promise": "no"}, "promise='no' cannot be"),
        ({"variant_cache": __file__}, "a directory, not a file"),
    ],
)
def test_what_cannot_work_is_refused_in_words(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options(**{"budget": "1GiB", **wrong})


@pytest.mark.parametrize(("variants", "words"), [(("ffn75",), "'ffn75' is pruned"), (("foo",), "foo")])
def test_settings_that_are_made_alone_are_checked_too(variants: Any, words: str) -> None:
    assert EngineSettings(1 << 30, variants="int4").variants == ("int4",)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        EngineSettings(1 << 30, variants=variants)


@pytest.mark.usefixtures("known_vllm")
def test_workers_are_told_where_a_profile_is_from_wherever_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "order.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for order in ("order.json", "~/order.json", Path("order.json")):
        assert options("1GiB", order=order)["additional_config"][KEY]["order"] == str(tmp_path / "order.json")


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "1.0"])
def test_another_version_of_vllm_is_refused_with_the_known_ones(version: str) -> None:
    with pytest.raises(BackendUnavailable, match=r"0\.31 or later, below 0\.34"):
        require_known(version)


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0+cpu", "0.33.1"])
def test_known_versions(version: str) -> None:
    require_known(version)


def test_whole_numbers_of_numpy_are_sent_and_what_is_no_number_is_refused() -> None:
    sent = {"size": np.int64(4), "action": Release((np.int64(1),))}
    assert decode(encode(sent)) == {"size": 4, "action": Release((1,))}
    for wrong in (object(), Release, SLO()):
        with pytest.raises(ConfigError, match="cannot be sent to the workers"):
            encode(wrong)


@pytest.mark.parametrize("wrong", [None, 3])
def test_what_is_no_action_is_left_to_the_ranks_to_refuse(wrong: Any) -> None:
    ranks = Ranks([{"error": encode_error(ConfigError("no action of this model"))}], delay=0)
    with pytest.raises(ConfigError, match="no action"):
        RemoteRuntime(ranks).apply(wrong)
