"""The examples run as they stand, each in a process of its own, and print what they promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.child_process import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMISES = {
    "fleet": (
        r"ranks: r0 \(serving\), r1 \(serving\)",
        r"dropped: [1-9][\d,]+ bytes of weights make room for KV, [1-9]\d* layers moved",
        r"restored: [1-9][\d,]+ bytes of weights came back",
        r"in two stages and back, the text is the same: True",
        r"moved from r\d to r\d: [1-9][\d,]+ bytes of KV while it generated",
        r"the rank was killed, and the text is the same: True",
        r"lost: 1 requests",
    ),
    "long_prompt": (
        r"tokens that fit one process: \d+; two that share their layers: [\d,]+",
        r"a prompt of \d+ tokens had its answer: 20 tokens",
        r"the short one beside it has the text that it has by itself: True",
        r"resharded: r\d,r\d; [1-9][\d,]+ bytes of KV copied",
        r"parted: r\d,r\d",
    ),
    "manual_control": (
        r"would: Swap\(layers=\(10, 11\), variant='int4', parts=\(\)\): applied, moves [\d,]+ bytes, frees [1-9]",
        r"two layers to int4: applied, [1-9][\d,]+ bytes freed",
        r"one on to int8: applied, -[\d,]+ bytes freed",
        r"has to wait for the generation: deferred",
        r"the full weights: applied, -[\d,]+ bytes freed",
        r"went on to its end: 12\d pieces",
        r"Restore\(.*\): applied; prepared in \d",
    ),
    "own_policy": (
        r"Swap\(layers=\(6, 7, 8, 9, 10, 11\), variant='int8', parts=\(\)\): applied, because the KV cache is in use",
        r"Restore\(layers=\(6, 7, 8, 9, 10, 11\), parts=\(\), shards=\(\)\): applied, because the KV cache is empty",
        r"Health\(running=True, ticks=[1-9].*actions=2, faults=\(\)",
    ),
    "pipeline": (r"in full  '.+'\n  in int8  '.+'", r"[1-9]\.\d\d MiB of layers in int8; restored: True"),
    "quickstart": (
        r"^class Reader:\n    def read\(self",
        r"layers \(8, 9, 10, 11\) are int4: [1-9]\.\d\d MiB more",
        r"the text is the first one again: True",
    ),
}
HAVE_RANKS = {"fleet", "long_prompt"}
NEED_A_SERVER = {"fastapi_server"}
"""Run by the server's tests."""


def test_every_example_is_run() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} - NEED_A_SERVER == set(PROMISES)


@pytest.mark.parametrize("name", PROMISES)
def test_an_example_prints_what_it_promises(name: str) -> None:
    said = run_script(EXAMPLES / f"{name}.py", with_ranks=name in HAVE_RANKS)
    for promise in PROMISES[name]:
        assert re.search(promise, said, re.MULTILINE), f"{promise!r} is not in:\n{said}"
