"""Memory that this process may use: the machine's, or less where a container or a batch job is limited.

psutil sees the machine. Containers run in a control group (cgroup) with a limit of its own, and so may any group above it;
a process that goes beyond one of them is killed.

    /proc/self/cgroup      0::/pod/run                 the group of this process
    /proc/self/mountinfo   … /pod /sys/fs/cgroup …     where the tree of groups is mounted, and from which group on
    /sys/fs/cgroup/run     memory.max  memory.current  read for this group and for each one above it

Source: the kernel's admin guide, cgroup-v2.rst and cgroup-v1/memory.rst. Imports no torch: the doctor works without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil


@dataclass(frozen=True)
class HostMemory:
    """total: bytes that this process may use at most. available: bytes that are free now."""

    total: int
    available: int


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The smallest of what the machine and its control groups allow. root: where /proc and /sys are; tests have others."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for group in control_groups(root):
        limit = first_number(group, "memory.max", "memory.limit_in_bytes")
        used = first_number(group, "memory.current", "memory.usage_in_bytes")
        if limit is None or used is None:
            continue
        total = min(total, limit)
        available = min(available, limit - max(0, used - idle_file_cache(group)))
    return HostMemory(total, max(0, available))


def control_groups(root: Path) -> Iterator[Path]:
    """Folders of the groups that limit this process, the innermost first; none where the system has no such groups."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:  # macOS, Windows
        return
    paths: dict[str, str] = {}
    for _, controllers, path in (line.split(":", 2) for line in groups):
        paths.update(dict.fromkeys(controllers.split(","), path))
    for line in mounts:
        place, _, kind = line.partition(" - ")
        top, mount_point = place.split()[3:5]
        kind, _, options = kind.split()[:3]
        controller = {"cgroup2": "", "cgroup": "memory"}.get(kind)
        if controller in paths and (kind == "cgroup2" or "memory" in options.split(",")):
            yield from up_to_mount(root / mount_point.lstrip("/"), top, paths[controller])


def up_to_mount(mount: Path, top: str, path: str) -> Iterator[Path]:
    """The group at `path` and those above it, as far as they are mounted. top: the group that is mounted at `mount`."""
    group = PurePosixPath(path)
    inside = group.relative_to(top) if group.is_relative_to(top) and ".." not in group.parts else PurePosixPath()
    yield from (mount / step for step in (inside, *inside.parents))


def first_number(group: Path, *names: str) -> int | None:
    """The number in the first of the group's files that has one: version 2 writes "max" for no limit."""
    for name in names:
        try:
            return int((group / name).read_text())
        except (OSError, ValueError):
            pass
    return None


def idle_file_cache(group: Path) -> int:
    """Bytes of file cache that the group is charged for, and that the kernel drops before it kills."""
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)
    except (OSError, ValueError):
        return 0
