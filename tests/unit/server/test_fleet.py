"""What a server says of a fleet, and has it do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from elastic.cluster.control.messages import RuntimeView
from elastic.server.fleets.views import RankViews
from elastic.types import Release, ResizeKV
from support.processes import wait_until
from support.serving.fake_engine import FakeEngine
from support.serving.fake_fleet import FakeFleet
from support.serving.live_server import app_for
from support.serving.status_documents import VARIANTS

TOKEN = "open sesame"
RELEASE = {"kind": "release", "layers": [3]}


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    made = FakeFleet("a", "b")
    yield made
    made.released.set()


@pytest.fixture
def client(fleet: FakeFleet) -> Iterator[TestClient]:
    with TestClient(app_for(fleet, token=TOKEN, actions=True)) as found:
        found.headers["Authorization"] = f"Bearer {TOKEN}"
        yield found


def scraped(client: TestClient) -> dict[tuple[str, ...], float]:
    """Name and labels but the model's, as `label=value` -> value."""
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels = sorted(f"{name}={value}" for name, value in sample.labels.items() if name != "model_name")
            found[sample.name, *labels] = sample.value
    return found


def test_an_engine_is_a_fleet_if_it_can_do_what_one_does(fleet: FakeFleet) -> None:
    assert app_for(fleet).state.serving.fleet is fleet
    assert app_for(FakeEngine()).state.serving.fleet is None


def test_actions_of_a_rank_count_once_whatever_instance_it_has(
    client: TestClient, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of one that joins between the two looks at the fleet of a scrape: its instance is not known yet."""

    def counted() -> float:
        return sum(v for (name, *labels), v in scraped(client).items() if name == "elastic_actions_total")

    status = fleet.status()
    with monkeypatch.context() as patch:
        patch.setattr(fleet, "status", lambda: replace(status, instances=status.instances[:1]))
        before = counted()
    assert counted() == before > 0


def test_health_is_good_while_one_rank_serves(client: TestClient, fleet: FakeFleet) -> None:
    fleet.becomes("a", "lost", "killed")
    answer = client.get("/health")
    ranks = [{"name": "a", "state": "lost"}, {"name": "b", "state": "serving"}]
    assert (answer.status_code, answer.json()) == (200, {"status": "serving", "ranks": ranks})
    fleet.becomes("b", "starting")
    answer = client.get("/health")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")


def test_a_rank_that_flips_serves_and_is_told_apart(client: TestClient, fleet: FakeFleet) -> None:
    fleet.becomes("a", "flipping")
    fleet.becomes("b", "lost")
    answer = client.get("/health")
    assert (answer.status_code, answer.json()["ranks"][0]) == (200, {"name": "a", "state": "flipping"})
    found = scraped(client)
    states = {key[1:]: value for key, value in found.items() if key[0] == "elastic_rank_state"}
    assert states == {("instance=i-a", "rank=a", "state=flipping"): 1, ("instance=", "rank=b", "state=lost"): 1}
    assert found["elastic_rank_up", "instance=i-a", "rank=a"] == 1
    assert found["elastic_rank_dropped_layers", "instance=i-a", "rank=a"] == 0
    rank = client.get("/elastic/status").json()["ranks"][0]
    assert (rank["state"], rank["layers"]) == ("flipping", list(VARIANTS)), "it is looked at as before"
    assert client.post("/elastic/actions", json={"actions": [RELEASE], "rank": "a"}).status_code == 200


def test_metrics_tell_ranks_and_instances_apart(client: TestClient, fleet: FakeFleet) -> None:
    fleet.becomes("b", "lost")
    found = scraped(client)
    assert found["elastic_rank_up", "instance=i-a", "rank=a"] == 1
    assert found["elastic_rank_up", "instance=", "rank=b"] == 0
    for name, value in (("running", 2), ("waiting", 1), ("free_blocks", 30), ("total_blocks", 40), ("requests", 3)):
        assert found[f"elastic_instance_{name}", "instance=i-a"] == value
    assert found["elastic_fleet_queue_length",] == 6
    totals = {
        "elastic_requests_moved_total": 5,
        "elastic_ranks_lost_total": 1,
        "elastic_requests_resumed_total": 2,
        "elastic_tokens_recomputed_total": 33,
    }
    assert {name: found[name,] for name in totals} == totals
    assert found["elastic_kv_used_bytes", "instance=i-a", "place=cuda:0", "rank=a"] == 300 << 20
    assert found["elastic_actions_total", "instance=i-a", "kind=swap", "outcome=applied", "rank=a"] == 1
    assert not [key for key in found if key[0].startswith("elastic_kv") and "rank=b" in key]


def test_metrics_have_bubbles_and_wires_of_each_rank(client: TestClient) -> None:
    found, a = scraped(client), ("instance=i-a", "rank=a")
    times = {"busy": 6.0, "bubble": 2.0, "hidden_states_wait": 3.0}
    assert {name: found[f"elastic_{name}_seconds_total", *a] for name in times} == times
    assert found["elastic_iteration_tokens_total_count", *a] == 3
    assert found["elastic_iteration_tokens_total_sum", *a] == 7
    assert [found["elastic_iteration_tokens_total_bucket", a[0], f"le={n}.0", a[1]] for n in (1, 2, 4)] == [1, 2, 3]
    wires = {"sent": 100, "received": 200, "read": 300, "copied": 400}
    told = {key[1:]: value for key, value in found.items() if key[0].startswith("elastic_wire")}
    assert told == {(a[0], f"kind={kind}", "peer=b", a[1]): nbytes for kind, nbytes in wires.items()}
    assert found["elastic_wire_bytes_total", a[0], "kind=sent", "peer=b", a[1]] == 100


def test_a_rank_that_hangs_holds_up_no_look_at_the_others(client: TestClient, fleet: FakeFleet) -> None:
    fleet.hangs = {"b"}
    for _ in range(2):
        ranks = {rank["name"]: rank for rank in client.get("/elastic/status").json()["ranks"]}
        assert ranks["a"]["layers"] == list(VARIANTS)
        assert (ranks["b"]["layers"], ranks["b"]["status"]) == ([], None)
        assert ("elastic_kv_used_bytes", "instance=i-a", "place=cuda:0", "rank=a") in scraped(client)
    assert fleet.looked.count("b") == 1, "one that does not answer is not asked again"


def test_a_view_stays_for_a_moment_and_goes_with_its_rank(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    views = RankViews(fleet)
    monkeypatch.setattr("elastic.server.fleets.views.FRESH_S", 3600)
    assert list(views.read()) == list(views.read()) == ["a", "b"]
    assert sorted(fleet.looked) == ["a", "b"]
    fleet.becomes("b", "lost")
    assert list(views.read()) == ["a"]
    fleet.becomes("b", "serving")
    assert list(views.read()) == ["a", "b"]
    assert sorted(fleet.looked) == ["a", "b", "b"]


def test_who_acts_sees_what_was_done(client: TestClient, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.server.fleets.views.FRESH_S", 3600)
    for _ in range(2):
        client.get("/elastic/status")
    assert sorted(fleet.looked) == ["a", "b"]
    client.post("/elastic/fleet/move", json={})  # of whatever it makes: it may have been done in part
    client.get("/elastic/status")
    assert sorted(fleet.looked) == ["a", "a", "b", "b"]


def test_a_view_asked_for_before_something_was_done_is_asked_for_again(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.server.fleets.views.PATIENCE_S", 30)
    monkeypatch.setattr("elastic.server.fleets.views.FRESH_S", 3600)
    look = fleet.look

    def late(rank: str) -> RuntimeView:
        view = look(rank)
        fleet.released.wait()
        return view

    monkeypatch.setattr(fleet, "look", late)
    views = RankViews(fleet)
    reader = threading.Thread(target=views.read)
    reader.start()
    wait_until(lambda: sorted(fleet.looked) == ["a", "b"])
    views.outdate()
    fleet.released.set()
    reader.join(30)
    assert sorted(fleet.looked) == ["a", "a", "b", "b"]


def test_many_look_at_once_and_each_rank_is_asked_once(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.server.fleets.views.PATIENCE_S", 30)
    fleet.hangs = {"a", "b"}
    views = RankViews(fleet)
    readers = [threading.Thread(target=views.read) for _ in range(8)]
    for reader in readers:
        reader.start()
    wait_until(lambda: len(fleet.looked) == 2)
    assert sorted(fleet.looked) == ["a", "b"]
    fleet.released.set()
    for reader in readers:
        reader.join(30)
        assert not reader.is_alive()


def test_the_status_of_a_fleet(client: TestClient) -> None:
    status = client.get("/elastic/status").json()
    assert (status["version"], status["layers"], status["status"], status["events"]) == (2, [], None, [])
    assert [(rank["name"], rank["state"], rank["launcher"]) for rank in status["ranks"]] == [
        ("a", "serving", "fake"),
        ("b", "serving", "fake"),
    ]
    assert status["ranks"][1]["events"][0]["action"] == {
        "kind": "swap",
        "layers": [3, 4],
        "variant": "int4",
        "parts": [],
    }
    assert status["ranks"][0]["traffic"]["running"] == 2
    assert status["ranks"][0]["times"] == {"busy_s": 6.0, "bubble_s": 2.0, "waiting_s": 3.0, "load": 0.25}
    assert status["ranks"][0]["utilization"] is None
    wire = {"rank": "b", "sent_bytes": 100, "received_bytes": 200, "read_bytes": 300, "copied_bytes": 400}
    assert [rank["wires"] for rank in status["ranks"]] == [[wire], []]
    assert status["instances"][0]["load"]["free_blocks"] == 30
    assert status["fleet_events"][0]["why"] == "it was killed"
    assert (status["fleet"]["queued"], status["fleet"]["totals"]["recomputed_tokens"]) == (6, 33)


def test_a_fleet_of_one_rank_is_shown_as_one_model() -> None:
    with TestClient(app_for(FakeFleet("only"))) as client:
        status = client.get("/elastic/status").json()
    assert status["layers"] == list(VARIANTS)
    assert status["status"] == status["ranks"][0]["status"]
    assert len(status["events"]) == 2


def test_a_server_of_one_model_has_no_ranks() -> None:
    with TestClient(app_for(FakeEngine(), token=TOKEN, actions=True)) as client:
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        status = client.get("/elastic/status").json()
        assert (status["ranks"], status["instances"], status["fleet_events"], status["fleet"]) == ([], [], [], None)
        assert client.get("/health").json() == {"status": "serving"}
        for verb in ("remove", "move", "restore", "capacity", "split"):
            for body in ({"rank": "a"}, {}, {"no such": 1}, [1]):
                answer = client.post(f"/elastic/fleet/{verb}", json=body)
                assert (answer.status_code, "one model" in answer.json()["error"]["message"]) == (404, True)
        answer = client.post("/elastic/fleet/deploy", json={})
        assert (answer.status_code, "deploys no models" in answer.json()["error"]["message"]) == (404, True)


def test_actions_are_done_at_one_rank_or_at_all(client: TestClient, fleet: FakeFleet) -> None:
    done = client.post("/elastic/actions", json={"actions": [RELEASE], "rank": "b"}).json()["results"]
    assert [(result["rank"], result["layers"], result["action"]["kind"]) for result in done] == [("b", [3], "release")]
    done = client.post("/elastic/actions", json={"actions": [RELEASE]}).json()["results"]
    assert [result["rank"] for result in done] == ["a", "b"]
    assert fleet.done == [("b", (Release((3,)),)), ("a", (Release((3,)),)), ("b", (Release((3,)),))]
    limit = {"actions": [{"kind": "resize_kv", "limit": "1MiB"}], "dry_run": True}
    steps = client.post("/elastic/actions", json=limit).json()["steps"]
    assert [(step["rank"], step["action"]["place"]) for step in steps] == [("a", "cuda:0"), ("b", "cuda:0")]
    answer = client.post("/elastic/actions", json={"actions": [RELEASE], "rank": "c"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert "there is no rank 'c' that serves; there are: a, b" in answer.json()["error"]["message"]


def test_actions_on_all_ranks_are_done_at_none_if_one_cannot(client: TestClient, fleet: FakeFleet) -> None:
    fleet.lacks_memory = {"b"}
    answer = client.post("/elastic/actions", json={"actions": [RELEASE]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "capacity_exceeded")
    assert (fleet.done, fleet.prepared) == ([], {"a": {}, "b": {}})


def test_a_commit_that_fails_at_the_first_rank_is_done_at_none(client: TestClient, fleet: FakeFleet) -> None:
    fleet.cannot_commit = {"a"}
    answer = client.post("/elastic/actions", json={"actions": [RELEASE]})
    assert answer.status_code == 503
    assert (fleet.done, fleet.prepared) == ([], {"a": {}, "b": {}})
    fleet.cannot_commit = {"b"}
    client.post("/elastic/actions/prepare", json={"actions": [RELEASE], "id": "t"})
    answer = client.post("/elastic/actions/t/commit", json={})
    assert answer.status_code == 409
    assert "rank b could not commit 't' after a had" in answer.json()["error"]["message"]


def test_a_transaction_over_http(client: TestClient, fleet: FakeFleet) -> None:
    limit: dict[str, Any] = {"kind": "resize_kv", "limit": 4096, "place": "cuda:0"}
    asked = {"actions": [RELEASE, limit], "id": "mine", "timeout_s": 5}
    told = client.post("/elastic/actions/prepare", json=asked).json()
    assert (told["id"], told["expires_s"], told["moved_bytes"], told["pages"]) == ("mine", 1e9 + 5, 20, 6)
    assert [step["rank"] for step in told["steps"]] == ["a", "a", "b", "b"]
    assert fleet.done == []
    assert fleet.prepared["b"]["mine"] == (Release((3,)), ResizeKV("cuda:0", 4096))
    results = client.post("/elastic/actions/mine/commit", json={}).json()["results"]
    assert [result["rank"] for result in results] == ["a", "a", "b", "b"]
    told = client.post("/elastic/actions/prepare", json={"actions": [RELEASE], "rank": "a"}).json()
    assert client.post(f"/elastic/actions/{told['id']}/rollback", json={}).json() == {"id": told["id"]}
    assert fleet.prepared == {"a": {}, "b": {}}
    for end in ("commit", "rollback"):
        answer = client.post(f"/elastic/actions/unknown/{end}", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    for wrong in ({"id": "a/b"}, {"id": ""}, {"timeout_s": 0}, {"rank": 3}, {"actions": []}):
        assert client.post("/elastic/actions/prepare", json={**asked, **wrong}).status_code == 400


def test_a_rollback_reaches_the_ranks_after_one_that_is_lost(client: TestClient, fleet: FakeFleet) -> None:
    id = client.post("/elastic/actions/prepare", json={"actions": [RELEASE]}).json()["id"]
    fleet.becomes("a", "lost")
    assert client.post(f"/elastic/actions/{id}/rollback", json={}).status_code >= 400
    assert fleet.prepared["b"] == {}


def test_a_commit_that_fails_in_the_middle_leaves_nothing_prepared() -> None:
    fleet = FakeFleet("a", "b", "c")
    fleet.cannot_commit = {"b"}
    with TestClient(app_for(fleet, token=TOKEN, actions=True)) as client:
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        assert client.post("/elastic/actions", json={"actions": [RELEASE]}).status_code == 503
    assert [rank for rank, _ in fleet.done] == ["a"]
    assert fleet.prepared == {"a": {}, "b": {}, "c": {}}


def test_ranks_are_told_who_asked(client: TestClient, fleet: FakeFleet) -> None:
    assert client.post("/elastic/actions", json={"actions": [RELEASE], "rank": "a"}).status_code == 200
    assert fleet.reasons == ["by HTTP"]


def test_requests_are_moved_and_ranks_come_and_go(client: TestClient, fleet: FakeFleet) -> None:
    for request in ("chatcmpl-12ab", "cmpl-12ab", "resp_12ab", "12ab", "my-request"):
        answer = client.post("/elastic/fleet/move", json={"request": request, "instance": "i-b"})
        assert answer.json()["moved"]["moved_bytes"] == 4096
    assert [request for request, _ in fleet.moves] == ["12ab"] * 4 + ["my-request"]
    answer = client.post("/elastic/fleet/move", json={"request": "12ab", "instance": "nowhere"})
    assert (answer.status_code, "there is no instance" in answer.json()["error"]["message"]) == (404, True)
    assert client.post("/elastic/fleet/add", json={"places": ["cpu=1MiB"]}).json() == {"added": "new"}
    assert client.post("/elastic/fleet/add", json={"places": ["cpu=1EiB"]}).status_code == 409
    assert client.post("/elastic/fleet/remove", json={"rank": "a", "drain": False}).json()["removed"] == "a"
    assert fleet.ranks["a"].why == "at once"
    assert client.post("/elastic/fleet/remove", json={"rank": "a", "drain": 1}).status_code == 400


def test_layers_leave_and_return_over_http(client: TestClient, fleet: FakeFleet) -> None:
    dropped = client.post("/elastic/fleet/drop", json={"need": "4KiB"}).json()["dropped"]
    assert (dropped["status"], dropped["freed_bytes"], dropped["flips"]) == ("applied", 4096, 5)
    assert dropped["groups"][0]["members"] == ["a", "b"]
    assert dropped["groups"][0]["stages"] == [[0, 1], [2, 3, 4, 5]]
    by_hand = {"layers": {"a": [2, 3], "b": [0, 1]}, "dry_run": True}
    assert client.post("/elastic/fleet/drop", json=by_hand).json()["dropped"]["status"] == "planned"
    assert client.post("/elastic/fleet/restore", json={}).json()["restored"]["fetched_bytes"] == 4096
    assert client.post("/elastic/fleet/merge", json={"ranks": ["a", "b"]}).json()["merged"]["alone"] == {"a": 9, "b": 9}
    assert client.post("/elastic/fleet/split", json={"rank": "a"}).json()["split"]["members"] == ["a", "b"]
    assert fleet.groups_asked == [
        ("drop", ("4KiB", None, False, "by HTTP")),
        ("drop", (None, {"a": [2, 3], "b": [0, 1]}, True, "by HTTP")),
        ("restore", (None, "by HTTP")),
        ("merge", ("a", "b")),
        ("split", "a"),
    ]


def test_layers_go_to_another_rank_over_http(client: TestClient, fleet: FakeFleet) -> None:
    body = {"home": "a", "layers": [4, 5], "rank": "b"}
    done = client.post("/elastic/fleet/migrate", json=body).json()["migrated"]
    assert (done["status"], done["layers"], done["rank"]) == ("applied", [4, 5], "b")
    done = client.post("/elastic/fleet/migrate", json={**body, "dry_run": True}).json()["migrated"]
    assert done["status"] == "planned"
    assert fleet.groups_asked == [("migrate", ("a", [4, 5], "b"))] * 2


def test_a_drop_is_of_whole_models_and_few_instances_where_that_is_said(client: TestClient, fleet: FakeFleet) -> None:
    assert client.post("/elastic/fleet/drop", json={"need": 1, "whole": True, "most": 2}).status_code == 200
    assert fleet.forms == [{"exchange": "live", "coordinated": True, "layers_per_step": None, "whole": True, "most": 2}]


def test_layers_get_replicas_and_lose_them_over_http(client: TestClient, fleet: FakeFleet) -> None:
    done = client.post("/elastic/fleet/replicate", json={"home": "a", "layers": [4, 5], "rank": "b"}).json()
    assert (done["replicated"]["status"], done["replicated"]["layers"]) == ("applied", [4, 5])
    assert client.post("/elastic/fleet/evict", json={"home": "a"}).json()["evicted"]["layers"] == [4, 5, 9]
    assert client.post("/elastic/fleet/evict", json={"home": "a", "layers": [4]}).status_code == 200
    assert fleet.groups_asked == [("replicate", ("a", [4, 5], "b")), ("evict", ("a", None)), ("evict", ("a", [4]))]
    wrong = client.post("/elastic/fleet/replicate", json={"home": "a", "layers": [4], "rank": "a"})
    assert wrong.status_code == 400
    assert "at 'a' already" in wrong.json()["error"]["message"]


def test_what_could_be_done_has_a_price_over_http(client: TestClient, fleet: FakeFleet) -> None:
    offers = client.post("/elastic/fleet/plan", json={"need": "24MiB"}).json()["offers"]
    assert [(offer["kind"], offer["relieved_bytes"], offer["lossless"]) for offer in offers] == [
        ("drop", 4096, True),
        ("swap", 2048, False),
        ("restore", -8192, True),
    ]
    assert fleet.groups_asked == [("plan", "24MiB")]
    for path, body, answer in (
        ("restore", {}, "restored"),
        ("replicate", {"home": "a", "layers": [4], "rank": "b"}, "replicated"),
    ):
        done = client.post(f"/elastic/fleet/{path}", json={**body, "dry_run": True}).json()[answer]
        assert (done["status"], done["price"]["flips"] > 0) == ("planned", True)
    for wrong in ({}, {"need": 0}, {"need": 1, "more": 2}):
        assert client.post("/elastic/fleet/plan", json=wrong).status_code == 400


def test_the_longest_request_of_each_degree_is_told_over_http(client: TestClient, fleet: FakeFleet) -> None:
    told = client.post("/elastic/fleet/capacity", json={}).json()
    assert told == {"capacity": {"a": {"1": 1000, "2": 2000}, "b": {"1": 9}}}
    assert client.post("/elastic/fleet/capacity", json={"degrees": [2]}).json()["capacity"]["b"] == {}
    assert fleet.groups_asked == [("capacity", (1, 2, 4)), ("capacity", (2,))]
    for wrong in ({"degrees": []}, {"degrees": [0]}, {"degrees": ["2"]}, {"degrees": [1025]}, {"degree": [1]}):
        assert client.post("/elastic/fleet/capacity", json=wrong).status_code == 400


def test_ranks_go_on_sharing_where_that_is_said_over_http(client: TestClient, fleet: FakeFleet) -> None:
    for body in ({"sharing": True}, {"sharing": False}):
        assert client.post("/elastic/fleet/restore", json={"rank": "a", **body}).status_code == 200
    assert [form.get("sharing") for form in fleet.forms] == [True, None]
    assert client.post("/elastic/fleet/restore", json={"sharing": 1}).status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("drop", {"need": 1}),
        ("restore", {}),
        ("reshard", {"instances": ["a", "b"], "tp": 2}),
        ("migrate", {"home": "a", "layers": [4], "rank": "b"}),
    ],
)
def test_how_layers_change_their_rank_is_said_over_http(
    client: TestClient, fleet: FakeFleet, path: str, body: dict[str, Any]
) -> None:
    given = {"exchange": "stall", "coordinated": False, "layers_per_step": 2, "timeout_s": 2.5}
    assert client.post(f"/elastic/fleet/{path}", json=body).status_code == 200
    assert client.post(f"/elastic/fleet/{path}", json=body | given).status_code == 200
    assert fleet.forms == [{"exchange": "live", "coordinated": True, "layers_per_step": None}, given]
    for wrong in (
        {"exchange": "later"},
        {"coordinated": 1},
        {"layers_per_step": 0},
        {"timeout_s": 0},
        {"timeout_s": 601},
    ):
        assert client.post(f"/elastic/fleet/{path}", json=body | wrong).status_code == 400
    assert len(fleet.forms) == 2


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("drop", {"need": "1EiB"}, 409),
        ("drop", {"need": 0}, 400),
        ("drop", {"layers": {"a": [-1]}}, 400),
        ("drop", {"layers": {"a": "6-11"}}, 400),
        ("drop", {"need": 1, "more": 2}, 400),
        ("drop", {"need": 1, "most": 1}, 400),
        ("migrate", {"home": "a", "rank": "b"}, 400),
        ("migrate", {"home": "a", "rank": "b", "layers": []}, 400),
        ("reshard", {"instances": ["a", "b"], "tp": 3}, 400),
        ("reshard", {"instances": [], "tp": 2}, 400),
        ("reshard", {"instances": ["a"], "tp": 0}, 400),
        ("reshard", {"instances": ["a"], "tp": 2, "layers_per_step": 0}, 400),
        ("replicate", {"home": "a", "rank": "b"}, 400),
        ("replicate", {"home": "a", "rank": "b", "layers": []}, 400),
        ("replicate", {"home": "a", "rank": "b", "layers": [-1]}, 400),
        ("evict", {}, 400),
        ("evict", {"home": "a", "layers": []}, 400),
        ("merge", {"ranks": ["a"]}, 400),
        ("restore", {"rank": ""}, 400),
        ("split", {"rank": "c"}, 404),
        ("split", {}, 400),
    ],
)
def test_layers_that_cannot_leave_over_http(
    client: TestClient, fleet: FakeFleet, path: str, body: dict[str, Any], code: int
) -> None:
    assert client.post(f"/elastic/fleet/{path}", json=body).status_code == code
    assert not fleet.groups_asked


def test_who_computes_what_is_shown(client: TestClient, fleet: FakeFleet) -> None:
    found = scraped(client)
    assert found["elastic_instance_stages", "instance=i-a"] == 1
    assert found["elastic_rank_dropped_layers", "instance=i-a", "rank=a"] == 0
    assert found["elastic_rank_load", "instance=i-a", "rank=a"] == 0.25
    fleet.paths["a"] = ("a", "a", "b")
    fleet.ranks["a"] = replace(fleet.ranks["a"], dropped=(2,))
    found = scraped(client)
    assert found["elastic_instance_stages", "instance=i-a"] == 2
    assert found["elastic_instance_stages", "instance=i-b"] == 1
    assert found["elastic_rank_dropped_layers", "instance=i-a", "rank=a"] == 1
    assert found["elastic_instance_shards", "instance=i-a"] == 1
    for path, stages, shards in ((("b+a", "a+b"), 1, 2), (("b", "b|a"), 2, 1), (("b+a", "c+d"), 2, 2)):
        fleet.paths["b"] = path
        found_b = scraped(client)
        assert found_b["elastic_instance_stages", "instance=i-b"] == stages
        assert found_b["elastic_instance_shards", "instance=i-b"] == shards
    del fleet.paths["b"]
    assert found["elastic_fleet_exchanged_bytes_total",] == 2048
    status = client.get("/elastic/status").json()
    assert [instance["path"] for instance in status["instances"]] == [["a", "a", "b"], []]
    assert [rank["dropped"] for rank in status["ranks"]] == [[2], []]
    assert status["fleet"]["policy"] == "all is well; KV a 10%"


def test_whoever_has_no_token_changes_nothing(client: TestClient, fleet: FakeFleet) -> None:
    client.headers["Authorization"] = "Bearer wrong"
    for path in (
        "fleet/move",
        "fleet/add",
        "fleet/remove",
        "fleet/plan",
        "fleet/capacity",
        "fleet/drop",
        "fleet/restore",
        "fleet/migrate",
        "fleet/replicate",
        "fleet/evict",
        "fleet/merge",
        "fleet/split",
        "actions/prepare",
        "actions/x/commit",
        "actions/x/rollback",
    ):
        refused = client.post(f"/elastic/{path}", json={})
        assert refused.status_code == 401
        assert "the token for actions, not the API key" in refused.json()["error"]["message"]
        assert "--token-file" in refused.json()["error"]["message"]
    with TestClient(app_for(FakeFleet("a"))) as closed:
        for path in ("fleet/move", "actions/prepare", "actions/x/commit"):
            assert closed.post(f"/elastic/{path}", json={}).json()["error"]["code"] == "not_found"
