"""The host memory that this process may still use, asked before it is promised to pages.

Host pools are touched lazily, so a pool that does not fit would not fail when it is made: the kernel
would kill the process later, in the middle of serving. Both limits count: what the machine has left,
and what the control groups of this process allow, in either version of their interface.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ...errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Interface:
    """Where one version of control groups says what a group may use and uses."""

    folder: str
    limit: str
    usage: str
    reclaimable: str
    """The line of `memory.stat` with the page cache that the kernel gives up first."""


_VERSION_1 = _Interface(
    folder="sys/fs/cgroup/memory",
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    reclaimable="total_inactive_file",
)
_VERSION_2 = _Interface(
    folder="sys/fs/cgroup",
    limit="memory.max",
    usage="memory.current",
    reclaimable="inactive_file",
)


def check_host_memory(bytes_needed: int, ranks_on_host: int = 1, *, root: Path = Path("/")) -> None:
    """Raise `ConfigError` unless `ranks_on_host` times `bytes_needed` bytes are available.

    Ranks that share a host call this before any of them makes its pool, since memory that is
    promised but not yet touched cannot be seen. `root` is where `proc` and `sys` are mounted.
    """
    needed = bytes_needed * ranks_on_host
    available, where = available_host_memory(root)
    if needed <= available:
        return
    raise ConfigError(
        f"host pages need {needed / 2**30:.2f} GiB for {ranks_on_host} rank(s) on this host, and "
        f"{available / 2**30:.2f} GiB is available {where}; lower host_pages (host_memory_gib "
        "in an engine's configuration), run fewer ranks on this host, or allow more memory"
    )


def available_host_memory(root: Path = Path("/")) -> tuple[int, str]:
    """Return how many bytes this process may still use, and in words what allows no more."""
    machine, group = _machine_available(root), cgroup_available(root)
    if group is None or (machine is not None and machine <= group):
        return sys.maxsize if machine is None else machine, "on this machine"
    return group, "within this process's memory limit"


def _machine_available(root: Path) -> int | None:
    """Return the bytes that the kernel can give without swapping, or None where it does not say."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    sizes_kib = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((int(kib) << 10 for kib in sizes_kib), None)


def cgroup_available(root: Path = Path("/")) -> int | None:
    """Return the bytes that the control groups of this process still allow, or None without limit.

    A group is bounded by each of its ancestors, so the tightest counts. Inside a container the path
    that the kernel names may not be mounted; then the mounted ancestors are what counts.
    """
    rooms = [
        room
        for interface, path in _groups(root)
        for folder in (path, *path.parents)
        if (room := _room(root / interface.folder / folder.relative_to("/"), interface)) is not None
    ]
    return min(rooms, default=None)


def _groups(root: Path) -> Iterator[tuple[_Interface, PurePosixPath]]:
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            yield _VERSION_2, PurePosixPath("/", path)
        elif "memory" in controllers.split(","):
            yield _VERSION_1, PurePosixPath("/", path)


def _room(folder: Path, interface: _Interface) -> int | None:
    try:
        limit = (folder / interface.limit).read_text(encoding="utf-8").strip()
        usage = (folder / interface.usage).read_text(encoding="utf-8").strip()
        stat = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    if limit == "max":
        return None
    reclaimable = 0
    for line in stat:
        name, _, value = line.partition(" ")
        if name == interface.reclaimable:
            reclaimable = int(value)
    return max(0, int(limit) - int(usage) + reclaimable)
