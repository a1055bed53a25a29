"""What the control groups of this process leave it of the machine's memory: a container's limit is one of theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class _Version:
    """Where one version of control groups says what."""

    mount: str
    limit: str
    usage: str
    reclaimable: str
    """In `memory.stat`: file pages that the kernel drops before anything is out of memory."""


_V1 = _Version("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Version("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process's control group, and each above it that can be seen, still allow it; None: no limit.

    Args:
        root: where `proc` and `sys` are.
    """
    left = [
        bytes_left
        for version, group in _groups(root)
        for folder in (group, *group.parents)
        if folder.is_relative_to(root / version.mount) and (bytes_left := _left(folder, version)) is not None
    ]
    return min(left, default=None)


def _groups(root: Path) -> Iterator[tuple[_Version, Path]]:
    """Folders of this process's groups. A container may see its own at the mount, and its name as the host has it: then
    the folder is not there, and one above it is."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            version = _V2 if not controllers else _V1 if "memory" in controllers.split(",") else None
            if version is not None:
                yield version, root / version.mount / name.lstrip("/")


def _left(folder: Path, version: _Version) -> int | None:
    """What the limit of one group leaves; None where it has none: v2 says so in words, v1 by a huge number."""
    try:
        limit = (folder / version.limit).read_text().strip()
        if limit == "max":
            return None
        used = int((folder / version.usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return max(int(limit) - max(used - int(stat.get(version.reclaimable, 0)), 0), 0)
