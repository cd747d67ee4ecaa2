"""A tensor over our pages keeps them alive, whoever holds it (law 8)."""

from __future__ import annotations

import copy
import io
import threading

import torch

from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.pages.virtual_range import VirtualRange

PAGE = 4096


def test_the_last_view_tells() -> None:
    pool = PagePool("cpu#test", MemfdBackend(PAGE), 8 * PAGE, ready_pages=0)
    range_ = VirtualRange(pool, 4)
    range_.map(0, pool.allocate("kv", 2))
    dead: list[int] = []
    span = range_.storage(0, 2 * PAGE, lambda: dead.append(1))
    whole = span.tensor(torch.float32)
    with torch.inference_mode():
        view = whole.view(2, -1)[1][3:9]
    array = view.numpy()
    span.drop()
    del whole, view
    assert span.alive
    assert not dead
    del array
    assert not span.alive
    assert dead == [1]
    range_.close()
    pool.close()


def test_copies_take_their_own_bytes_only() -> None:
    pool = PagePool("cpu#test", MemfdBackend(PAGE), 8 * PAGE, ready_pages=0)
    range_ = VirtualRange(pool, 1 << 20)
    range_.map(5, pool.allocate("kv", 1))
    tensor = range_.storage(5, PAGE, lambda: None).tensor(torch.float32)
    tensor.fill_(3)
    assert copy.deepcopy(tensor).untyped_storage().nbytes() == PAGE
    file = io.BytesIO()
    torch.save(tensor, file)
    assert file.tell() < 3 * PAGE
    range_.close()
    pool.close()


def test_a_view_dying_in_any_thread_is_noticed() -> None:
    pool = PagePool("cpu#test", MemfdBackend(PAGE), 64 * PAGE, ready_pages=0)
    range_ = VirtualRange(pool, 64)
    range_.map(0, pool.allocate("kv", 64))
    dead: list[int] = []
    spans = [range_.storage(i, PAGE, lambda: dead.append(1)) for i in range(64)]
    views = [span.tensor(torch.uint8)[:8] for span in spans]
    for span in spans:
        span.drop()
    del span
    parts = [views[i::4] for i in range(4)]
    views.clear()
    threads = [threading.Thread(target=part.clear) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(dead) == 64
    range_.close()
    pool.close()
