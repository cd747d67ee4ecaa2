"""Threads that computed beside a model, or before it was served, are given back: they would slow its products down."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from elastic import openmp

torch.get_num_threads()  # loads its runtime, if nothing did before
pytestmark = pytest.mark.skipif(
    "libgomp" not in Path("/proc/self/maps").read_text(), reason="this torch has another runtime of OpenMP"
)

COUNTING = """
import os, sys, threading, time
import torch
from elastic.openmp import release_threads

torch.set_num_threads(3)

def native():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

def compute():
    return torch.ones(1 << 20).mul_(2)

def expect(count, what, least=None):
    deadline = time.monotonic() + 30
    while not (count if least is None else least) <= native() <= count:
        assert time.monotonic() < deadline, (what, native(), count)
        time.sleep(0.01)

alone = native()
"""
GIVEN_BACK = """
release_threads()  # of none
compute()
expect(alone + 2, "computing")
release_threads()
expect(alone, "given back")
assert compute().sum() == 2 << 20  # makes new ones
expect(alone + 2, "computing again")
release_threads()
expect(alone, "given back again")
"""
BESIDE = """
from elastic.memory.pages.background import janitor
from elastic.memory.copy_engine import ThreadCopyEngine

done, seen = threading.Event(), []
janitor.start()
janitor.submit(lambda: (compute(), seen.append(native())))
janitor.submit(done.set)
done.wait()
assert seen == [alone + 2], seen
expect(alone, "the janitor")
copies, pairs = ThreadCopyEngine(), [(torch.empty(1 << 20), torch.ones(1 << 20))]
release_threads()
copies.start(pairs).finish()
expect(alone, "copies")
copies.close()
"""
SERVED = """
import elastic
from elastic.engines.base import Request
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)
model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
elastic.wrap(model, places="cpu=256MiB")
compute()
expect(alone + 2, "whoever wraps")
engine = elastic.ContinuousEngine(model)
engine.start()
for before in (lambda: None, compute):  # the user computes in between
    before()
    ended = threading.Event()
    engine.submit(Request(tuple(range(64)), 8), lambda output: output.finish and ended.set())
    ended.wait(60)
    expect(alone + 2, "the engine alone", least=0)  # however many its products take on this processor
model.elastic.release(0)
model.elastic.restore()
expect(alone + 2, "the engine alone, after actions", least=0)
engine.stop()
elastic.unwrap(model)
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [GIVEN_BACK, BESIDE, SERVED], ids=["given back", "beside", "served"])
def test_threads_that_computed_are_given_back(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", COUNTING + textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_runtime_of_torch_is_found() -> None:
    """Else nothing is ever given back."""
    assert openmp._pause().__name__ == "omp_pause_resource_all"


def mkl_threads(otherwise: int) -> int:
    """Return the threads that MKL computes with here; where torch has none, those of torch."""
    ask = getattr(openmp._library(), "MKL_Get_Max_Threads", None)
    return ask() if ask is not None else min(otherwise, torch.get_num_threads())


def test_a_thread_computes_alone_for_a_while_and_others_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(1) as others:
            others.submit(torch.set_num_threads, 3).result()
            with openmp.single_thread():
                assert torch.get_num_threads() == mkl_threads(3) == 1
                assert others.submit(torch.get_num_threads).result() == 3
                with pytest.raises(RuntimeError, match="stop"), openmp.single_thread():
                    raise RuntimeError("stop")
                assert mkl_threads(3) == 1
        assert torch.get_num_threads() == mkl_threads(3) == 3
    finally:
        torch.set_num_threads(before)
