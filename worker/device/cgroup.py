"""The share of the machine that control groups allow this process. A container is in a control group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def available_bytes(root: Path = _ROOT) -> int | None:
    """Bytes that the limits of this process's control group, and of groups above it, still allow. None if unlimited.

    Args:
        root: directory that contains `proc` and `sys`.
    """
    left = [_bytes_left(folder, is_v2=is_v2) for is_v2, folder in _folders(root, "memory")]
    return min((it for it in left if it is not None), default=None)


def available_cores(root: Path = _ROOT) -> float | None:
    """CPU cores that this process's control groups allow. None if unlimited. `root` is as for `available_bytes`."""
    quotas = [_cores(folder, is_v2=is_v2) for is_v2, folder in _folders(root, "cpu")]
    return min((it for it in quotas if it is not None), default=None)


def _folders(root: Path, controller: str) -> Iterator[tuple[bool, Path]]:
    """Yields, for this process's control groups and all above them, whether a group is of version 2, and its folder.

    In a container, the mount may begin at the container's own group, while /proc names the group as the host does. Then
    only some folders above that name exist.
    """
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            mount = root / "sys/fs/cgroup" / controllers
            group = mount / name.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(mount):
                    yield not controllers, folder


def _bytes_left(folder: Path, *, is_v2: bool) -> int | None:
    """Bytes that the limit of one group leaves. None if unlimited: "max" in v2, a huge number in v1."""
    limit_name, usage, reclaimable = (
        ("memory.max", "memory.current", "inactive_file")
        if is_v2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return None
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    # File pages that the kernel drops before it runs out of memory count as free.
    return max(int(limit) - max(used - int(stat.get(reclaimable, 0)), 0), 0)


def _cores(folder: Path, *, is_v2: bool) -> float | None:
    """The quota of one group over its period, in cores. None without a quota, which v2 reports as "max" and v1 as
    -1."""
    try:
        if is_v2:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{what}_us").read_text().strip() for what in ("quota", "period"))
    except OSError:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
