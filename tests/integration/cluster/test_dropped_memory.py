"""What is dropped leaves the process: its memory, as the system counts it, holds keys and values instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic.cluster.fleet.fleet import Fleet
from elastic.engines.base import Request
from support.cluster.shared_launcher import SharedLauncher
from support.cluster.small_checkpoint import LAYERS, VOCABULARY, checkpoint, small_model
from support.processes import wait_until
from support.serving.generations import Collector, prompts, same_unless_close

MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+\s*(.*)")
BUDGET, PAGE = 4 << 20, 64 << 10


def resident(pid: int) -> int:
    """The bytes of its memory file that a process has in its page tables."""
    kbytes, name = 0, ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if match := MAPPING.fullmatch(line):
            name = match[1]
        elif line.startswith("Rss:") and "memfd:cpu" in name:
            kbytes += int(line.split()[1])
    return kbytes << 10


@pytest.mark.slow
def test_keys_and_values_have_the_memory_of_dropped_layers(launcher: SharedLauncher) -> None:
    with Fleet(checkpoint(), ranks=2, launch=launcher, places=[f"cpu={BUDGET >> 20}MiB"], replace=False) as fleet:
        pids = {rank.name: rank.pid for rank in fleet.status().ranks}
        half, heard = LAYERS // 2, Collector()
        free = {name: fleet.look(name).status.places[0].free_bytes for name in pids}
        weights = {name: resident(pid) for name, pid in pids.items()}
        dropped = fleet.drop(layers={"r0": range(half, LAYERS), "r1": range(half)})
        assert dropped.freed_bytes == sum(fleet.layer_bytes())
        asked = [Request(prompt, 60, ignore_eos=True) for prompt in prompts([200] * 16, VOCABULARY, seed=3)]
        for request in asked:
            fleet.submit(request, heard)

        def has_half(name: str) -> bool:
            """Whether keys and values have at least half of the pages that layers of the rank had."""
            used = sum(kv.used_bytes for kv in fleet.look(name).status.kv)
            return used >= free[name] + dropped.freed_bytes // 4

        wait_until(lambda: all(map(has_half, pids)), "keys and values need no dropped layer's pages")
        for name, pid in pids.items():
            assert weights[name] + free[name] >= BUDGET - 2 * PAGE
            assert resident(pid) <= BUDGET + 2 * PAGE
        heard.wait([request.id for request in asked])
        for request in asked[::5]:
            assert same_unless_close(small_model(), request.prompt, heard.tokens[request.id])
