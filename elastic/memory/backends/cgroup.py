"""The memory that this process may have: a container's bound is often far below what the machine has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def memory_limit(groups: Path = GROUPS, mount: Path = MOUNT) -> int | None:
    """Return the lowest bound in bytes of the control groups that this process is in; None where there is none.

    `groups` lists them, `mount` is where their hierarchy is: one for all (version 2), or one for memory (version 1).
    Inside a container a group may be listed by a path that only its host has: the root is the container's then.
    """
    limits = []
    for file in _files(groups, mount):
        with suppress(OSError, ValueError):  # absent, or "max"
            limits.append(int(file.read_text()))
    return min(limits, default=None)


def _files(groups: Path, mount: Path) -> Iterator[Path]:
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            top, name = mount / "memory", "memory.limit_in_bytes"
        elif number == "0":
            top, name = mount, "memory.max"
        else:
            continue
        group = top / path.lstrip("/")
        yield from (folder / name for folder in (group, *group.parents) if folder.is_relative_to(top))
