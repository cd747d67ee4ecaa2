"""The grid of ranks by layers: which instances' layers each rank computes."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from elastic.cli.views.dashboard import frame
from elastic.cli.views.fleet import deployments, ranks
from elastic.cli.views.stages import stages, work
from elastic.cli.views.status_document import StatusDocument, read_status
from support.serving.status_documents import fleet_document

LAYERS = 6


def fleet(paths: dict[str, list[str]], dropped: dict[str, list[int]], **changes: Any) -> StatusDocument:
    """The status of a fleet in which instance `i-r0` is that of rank `r0`."""
    said = fleet_document()
    first = said["ranks"][0]
    said["ranks"] = [{**first, "name": name, "dropped": dropped.get(name, [])} for name in paths]
    said["instances"] = [
        {"name": f"i-{name}", "leader": name, "ranks": sorted({name, *path}), "path": path, "epoch": 2}
        for name, path in paths.items()
    ]
    return read_status({**said, **changes})


def drawn(document: StatusDocument) -> str:
    console = Console(width=120, record=True)
    panel = stages(document)
    assert panel is not None
    console.print(panel)
    return console.export_text()


def test_two_instances_that_compute_each_others_layers() -> None:
    shared = ["r0"] * 3 + ["r1"] * 3
    text = drawn(fleet({"r0": shared, "r1": shared}, {"r0": [3, 4, 5], "r1": [0, 1, 2]}))
    assert "6 layers of 2 instances at 2 ranks" in text
    assert "r0 222··· 0-2 of i-r0, i-r1; dropped 3-5" in text
    assert "r1 ···222 3-5 of i-r0, i-r1; dropped 0-2" in text


def test_an_instance_of_which_another_rank_computes_some_layers() -> None:
    text = drawn(fleet({"r0": ["r0", "r1", "r1", "r0", "r0", "r0"], "r1": ["r1"] * 6}, {}))
    assert "r0 1--111 0, 3-5 of i-r0" in text
    assert "r1 122111 0, 3-5 of i-r1; 1-2 of i-r0, i-r1" in text


def test_two_instances_that_share_some_layers() -> None:
    path = ["r0+r1"] * 4 + ["r1"] * 2
    text = drawn(fleet({"r0": path, "r1": path}, {"r0": [4, 5]}))
    assert "r0 2222·· parts of 0-3 of i-r0, i-r1; dropped 4-5" in text
    assert "r1 222222 parts of 0-3 of i-r0, i-r1; 4-5 of i-r0, i-r1" in text
    assert stages(fleet({"r0": ["r0+r1"] * 6}, {})) is not None


def test_layers_of_which_another_rank_has_a_copy() -> None:
    path = ["r0"] * 4 + ["r0|r1"] * 2
    text = drawn(fleet({"r0": path, "r1": ["r1"] * 6}, {}))
    assert "r0 111111 0-3 of i-r0; copies of 4-5 of i-r0" in text
    assert "r1 111122 0-3 of i-r1; copies of 4-5 of i-r1, i-r0" in text or "copies of 4-5 of i-r0, i-r1" in text
    assert stages(fleet({"r0": ["r0|r1"] * 6, "r1": ["r1"] * 6}, {})) is not None


def test_the_parts_of_shared_layers_that_a_rank_has_are_named() -> None:
    said = fleet_document()
    first = said["ranks"][0]
    place = {"place": "cuda:0", "variant": "float32"}
    parts = {f"layers.{i}": [{**place, "shard": "0,1/4" if i < 2 else "whole"}] for i in range(4)}
    first["status"]["residencies"] = parts
    path = ["r0+r1", "r0+r1", "r0", "r0"]
    said["ranks"][1] |= {"state": "serving"}
    said["instances"][0] |= {"path": path, "tp": 2}
    document = read_status(said)
    text = drawn(document)
    assert "r0 1111 parts 0,1/4 of 0-1 of i0; 2-3 of i0" in text
    assert "r1 11-- parts of 0-1 of i0" in text, "it has not said which"
    console = Console(width=160, record=True)
    console.print(ranks(document))
    assert "i0, tp=2" in console.export_text()


def test_the_epoch_of_an_instance_is_shown_when_layers_have_changed_their_rank() -> None:
    said = fleet_document()
    said["instances"][0] |= {"epoch": 12, "tp": 2}
    console = Console(width=160, record=True)
    console.print(ranks(read_status(said)))
    assert (text := console.export_text()).count("epoch") == 1
    assert "i0, tp=2, epoch 12" in text


def test_bubbles_and_wires_of_ranks_that_compute_together() -> None:
    said = fleet_document()
    assert work(read_status(said)) is None, "an earlier version does not say"
    times = {"busy_s": 9.0, "bubble_s": 1.0, "waiting_s": 4.0}
    said["ranks"][0] |= {"times": times, "wires": []}
    said["ranks"][1] |= {"times": None, "wires": None}
    assert work(read_status(said)) is not None
    said["ranks"][0]["times"] = {**times, "waiting_s": 0.0}
    assert work(read_status(said)) is None, "it computes alone"
    wires = [{"rank": "r1", "sent_bytes": 1 << 20, "received_bytes": 2 << 20, "read_bytes": 3 << 20}]
    wires[0]["copied_bytes"] = 1 << 20
    said["ranks"][0] |= {"times": times, "wires": wires}
    table = work(read_status(said))
    assert table is not None
    console = Console(width=160, record=True)
    console.print(table)
    text = " ".join(console.export_text().split())
    for words in ("10.0%", "r1 1.00 MiB, 2.00 MiB", "r1 4.00 MiB"):
        assert words in text


def test_where_each_computes_its_own_there_is_no_grid() -> None:
    assert stages(fleet({"r0": [], "r1": []}, {})) is None
    assert stages(fleet({"r0": ["r0"] * 6, "r1": ["r1"] * 6}, {})) is None
    assert stages(read_status(fleet_document())) is None


def test_top_shows_the_grid_and_what_the_policy_said() -> None:
    shared = ["r0"] * 3 + ["r1"] * 3
    document = fleet(
        {"r0": shared, "r1": shared}, {}, fleet={"queued": 0, "totals": {}, "policy": "all is well; KV [b]r0+r1 10%"}
    )
    console = Console(width=160, record=True)
    console.print(frame(document, (), "http://here"))
    text = console.export_text()
    assert "6 layers of 2 instances at 2 ranks" in text
    assert "policy: all is well; KV [b]r0+r1 10%" in text


def test_paths_that_make_no_sense_are_drawn_all_the_same() -> None:
    text = drawn(fleet({"r0": ["gone", "r1"], "r1": ["r0"]}, {"r0": [99]}))
    assert "2 layers of 2 instances" in text


def test_deployments_say_where_the_seconds_of_their_links_are_from() -> None:
    def deployed(name: str, *bases: str) -> dict[str, Any]:
        links = [{"devices": ["cpu#a", "cpu#b"], "basis": basis, "fixed_s": 1e-4, "byte_s": 1e-9} for basis in bases]
        return {"name": name, "configuration": "TP1 PP2 full", "links": links}

    several = [deployed("one", "measured"), deployed("two", "assumed", "assumed"), deployed("three")]
    console = Console(width=120, record=True)
    console.print(deployments(fleet({"r0": ["r0"]}, {}, deployments=several))[0])
    lines = [line.split() for line in console.export_text().splitlines()]
    assert [line[5:-1] for line in lines if "TP1" in line] == [["measured", "0"], ["assumed", "0"], ["0"]]
