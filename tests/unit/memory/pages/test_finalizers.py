"""Calls when objects die: once, from any thread, and neither made nor missed as the interpreter ends."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

from elastic.memory.pages import finalizers
from elastic.memory.pages.finalizers import call_at_death, cancel
from support.child_process import in_fork

AT_EXIT = """
import tempfile, threading, weakref
import torch, elastic
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None)).eval()
elastic.wrap(model, places=elastic.Place("cpu", torch.device("cpu"), 64 << 20, page_bytes=4096))
cache, token = elastic.ElasticCache(model), torch.ones(1, 4, 1, 8)
go, done = threading.Event(), threading.Event()

def append():
    go.wait()
    cache.update(token, token, 0)
    done.set()

class Walked:
    # while the interpreter asks this entry at its end, the thread fills a cache
    index, func, args, kwargs = 0, print, (), None
    weakref = staticmethod(lambda: None)

    @property
    def atexit(self):
        go.set()
        assert done.wait(60)
        return False

threading.Thread(target=append, daemon=True).start()
folder = tempfile.TemporaryDirectory()
weakref.finalize._registry[object()] = Walked()
print(folder.name)
"""


class Thing(dict[str, object]):
    """It has no hash, as some caches."""


def test_a_call_is_made_once_and_leaves_nothing() -> None:
    before, calls = len(finalizers._calls), []
    things = [Thing() for _ in range(3)]
    for number, thing in enumerate(things):
        thing["itself"] = thing
        call_at_death(thing, calls.append, number)
    del thing
    things.pop(1)
    gc.collect()
    assert calls == [1]
    things.clear()
    gc.collect()
    assert (sorted(calls), len(finalizers._calls)) == ([0, 1, 2], before)


def test_a_cancelled_one_makes_no_call_and_holds_nothing() -> None:
    thing, held, calls = Thing(), Thing(), []
    seen = weakref.ref(held)
    reference = call_at_death(thing, calls.append, held)
    del held
    assert seen() is not None
    cancel(reference)
    assert seen() is None
    cancel(reference)
    del thing
    assert calls == []


def test_threads_make_and_lose_them_together() -> None:
    before, calls = len(finalizers._calls), []

    def work() -> None:
        for number in range(500):
            call_at_death(Thing(), calls.append, number)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(calls), len(finalizers._calls)) == (2000, before)


def test_a_cache_that_is_filled_as_the_interpreter_ends_spoils_the_end_of_nobody() -> None:
    folder = in_fork(AT_EXIT)
    assert not Path(folder.strip()).exists()


def test_the_end_of_the_interpreter_makes_no_call() -> None:
    code = """
        from elastic.memory.pages.finalizers import call_at_death
        class Thing: pass
        kept, gone = Thing(), Thing()
        call_at_death(kept, print, "kept")
        call_at_death(gone, print, "gone")
        del gone
    """
    assert in_fork(code) == "gone\n"
