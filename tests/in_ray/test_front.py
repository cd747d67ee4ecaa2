"""A fleet behind Ray Serve: it answers, is replaced when it has no rank left, and is restarted under streams."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import gt
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from transformers import AutoTokenizer

from elastic.assets import MODEL_DIR
from elastic.cluster.fleet.fleet import Fleet
from support.cluster.ray_side import SERVE_URL, asked, groups
from support.processes import wait_for_end, wait_until

PLACES, NEW_PLACES = ("cpu=32MiB",), ("cpu=40MiB",)
PROMPTS = ("def f(", "class A", "import os\n", "for i in ")


def application(fleet: Fleet) -> Any:
    from elastic.server import create_app

    app = create_app(fleet, AutoTokenizer.from_pretrained(MODEL_DIR), "small")
    app.get("/room")(lambda: {"seconds": fleet._launcher._room_s})  # type: ignore[attr-defined]
    return app


def deploy(places: tuple[str, ...] = PLACES, ranks: int = 1, *, replace: bool = True, **deployment: Any) -> None:
    """Deploy a small fleet; again, its next version."""
    from elastic.cluster import ray as front

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # replicas cannot import this file
    front.deploy(
        MODEL_DIR,
        application,
        ranks=ranks,
        fleet={"places": places, "replace": replace},
        launcher={"cpus": 0.5},
        ray_actor_options={"num_cpus": 0.5},
        **deployment,
    )


@contextmanager
def deployed(**options: Any) -> Iterator[None]:
    """A fleet behind Ray Serve, of which nothing is left afterwards."""
    deploy(**options)
    try:
        yield
    finally:
        serve.shutdown()
    wait_until(lambda: not groups(), "the ranks of the replica are left")


def question(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "small", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def answer(prompt: str, tokens: int = 8) -> str:
    """The text of an answer as a whole."""
    told = asked("/v1/completions", question(prompt, tokens))
    assert told["usage"]["completion_tokens"] == tokens
    return str(told["choices"][0]["text"])


class Streams:
    """Clients that ask for streams one after the other, each of which is to be the same as the answer as a whole."""

    def __init__(self, clients: int, tokens: int) -> None:
        self._tokens, self._expected = tokens, {prompt: answer(prompt, tokens) for prompt in PROMPTS}
        self._stop = threading.Event()
        self.told = [0] * clients
        """Of each client, how many streams have told something; one more than `whole` while one is under way."""
        self.whole = [0] * clients
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(client,)) for client in range(clients)]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    @property
    def under_way(self) -> int:
        return sum(told > whole for told, whole in zip(self.told, self.whole, strict=True))

    def _ask(self, client: int) -> None:
        while not self._stop.is_set():
            prompt = PROMPTS[(client + self.whole[client]) % len(PROMPTS)]
            try:
                text = "".join(self._stream(client, prompt))
            except (httpx.HTTPError, AssertionError) as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
                return
            if text != self._expected[prompt]:
                self.wrong.append(text)
                return
            self.whole[client] += 1

    def _stream(self, client: int, prompt: str) -> Iterator[str]:
        body, last = question(prompt, self._tokens, stream=True), ""
        with httpx.stream("POST", f"{SERVE_URL}/v1/completions", json=body, timeout=300) as told:
            assert told.status_code == 200, told.read()
            for line in filter(None, told.iter_lines()):
                self.told[client] = self.whole[client] + 1
                last = line.removeprefix("data: ")
                if last != "[DONE]":
                    yield "".join(choice["text"] for choice in json.loads(last)["choices"])
        assert last == "[DONE]", f"the stream ended with {last!r}"


def test_ray_replaces_a_front_whose_fleet_has_no_rank_left() -> None:
    with deployed(replace=False, health_check_period_s=0.5):
        (first,) = asked("/elastic/status")["ranks"]
        os.kill(first["pid"], signal.SIGKILL)

        def others() -> set[int]:
            with suppress(OSError):  # no replica is there for a while
                return {r["pid"] for r in asked("/elastic/status")["ranks"] if r["state"] == "serving"}
            return set()

        wait_until(lambda: others() - {first["pid"]}, "its replica was not replaced", 400)
        answer("def f(")


def test_the_front_answers_through_ray_serve_as_many_at_a_time_as_come() -> None:
    with deployed(ranks=2):
        assert [model["id"] for model in asked("/v1/models")["data"]] == ["small"]
        assert answer("def f(") == answer("def f(")
        assert asked("/health")
        told = serve.context._get_global_client().get_serve_details()
        config = told["applications"]["elastic"]["deployments"]["FleetFront"]["deployment_config"]
        assert asked("/room")["seconds"] > config["graceful_shutdown_timeout_s"] >= 600, "answers take long to end"
        with Streams(8, 400) as streams:

            def requests() -> int:
                return sum(instance["requests"] for instance in asked("/elastic/status")["instances"])

            wait_until(lambda: requests() > 5 or streams.wrong, "requests wait at Ray's proxy", 120)
        assert not streams.wrong


@pytest.mark.parametrize("options", [{}, {"max_surge_percent": 100}, {"num_replicas": 2}], ids=str)
def test_a_rolling_restart_loses_no_answer_and_changes_none(options: dict[str, Any]) -> None:
    with deployed(**options):
        with Streams(4, 200) as streams:
            wait_until(lambda: streams.under_way == 4 or streams.wrong, "no streams")
            old = {rank["pid"] for rank in asked("/elastic/status")["ranks"]}
            before = list(streams.whole)
            deploy(NEW_PLACES, **options)
            after = list(streams.whole)
            wait_until(lambda: all(map(gt, streams.whole, after)) or streams.wrong, "clients hang", 120)
        assert not streams.wrong
        assert all(map(gt, after, before)), "a client got no answer during the restart"
        for pid in old:
            wait_for_end(pid)
        assert [rank["places"] for rank in asked("/elastic/status")["ranks"]] == [list(NEW_PLACES)]
