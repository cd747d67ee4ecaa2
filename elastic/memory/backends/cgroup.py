"""The memory that this process may have: a container's bound is often far below what the machine has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

GROUPS, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def memory_limit(groups: Path = GROUPS, mount: Path = MOUNT) -> int | None:
    """Return the lowest bound in bytes of the control groups that this process is in; None where there is none.

    `groups` lists them, `mount` is where their hierarchy is: one for all (version 2), or one for memory (version 1).
    Inside a container a group may be listed by a path that only its host has: the root is the container's then.
    """
    return min((limit for limit, _ in _limits(groups, mount)), default=None)


def memory_left(groups: Path = GROUPS, mount: Path = MOUNT) -> int | None:
    """Return the bytes that are left below the bounds of the control groups; see `memory_limit`.

    What a group has in pages of files that nobody uses now counts as free: the system gives it up.
    """
    return min((max(0, limit - _used(files)) for limit, files in _limits(groups, mount)), default=None)


def _limits(groups: Path, mount: Path) -> Iterator[tuple[int, _Files]]:
    """Yield the bounds that there are."""
    for files in _files(groups, mount):
        with suppress(OSError, ValueError):  # absent, or "max"
            yield int(files.limit.read_text()), files


def _used(files: _Files) -> int:
    used = unused = 0
    with suppress(OSError, ValueError, KeyError):  # what cannot be read is not known
        used = int(files.usage.read_text())
        unused = int(dict(map(str.split, files.counts.read_text().splitlines()))[files.inactive])
    return used - unused


class _Files(NamedTuple):
    """Of one group."""

    limit: Path
    usage: Path
    counts: Path
    inactive: str
    """The count of bytes in pages of files that are not in use."""


def _files(groups: Path, mount: Path) -> Iterator[_Files]:
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            top, names = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        elif number == "0":
            top, names = mount, ("memory.max", "memory.current", "inactive_file")
        else:
            continue
        group, (limit, usage, inactive) = top / path.lstrip("/"), names
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                yield _Files(folder / limit, folder / usage, folder / "memory.stat", inactive)
