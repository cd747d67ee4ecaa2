"""The suite's own trap: memory comes to whoever gets it full of NaN, in the tests and in their children."""

from __future__ import annotations

import textwrap
from importlib import import_module

import poison
import pytest

from support.child_process import in_child

TRAP = """
    import torch
    from elastic.kvcache.storage.layout import HEAD_MAJOR, StoreGeometry
    from elastic.kvcache.storage.pool import KVPool
    from elastic.memory.backends.memfd import MemfdBackend
    from elastic.memory.pages.page_pool import PagePool

    class User:
        pass

    kv, user = KVPool(PagePool("cpu#trap", MemfdBackend(4096), 16 * 4096), 16 * 4096), User()
    shape = StoreGeometry(HEAD_MAJOR, 1, 1, 32, torch.float32, 64, 4096)
    fresh = kv.lease(shape, shape, user)
    fresh.hold(0, 8)
    for tensor in fresh.views(0, 8):
        assert tensor.isnan().all()
        tensor.zero_()
    del tensor, user
    user = User()
    adopted = kv.lease(shape, shape, user)
    assert adopted.store is fresh.store
    adopted.hold(0, 8)
    assert all(tensor.isnan().all() for tensor in adopted.views(0, 8))
"""


@pytest.mark.slow
def test_new_pages_and_adopted_stores_are_full_of_nan_here_and_in_children() -> None:
    exec(textwrap.dedent(TRAP), {})
    in_child(TRAP)


def test_every_module_that_hands_out_memory_is_still_where_it_is_looked_for() -> None:
    """A module that moved would be left as it is, and nothing would say so."""
    for name in poison.CHANGES:
        classes = [member for member in vars(import_module(name)).values() if isinstance(member, type)]
        assert any(hasattr(method, "__wrapped__") for cls in classes for method in vars(cls).values()), name
