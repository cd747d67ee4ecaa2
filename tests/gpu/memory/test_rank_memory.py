"""Ranks on GPUs of one host read each other's memory from device to device, of one process or of two."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import pytest
import torch

from elastic.cluster.control.status import Wire
from elastic.cluster.peers.hub import PeerHub
from elastic.cluster.peers.memory import device as devices
from elastic.cluster.peers.memory.device import DeviceBuffer
from elastic.cluster.peers.memory.reader import BUFFER_BYTES
from elastic.errors import RankLost, StateError
from elastic.memory.backends.cuda import CudaBackend
from elastic.memory.backends.peers import can_access
from elastic.memory.backends.rank_memory import MemoryReader, Pieces, read_into, staging
from elastic.memory.backends.streams import new_stream, on_stream
from elastic.memory.pages.page_pool import PagePool
from elastic.memory.pages.virtual_range import VirtualRange
from elastic.types import RankMemory

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("no_violations")]
TWO_DEVICES = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="there is one CUDA device")
READERS = pytest.mark.parametrize("reader", ["cuda:0", pytest.param("cuda:1", marks=TWO_DEVICES)])
KEY, MEMORY, PAGES = b"a key of this test's own", RankMemory("a", "cuda:0#a"), 4
NOT_SUPPORTED = 801


class Place:
    """A place of four pages on the first device, in any order."""

    def __init__(self, stack: ExitStack) -> None:
        self.pool = PagePool(MEMORY.place, CudaBackend(torch.device("cuda:0")), 32 << 20, ready_pages=0)
        self.range = VirtualRange(self.pool, PAGES)
        self.range.map(0, self.pool.allocate("test", PAGES)[::-1])
        self.nbytes = PAGES * self.pool.page_bytes
        stack.callback(self.pool.close)
        stack.callback(self.give_up)

    def write(self, seed: int) -> torch.Tensor:
        """Queue writes to all pages, beside the default stream; return what the place has then, [bytes]."""
        content = torch.randint(256, (self.nbytes,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
        with on_stream(new_stream(self.pool.device)):
            shown = self.range.storage(0, self.nbytes, lambda: None).tensor(torch.uint8)
            shown.copy_(content.pin_memory(), non_blocking=True)
        return content.view(PAGES, -1)[self._order].flatten()

    def give_up(self) -> None:
        """Free all pages and give them back to the device."""
        torch.cuda.synchronize()
        if self.range.slots:
            self.pool.free(self.range.unmap(0, PAGES))
            self.pool.trim()
            self.range.close()

    @property
    def _order(self) -> list[int]:
        return [slot for slot, _ in sorted(self.range.slots.items(), key=lambda item: item[1])]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def place(stack: ExitStack) -> Place:
    return Place(stack)


@pytest.fixture
def hubs(stack: ExitStack, place: Place) -> tuple[PeerHub, PeerHub]:
    a, b = (stack.enter_context(closing(PeerHub(name, KEY))) for name in "ab")
    b.meet({"a": a.address})
    a.memory.serve([place.pool])
    return a, b


def expected(content: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    return torch.cat([content[offset : offset + count] for offset, count in pieces])


def read(reader: MemoryReader, device: str, pieces: Pieces) -> torch.Tensor:
    """What comes to a device, as the next one to use it sees it on a stream of its own, [bytes]."""
    target = torch.full((sum(count for _, count in pieces),), 7, dtype=torch.uint8, device=device)
    read_into(reader, target, pieces)
    with on_stream(new_stream(target.device)):
        return target.cpu()


def reachable(device: str) -> bool:
    return device == "cuda:0" or can_access(1, 0)


def host_bytes(simulator: ModuleType | None) -> int:
    """Return the bytes that were copied between host memory and a device; of a real one nobody has counted them."""
    return simulator.count("host_bytes") if simulator else 0


PIECES = ([(0, 8 << 20)], [(5, 3)], [((2 << 20) - 1, 2), (0, 7), (3 << 20, BUFFER_BYTES + 1)])


@READERS
def test_bytes_come_from_device_to_device(
    reader: str, place: Place, hubs: tuple[PeerHub, PeerHub], no_violations: ModuleType | None
) -> None:
    """The content is written by work that is still queued, and the target is used on another stream at once.

    Devices without access to each other's memory have it by way of host memory.
    """
    asked = 0
    with closing(hubs[1].open_memory(MEMORY, torch.device(reader))) as opened:
        for turn, pieces in enumerate(PIECES):
            content = place.write(turn)
            before = host_bytes(no_violations)
            target = torch.full((sum(count for _, count in pieces),), 7, dtype=torch.uint8, device=reader)
            with ThreadPoolExecutor(1) as thread:  # which has used no device yet
                thread.submit(read_into, opened, target, pieces).result()
            passed_host = host_bytes(no_violations) - before
            with on_stream(new_stream(target.device)):
                assert torch.equal(target.cpu(), expected(content, pieces))
            asked += target.nbytes
            assert no_violations is None or passed_host == (0 if reachable(reader) else 2 * target.nbytes)
    (wire,) = hubs[1].wires.read()
    assert wire == (Wire("a", copied_bytes=asked) if reachable(reader) else Wire("a", read_bytes=asked))
    place.pool.check()


def test_what_goes_to_host_memory_has_a_connection_of_its_own(place: Place, hubs: tuple[PeerHub, PeerHub]) -> None:
    """Each is kept for the next reader to the same device."""
    content, device = place.write(0), torch.device("cuda:0")
    direct, by_host = hubs[1].open_memory(MEMORY, device), hubs[1].open_memory(MEMORY)
    assert (direct.device, by_host.device) == (device, torch.device("cpu"))
    for opened in (direct, by_host):
        opened.close()
    assert hubs[1].open_memory(MEMORY) is by_host
    assert hubs[1].open_memory(MEMORY, device) is direct
    assert torch.equal(read(by_host, "cuda:0", [(3, 9)]), content[3:12])
    for opened in (direct, by_host):
        opened.close()


@READERS
def test_what_is_not_there_is_said_and_the_next_question_answered(
    reader: str, place: Place, hubs: tuple[PeerHub, PeerHub]
) -> None:
    content = place.write(0)
    with closing(hubs[1].open_memory(MEMORY, torch.device(reader))) as opened:
        for pieces in ([(place.nbytes - 1, 2)], [(0, 1), (-1, 1)]):
            with pytest.raises(StateError, match="are not in use any more") as error:
                read(opened, reader, pieces)
            assert not isinstance(error.value, RankLost)
            assert torch.equal(read(opened, reader, [(1, 9)]), content[1:10])


@READERS
def test_pages_that_another_rank_has_read_are_given_back_at_once(
    reader: str, place: Place, hubs: tuple[PeerHub, PeerHub]
) -> None:
    place.write(0)
    with closing(hubs[1].open_memory(MEMORY, torch.device(reader))) as opened:
        read(opened, reader, [(0, place.nbytes)])
        free = torch.cuda.mem_get_info(0)[0]
        place.give_up()
        assert torch.cuda.mem_get_info(0)[0] == free + place.nbytes
        with pytest.raises(StateError, match="are not in use any more"):
            read(opened, reader, [(0, 1)])


def test_a_buffer_is_there_as_long_as_the_connection(place: Place, hubs: tuple[PeerHub, PeerHub]) -> None:
    """And lasts until both ends have let go of it."""
    place.write(0)
    kept = torch.zeros(9, dtype=torch.uint8, device="cuda:0")  # beside it torch has room for more
    free = torch.cuda.mem_get_info(0)[0]
    for _ in range(2):
        with closing(hubs[1].open_memory(MEMORY, torch.device("cuda:0"))) as opened:
            read(opened, "cuda:0", [(0, 9)])
        assert torch.cuda.mem_get_info(0)[0] == free - BUFFER_BYTES
    hubs[0].close()
    assert torch.cuda.mem_get_info(0)[0] == free - BUFFER_BYTES  # one end has it still
    hubs[1].close()
    assert torch.cuda.mem_get_info(0)[0] == free
    assert int(kept.sum()) == 0
    assert devices._buffers == {}


def test_only_what_is_to_be_coordinated_waits_for_what_the_rank_does(
    place: Place, hubs: tuple[PeerHub, PeerHub]
) -> None:
    a, b = hubs
    sent: list[int] = []

    @contextmanager
    def copying(nbytes: int) -> Iterator[None]:
        sent.append(nbytes)
        yield

    a.memory.serve([place.pool], copying)
    for coordinated in (True, False, True):  # on one connection
        with closing(b.open_memory(MEMORY, torch.device("cuda:0"), coordinated=coordinated)) as opened:
            read(opened, "cuda:0", [(0, BUFFER_BYTES), (9, 2)])
    assert sent == [BUFFER_BYTES, 2] * 2


def test_who_reads_is_told_at_once_that_the_rank_was_lost(place: Place, hubs: tuple[PeerHub, PeerHub]) -> None:
    a, b = hubs
    asked, go_on = threading.Event(), threading.Event()

    @contextmanager
    def hang(nbytes: int) -> Iterator[None]:
        asked.set()
        assert go_on.wait(60)
        yield

    a.memory.serve([place.pool], hang)
    opened = b.open_memory(MEMORY, torch.device("cuda:0"), coordinated=True)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(read, opened, "cuda:0", [(0, 9)])
        assert asked.wait(60)
        b.lost("a")
        with pytest.raises(RankLost):
            waiting.result(60)
        go_on.set()
    opened.close()


def test_without_room_for_a_buffer_bytes_come_by_way_of_host_memory(
    place: Place, hubs: tuple[PeerHub, PeerHub], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    content = place.write(0)

    def refuse(backend: CudaBackend, pages: Any) -> None:
        raise StateError("the CUDA driver refused cuMemCreate")

    monkeypatch.setattr(CudaBackend, "create", refuse)
    with caplog.at_level("INFO"), closing(hubs[1].open_memory(MEMORY, torch.device("cuda:0"))) as opened:
        assert torch.equal(read(opened, "cuda:0", [(0, place.nbytes)]), content)
    assert hubs[1].wires.read() == (Wire("a", read_bytes=place.nbytes),)
    assert "goes to other ranks by way of host memory: the CUDA driver refused cuMemCreate" in caplog.text
    assert "comes by way of host memory" in caplog.text


def test_without_room_beside_the_pages_they_pass_page_locked_memory(
    place: Place, hubs: tuple[PeerHub, PeerHub], monkeypatch: pytest.MonkeyPatch
) -> None:
    content, empty, device = place.write(0), torch.empty, torch.device("cuda:0")

    def full(*size: int, **options: Any) -> torch.Tensor:
        if "device" in options:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*size, **options)

    with closing(hubs[1].open_memory(MEMORY, device)) as opened:
        assert staging(opened, 9, device).device == device
        monkeypatch.setattr(torch, "empty", full)
        staged = staging(opened, place.nbytes, device)
        assert staged.is_pinned()
        opened.read(staged.data_ptr(), [(0, place.nbytes)])
        assert torch.equal(staged, content)


def test_a_descriptor_is_given_for_the_secret_alone(stack: ExitStack, place: Place) -> None:
    ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
    offering = stack.enter_context(ThreadPoolExecutor(1)).submit(devices.offer, place.pool, theirs)
    _, address, name, secret, _ = devices._OFFER.unpack(ours.recv(devices._OFFER.size, socket.MSG_WAITALL))
    ours.sendall(devices._IMPORTS)
    for said in (b"x" * len(secret), b"", secret):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(b"\0" + name)
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        assert len(descriptors) == (said == secret)
    os.close(descriptors[0])
    ours.sendall(devices._COPIES)
    buffer = offering.result(60)
    assert isinstance(buffer, DeviceBuffer)
    assert buffer.address == address
    buffer.close()


# -- between processes

OWNER = """
    import sys
    from contextlib import ExitStack, contextmanager
    sys.path[:0] = {paths!r}
    import torch
    from elastic.cluster.peers.hub import PeerHub
    from gpu import simulator
    from gpu.memory.test_rank_memory import KEY, Place

    place, hub = Place(ExitStack()), PeerHub("a", KEY)

    @contextmanager
    def copying(nbytes):
        print("asked", flush=True)
        sys.stdin.readline()
        yield

    hub.memory.serve([place.pool], copying)
    {prepare}
    print(*hub.address, flush=True)
    for line in sys.stdin:
        if line.startswith("write"):
            place.write(int(line.split()[1]))
        elif line.startswith("end"):
            hub.close()
            place.give_up()
            break
        print("done", flush=True)
"""


class Owner:
    """A rank in a process of its own, and what it is told."""

    def __init__(self, stack: ExitStack, log: Path, prepare: str = "") -> None:
        code = textwrap.dedent(OWNER).format(paths=[str(Path(__file__).parents[2])], prepare=prepare)
        environment = {**os.environ, "SIMCUDA_LOG": str(log)}
        self.process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
        )
        stack.callback(self.process.kill)
        host, port = self.hear().split()
        self.hub = stack.enter_context(closing(PeerHub("b", KEY)))
        self.hub.meet({"a": (host, int(port))})

    def hear(self) -> str:
        return pipe(self.process.stdout).readline().decode()

    def say(self, line: str) -> None:
        pipe(self.process.stdin).write(line.encode() + b"\n")
        pipe(self.process.stdin).flush()


def pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None
    return end


def content_of(seed: int) -> torch.Tensor:
    """What an owner has when it has written so; its pages lie in the opposite order."""
    content = torch.randint(256, (PAGES * (2 << 20),), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    return content.view(PAGES, -1).flip(0).flatten()


REFUSED = f'simulator.fail("cuMemExportToShareableHandle", code={NOT_SUPPORTED})'


@pytest.mark.slow
@READERS
@pytest.mark.parametrize("refused", ["", "export", "import"])
def test_bytes_come_from_a_device_of_another_process(
    reader: str, refused: str, stack: ExitStack, tmp_path: Path, no_violations: ModuleType | None
) -> None:
    """By way of host memory, where a driver hands no memory over."""
    if refused and no_violations is None:
        pytest.skip("the driver is not simulated")
    log = tmp_path / "violations"
    owner = Owner(stack, log, REFUSED if refused == "export" else "")
    if refused == "import" and no_violations:
        no_violations.fail("cuMemImportFromShareableHandle", code=NOT_SUPPORTED)
    direct, asked = reachable(reader) and not refused, 0
    with closing(owner.hub.open_memory(MEMORY, torch.device(reader))) as opened:
        for turn, pieces in enumerate(PIECES):
            owner.say(f"write {turn}")
            assert owner.hear() == "done\n"
            before = host_bytes(no_violations)
            target = torch.full((sum(count for _, count in pieces),), 7, dtype=torch.uint8, device=reader)
            read_into(opened, target, pieces)
            assert no_violations is None or host_bytes(no_violations) - before == (0 if direct else target.nbytes)
            with on_stream(new_stream(target.device)):
                assert torch.equal(target.cpu(), expected(content_of(turn), pieces))
            asked += target.nbytes
    (wire,) = owner.hub.wires.read()
    assert wire == (Wire("a", copied_bytes=asked) if direct else Wire("a", read_bytes=asked))
    owner.hub.close()
    owner.say("end")
    assert owner.process.wait(60) == 0
    assert not log.exists(), log.read_text()


@pytest.mark.slow
def test_a_killed_rank_is_lost_at_once(stack: ExitStack, tmp_path: Path) -> None:
    """It is killed while it has an answer to give; its buffer is mapped here until the reader is closed."""
    owner = Owner(stack, tmp_path / "violations")
    opened = owner.hub.open_memory(MEMORY, torch.device("cuda:0"), coordinated=True)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(read, opened, "cuda:0", [(0, 9)])
        assert owner.hear() == "asked\n"
        owner.process.kill()
        with pytest.raises(RankLost):
            waiting.result(60)
    with pytest.raises(RankLost):
        read(opened, "cuda:0", [(0, 9)])
    opened.close()
