"""What a GPU's driver does where its documentation is silent, and what the library therefore never relies on.

    python benchmarks/driver_answers.py --device cuda:0

Each question has a process of its own, because an answer may end it. `unmap several`: whether one `cuMemUnmap` takes
back what several calls of `cuMemMap` mapped, and what that saves. `unmap under a kernel`: whether `cuMemUnmap` waits
for a kernel that will read the page. `unregister under a copy`: whether `cuMemHostUnregister` waits for a copy from the
memory. Each is the call's code and milliseconds, beside those that the queued work takes, and what became of the work.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common import arguments, finish, table

from elastic.config import Place
from elastic.memory.pages.mapped_storage import MappedStorage
from elastic.memory.places import make_backend

PAGES, COPIED_BYTES, QUEUE_MS = 256, 1 << 30, 20.0


def timed(call: Callable[[], tuple[Any, ...]]) -> dict[str, Any]:
    """Return the code of a driver's call by name, and its milliseconds."""
    start = time.perf_counter()
    code = call()[0]
    return {"code": code.name, "ms": 1e3 * (time.perf_counter() - start)}


def outcome(right: Callable[[], bool]) -> str:
    """Wait for the device, and say whether what was queued is right."""
    try:
        torch.cuda.synchronize()
        return "right" if right() else "wrong"
    except Exception as error:  # an illegal address, after which the process is of no use
        return str(error).splitlines()[0]


def queue(device: str, quick: bool) -> float:
    """Queue products for some milliseconds; return about how many."""
    size = 64 if quick else 8192
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    for _ in range(2):  # the first one loads libraries
        start = time.perf_counter()
        x @ x
        torch.cuda.synchronize()
        took = 1e3 * (time.perf_counter() - start)
    count = 1 if quick else max(1, int(QUEUE_MS / took))
    for _ in range(count):
        x @ x
    return count * took


def unmap_several(device: str, quick: bool) -> dict[str, Any]:
    backend = make_backend(Place.parse(device))
    count, size = 4 if quick else PAGES, backend.page_bytes
    address = backend.reserve(count * size)
    backend.create(range(count))
    backend.map(address, range(count))
    one_by_one = time.perf_counter()
    backend.unmap(address, count)
    one_by_one = 1e3 * (time.perf_counter() - one_by_one)
    backend.map(address, range(count))
    at_once = timed(lambda: backend._cu.cuMemUnmap(address, count * size))
    return {**at_once, "pages": count, "one_by_one_ms": one_by_one}


def unmap_under_a_kernel(device: str, quick: bool) -> dict[str, Any]:
    backend = make_backend(Place.parse(device))
    address = backend.reserve(backend.page_bytes)
    backend.create([0])
    backend.map(address, [0])
    page = MappedStorage(address, backend.page_bytes, backend.device, lambda: None).tensor(torch.uint8)
    page.fill_(1)
    torch.cuda.synchronize()
    work_ms = queue(device, quick)
    total = page.sum()
    answer = timed(lambda: backend._cu.cuMemUnmap(address, backend.page_bytes))
    return {**answer, "work_ms": work_ms, "work": outcome(lambda: int(total) == backend.page_bytes)}


def unregister_under_a_copy(device: str, quick: bool) -> dict[str, Any]:
    from cuda.bindings import driver

    target = torch.zeros(1 << 20 if quick else COPIED_BYTES, dtype=torch.uint8, device=device)
    source = torch.ones(target.shape, dtype=torch.uint8)
    driver.cuMemHostRegister(source.data_ptr(), source.nbytes, driver.CU_MEMHOSTREGISTER_PORTABLE)
    torch.cuda.synchronize()
    start = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    work_ms = 1e3 * (time.perf_counter() - start)
    target.zero_()
    torch.cuda.synchronize()
    target.copy_(source, non_blocking=True)
    answer = timed(lambda: driver.cuMemHostUnregister(source.data_ptr()))
    return {**answer, "work_ms": work_ms, "work": outcome(lambda: bool(target.eq(1).all()))}


QUESTIONS: dict[str, Callable[[str, bool], dict[str, Any]]] = {
    "unmap several": unmap_several,
    "unmap under a kernel": unmap_under_a_kernel,
    "unregister under a copy": unregister_under_a_copy,
}


def ask(question: str, device: str, quick: bool) -> dict[str, Any]:
    """Have a process find an answer; how it ended is part of it."""
    command = [sys.executable, __file__, "--device", device, "--question", question, *(["--quick"] if quick else [])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    answers = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    found = json.loads(answers[-1]) if answers else {"said": ended.stderr.splitlines()[-1:]}
    return {"question": question, **found, "exit_code": ended.returncode}


def shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main() -> None:
    help_ = "for the benchmark itself"
    options = arguments(__doc__.splitlines()[0], question={"choices": QUESTIONS, "help": help_})
    if options.question:
        torch.cuda.set_device(options.device)
        print(json.dumps(QUESTIONS[options.question](options.device, options.quick)), flush=True)
        return
    answers = [ask(question, options.device, options.quick) for question in QUESTIONS]
    keys = ("question", "code", "ms", "one_by_one_ms", "work_ms", "work", "exit_code")
    table(list(keys), [[shown(answer.get(key, "")) for key in keys] for answer in answers])
    finish("driver_answers", options.device, answers)


if __name__ == "__main__":
    main()
