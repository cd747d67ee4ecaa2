"""What verbs of a fleet refuse before they begin: arguments that cannot be, and a fleet without ranks."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

from elastic import ConfigError, StateError
from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Output, Request
from elastic.types import Release
from support import architectures

ENGINE = {"block_tokens": 8, "max_batch_tokens": 64}
VERBS: dict[str, Callable[[Fleet], object]] = {
    "submit": lambda fleet: fleet.submit(Request((1, 2, 3), 4), print),
    "add": lambda fleet: fleet.add(["cpu#more=4MiB"]),
    "scale_out": lambda fleet: fleet.scale_out(1),
    "remove": lambda fleet: fleet.remove("r0"),
    "kill": lambda fleet: fleet.kill("r0"),
    "move": lambda fleet: fleet.move("request", "r0"),
    "look": lambda fleet: fleet.look("r0"),
    "apply": lambda fleet: fleet.apply("r0", Release((0,))),
    "prepare": lambda fleet: fleet.prepare("r0", Release((0,)), "transaction"),
    "commit": lambda fleet: fleet.commit("r0", "transaction"),
    "rollback": lambda fleet: fleet.rollback("r0", "transaction"),
    "drop": lambda fleet: fleet.drop("1MiB"),
    "drop of layers": lambda fleet: fleet.drop(layers={"r0": [1]}),
    "restore": lambda fleet: fleet.restore(),
    "restore of a rank": lambda fleet: fleet.restore("r0"),
    "restore, dry": lambda fleet: fleet.restore(dry_run=True),
    "merge": lambda fleet: fleet.merge("r0", "r1"),
    "split": lambda fleet: fleet.split("r0"),
    "migrate": lambda fleet: fleet.migrate("r0", [1], "r1"),
    "replicate": lambda fleet: fleet.replicate("r0", [1], "r1"),
    "evict": lambda fleet: fleet.evict("r0"),
    "reshard": lambda fleet: fleet.reshard(["r0", "r1"], tp=2),
    "capacity": lambda fleet: fleet.capacity([1]),
    "layer_bytes": lambda fleet: fleet.layer_bytes(),
    "budgets": lambda fleet: fleet.budgets(),
    "plan": lambda fleet: fleet.plan("1MiB"),
    "keep_staging": lambda fleet: fleet.keep_staging(),
    "get_ready": lambda fleet: fleet.get_ready(),
}
WRONG: tuple[tuple[Callable[[Any], object], str], ...] = (
    (lambda fleet: fleet.submit(5, print), "request=5 cannot be"),
    (lambda fleet: fleet.submit(Request((1,), 1), "listener"), "listener='listener' cannot be"),
    (lambda fleet: fleet.cancel([]), r"request=\[\] cannot be"),
    (lambda fleet: fleet.cancel("request", "0"), "index='0' cannot be"),
    (lambda fleet: fleet.cancel("request", True), "index=True cannot be"),
    (lambda fleet: fleet.longest_request(2.5), "most=2.5 cannot be"),
    (lambda fleet: fleet.add(5), "places=5 cannot be"),
    (lambda fleet: fleet.add(["cpu"], cores=["0"]), r"cores=\['0'\] cannot be"),
    (lambda fleet: fleet.scale_out("1"), "ranks='1' cannot be"),
    (lambda fleet: fleet.scale_out(True), "ranks=True cannot be"),
    (lambda fleet: fleet.remove(["r0"]), r"rank=\['r0'\] cannot be"),
    (lambda fleet: fleet.remove("r0", drain="no"), "drain='no' cannot be"),
    (lambda fleet: fleet.remove("r0", timeout_s=math.nan), "timeout_s=nan cannot be"),
    (lambda fleet: fleet.stop(drain=None), "drain=None cannot be"),
    (lambda fleet: fleet.kill({}), "rank={} cannot be"),
    (lambda fleet: fleet.move([], "r0"), r"request=\[\] cannot be"),
    (lambda fleet: fleet.move("request", {}), "instance={} cannot be"),
    (lambda fleet: fleet.look(["r0"]), r"rank=\['r0'\] cannot be"),
    (lambda fleet: fleet.apply("r0", Release((0,)), dry_run="no"), "dry_run='no' cannot be"),
    (lambda fleet: fleet.apply("r0", Release((0,)), why=5), "why=5 cannot be"),
    (lambda fleet: fleet.prepare("r0", Release((0,)), 5), "id=5 cannot be"),
    (lambda fleet: fleet.commit("r0", []), r"id=\[\] cannot be"),
    (lambda fleet: fleet.rollback("r0", None), "id=None cannot be"),
    (lambda fleet: fleet.drop([]), r"need=\[\] is not a size"),
    (lambda fleet: fleet.drop(math.nan), "need=nan is not a size"),
    (lambda fleet: fleet.drop(layers=[1]), r"layers=\[1\] cannot be; it must be a mapping from ranks"),
    (lambda fleet: fleet.drop(layers={"r0": 1}), "layers=1 cannot be"),
    (lambda fleet: fleet.drop(layers={"r0": "12"}), "layers='12' cannot be"),
    (lambda fleet: fleet.drop(layers={"r0": [True]}), r"layers=\[True\] cannot be"),
    (lambda fleet: fleet.drop(1, most=2.5), "most=2.5 cannot be"),
    (lambda fleet: fleet.drop(1, whole="yes"), "whole='yes' cannot be"),
    (lambda fleet: fleet.drop(1, timeout_s=None), "timeout_s=None cannot be"),
    (lambda fleet: fleet.drop(1, dry_run=1), "dry_run=1 cannot be"),
    (lambda fleet: fleet.drop(1, coordinated="no"), "coordinated='no' cannot be"),
    (lambda fleet: fleet.restore(5), "rank=5 cannot be"),
    (lambda fleet: fleet.restore(timeout_s=-1), "timeout_s=-1 cannot be"),
    (lambda fleet: fleet.restore(sharing=None), "sharing=None cannot be"),
    (lambda fleet: fleet.merge("r0", ["r1"]), r"rank=\['r1'\] cannot be"),
    (lambda fleet: fleet.split(None), "rank=None cannot be"),
    (lambda fleet: fleet.migrate(["r0"], [1], "r1"), r"home=\['r0'\] cannot be"),
    (lambda fleet: fleet.migrate("r0", 1, "r1"), "layers=1 cannot be"),
    (lambda fleet: fleet.migrate("r0", ["x", 1], "r1"), r"layers=\['x', 1\] cannot be"),
    (lambda fleet: fleet.replicate("r0", 2.5, "r1"), "layers=2.5 cannot be"),
    (lambda fleet: fleet.evict("r0", "all"), "layers='all' cannot be"),
    (lambda fleet: fleet.reshard(2, tp=2), "instances=2 cannot be"),
    (lambda fleet: fleet.reshard([["r0"]], tp=2), r"instances=\[\['r0'\]\] cannot be"),
    (lambda fleet: fleet.capacity(2), "degrees=2 cannot be"),
    (lambda fleet: fleet.capacity([True]), "degrees=True cannot be"),
    (lambda fleet: fleet.plan(None), "need=None is not a size"),
)


@pytest.mark.parametrize("verb", VERBS)
def test_a_fleet_that_was_never_started_says_so(verb: str) -> None:
    with pytest.raises(StateError, match=r"the fleet is new; start it first"):
        VERBS[verb](Fleet("model", ranks=2))


@pytest.mark.parametrize("verb", VERBS)
def test_a_fleet_that_has_stopped_says_so(verb: str) -> None:
    fleet = Fleet("model", ranks=2)
    fleet.stop()
    with pytest.raises(StateError, match=r"the fleet is stopped; make a new one"):
        VERBS[verb](fleet)


@pytest.mark.slow
def test_arguments_that_cannot_be_are_refused_in_words() -> None:
    models = [architectures.build("qwen3") for _ in range(2)]
    places = [[f"cpu#{number}=4MiB"] for number in range(2)]
    with Fleet.of(*models, ranks=places, engine=ENGINE, shards=2, beat_timeout_s=60) as fleet:
        for verb, words in WRONG:
            with pytest.raises(ConfigError, match=words):
                verb(fleet)
            assert fleet.health()


@pytest.mark.slow
def test_a_listener_kills_no_rank_whose_answers_it_keeps_from_being_read() -> None:
    errors, ended = list[StateError](), threading.Event()

    def listener(output: Output) -> None:
        if output.finish is not None:
            ended.set()
        elif not errors:
            try:
                fleet.kill("r0")
            except StateError as error:
                errors.append(error)

    with Fleet.of(architectures.build("qwen3"), places=["cpu#0=4MiB"], engine=ENGINE) as fleet:
        fleet.submit(Request((1, 2, 3), 4, ignore_eos=True), listener)
        assert ended.wait(60)
        assert [str(error) for error in errors] == ["a rank cannot be killed by a listener; use another thread"]
        assert fleet.health()
