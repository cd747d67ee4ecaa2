"""The list of branches for CUDA: found in the source, and held against what a run has seen."""

from __future__ import annotations

from gpu.simulation.branches import branches, entered

SOURCE = """
def copy(value, device):
    if device.type == "cuda" and value.is_pinned():
        wait = True
    elif device.type != "cuda":
        return value.to(device)
    if wait:
        name = "cuda"
    return value.to(device, non_blocking=device.type == "cuda")
"""


def test_conditions_on_cuda_are_found_with_what_follows_them() -> None:
    assert sorted((each.line, each.then, each.on_cuda) for each in branches(SOURCE)) == [
        (3, 4, True),
        (5, 6, False),
        (9, None, True),
    ]


def test_the_way_of_cuda_counts_alone() -> None:
    first, other, last = sorted(branches(SOURCE))
    on_cpu = {"executed_lines": [2, 3, 5, 6], "executed_branches": [[3, 5], [5, 6]]}
    on_cuda = {"executed_lines": [2, 3, 4, 7, 9], "executed_branches": [[3, 4], [7, 9]]}
    unpinned = {"executed_lines": [2, 3, 5, 7, 9], "executed_branches": [[3, 5], [5, 7], [7, 9]]}
    assert [[entered(each, seen) for each in (first, other, last)] for seen in (on_cpu, on_cuda, unpinned)] == [
        [False, False, False],
        [True, False, True],
        [False, True, True],
    ]
