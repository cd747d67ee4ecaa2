"""Memory of other ranks by NIXL, where its package is there; without it that is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.cluster.peers.hub import PeerHub
from elastic.cluster.peers.memory.reader import BUFFER_BYTES, buffers_full
from elastic.errors import BackendUnavailable
from support.child_process import in_fork


def test_without_the_package_it_is_said_which_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'elastic-llm\[nixl\]'"):
        PeerHub("a", b"a key of this test's own", bulk="nixl")


def test_nobody_imports_it_unasked() -> None:
    in_fork("import sys, elastic.cluster.peers.hub; assert not any(name.startswith('nixl') for name in sys.modules)")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_what_is_read_fills_buffers_in_order(pieces: list[tuple[int, int]]) -> None:
    full = BUFFER_BYTES // 4
    pieces = [(offset * full, nbytes * full + offset) for offset, nbytes in pieces]
    parts = list(buffers_full(pieces))
    sizes = [sum(nbytes for _, nbytes in part) for part in parts]
    assert all(size == BUFFER_BYTES for size in sizes[:-1])
    assert all(0 < size <= BUFFER_BYTES for size in sizes)
    assert joined([piece for part in parts for piece in part]) == joined(pieces)


def joined(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes in as few pieces as may be."""
    found: list[tuple[int, int]] = []
    for offset, nbytes in pieces:
        if nbytes and found and sum(found[-1]) == offset:
            found[-1] = found[-1][0], found[-1][1] + nbytes
        elif nbytes:
            found.append((offset, nbytes))
    return found


OWNER = """
import sys
import torch
from elastic.cluster.peers.hub import PeerHub
from elastic.memory.backends.memfd import MemfdBackend
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.pages.virtual_range import VirtualRange

pool = PagePool("cpu#a", MemfdBackend(65536), 9 << 20, ready_pages=0)
pages = VirtualRange(pool, 144)
pages.map(0, pool.allocate("test", 144))
pages.storage(0, 9 << 20, lambda: None).tensor(torch.int64).copy_(torch.arange(9 << 17))
hub = PeerHub("a", b"a key of this test's own", bulk="nixl")
hub.memory.serve([pool])
print("address", *hub.address, flush=True)  # NIXL writes there, too
sys.stdin.read()
"""
READER = """
import subprocess, sys
from contextlib import closing
import torch
from elastic.cluster.peers.hub import PeerHub
from elastic.errors import RankLost, StateError
from elastic.types import RankMemory

owner = subprocess.Popen([sys.executable, "-P", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
host, port = next(line for line in owner.stdout if line.startswith(b"address")).decode().split()[1:]
with closing(PeerHub("b", b"a key of this test's own", bulk="nixl")) as hub:
    hub.meet({"a": (host, int(port))})
    for _ in range(2):
        with closing(hub.open_memory(RankMemory("a", "cpu#a"))) as reader:
            found = torch.zeros(9 << 17, dtype=torch.int64)
            reader.read(found.data_ptr(), [(0, 8 << 20), (8 << 20, 1 << 20)])
            assert torch.equal(found, torch.arange(9 << 17))
            with closing(hub.open_memory(RankMemory("a", "cpu#a"))) as second:
                for one in (second, reader, second):
                    found.zero_()
                    one.read(found.data_ptr(), [(800, 8), (8, 16)])
                    assert found[:4].tolist() == [100, 1, 2, 0]
            try:
                reader.read(found.data_ptr(), [(9 << 20, 1)])
                raise SystemExit("it is not there")
            except StateError as error:
                assert "are not there" in str(error), error
    reader = hub.open_memory(RankMemory("a", "cpu#a"))
    owner.kill()
    owner.wait()
    try:
        reader.read(found.data_ptr(), [(0, 8 << 20)])
        raise SystemExit("it is not lost")
    except RankLost as error:
        assert error.rank == "a"
    knows = lambda: hub._agent._agent.check_remote_metadata(reader._remote)
    hub._others._idle.pop()[0].end()
    assert knows(), "there is another connection to it"
    reader.close()
    assert not knows(), "what has gone is kept"
print("all is well", flush=True)
"""


@pytest.mark.slow
def test_two_processes_read_each_other_by_it(tmp_path: Path) -> None:
    pytest.importorskip("nixl_cu12")
    (tmp_path / "owner.py").write_text(OWNER)
    done = subprocess.run(
        [sys.executable, "-P", "-c", READER, str(tmp_path / "owner.py")], capture_output=True, text=True, timeout=240
    )
    assert "all is well" in done.stdout, done.stderr
