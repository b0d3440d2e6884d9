"""Checks of memory: shared memory, locked memory, huge pages, and host memory."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from ...ranks.executor.host_memory import available_host_memory, cgroup_available
from ..cli.amounts import bytes_in_words, count
from .finding import CheckResult, advice, problem, well

_SHARED: Final = Path("/dev/shm")  # noqa: S108 - nothing is opened there by a name.
_HUGE: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_RDMA: Final = Path("/sys/class/infiniband")
SHARED_BYTES: Final = 1 << 30
"""Free bytes that /dev/shm should have: NCCL's advice for containers; engines use /dev/shm, too."""
RANK_BYTES: Final = 1 << 30
"""Bytes of host memory that a rank needs in addition to its pages: Python, torch and buffers."""


@dataclass(frozen=True, slots=True)
class LockedMemory:
    """Limit on locked memory (None: unlimited), and whether RDMA or CUDA devices are present."""

    limit: int | None
    rdma: bool
    cuda: bool


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of the machine, available memory, and the limit of this process's cgroups."""

    total: int
    available: int
    group: int | None
    ranks: int


def probe_shared() -> tuple[int, int] | None:
    """Return (total, free) bytes of /dev/shm; None if it does not exist."""
    try:
        found = os.statvfs(_SHARED)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def judge_shared(shared: tuple[int, int] | None) -> CheckResult:
    """Judge the space in /dev/shm for engines and NCCL; Lockstep itself does not use /dev/shm."""
    name = "shared memory"
    remedy = "give the container more: docker run --shm-size 1g, or --ipc host"
    if shared is None:
        return advice(name, "there is no /dev/shm, which NCCL and engines' queues need", remedy)
    total, free = shared
    seen = f"{_SHARED} has {bytes_in_words(total)}, {bytes_in_words(free)} free"
    if free < SHARED_BYTES:
        seen += f"; NCCL and engines' queues need {bytes_in_words(SHARED_BYTES)}"
        return advice(name, seen, remedy)
    return well(name, seen)


def probe_locked(*, cuda: bool) -> LockedMemory:
    """Read the limit on locked memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    rdma = _RDMA.is_dir() and any(_RDMA.iterdir())
    return LockedMemory(None if soft == resource.RLIM_INFINITY else soft, rdma, cuda)


def judge_locked(locked: LockedMemory) -> CheckResult:
    """Judge the limit on locked memory if a GPU or an RDMA card needs locked host pages."""
    name = "locked memory"
    if locked.limit is None:
        return well(name, "unlimited")
    seen = f"limit {bytes_in_words(locked.limit)}"
    wanting = [
        what for what, is_there in (("a GPU", locked.cuda), ("RDMA", locked.rdma)) if is_there
    ]
    if wanting:
        seen += f", perhaps too low to lock host pages for {' and '.join(wanting)}"
        return advice(name, seen, "run ulimit -l unlimited, or use docker run --ulimit memlock=-1")
    return well(name, f"{seen}; neither a GPU nor RDMA needs more")


def probe_huge_pages() -> str:
    """Return the kernel's huge-page setting, with the active word in brackets; empty if unknown."""
    try:
        return _HUGE.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def judge_huge_pages(enabled: str) -> CheckResult:
    """Judge the kernel's huge-page setting for host pools, which request huge pages."""
    name = "huge pages"
    if "[never]" in enabled:
        seen = "disabled in the kernel, so copies of host pools are slower"
        return advice(name, seen, f"run as root: echo madvise > {_HUGE}")
    if not enabled:
        return well(name, "not reported by the kernel; host pools do not use them")
    chosen = enabled.partition("[")[2].partition("]")[0]
    return well(name, f"enabled for host pools if the kernel has free ones ({chosen})")


def probe_host_memory(ranks: int) -> HostMemory:
    """Read the machine's total and available memory, and the cgroup's limit."""
    available, _ = available_host_memory()
    return HostMemory(psutil.virtual_memory().total, available, cgroup_available(), ranks)


def judge_host_memory(memory: HostMemory) -> CheckResult:
    """Judge the available memory by the bytes that each rank needs in addition to its pages."""
    name = "host memory"
    available, total = bytes_in_words(memory.available), bytes_in_words(memory.total)
    seen = f"{available} of {total} available"
    if memory.group is not None and memory.group <= memory.available:
        seen += ", limited by this process's cgroup"
    needed = memory.ranks * RANK_BYTES
    if memory.available < memory.ranks * (RANK_BYTES >> 2):
        return problem(
            name, seen, f"run fewer ranks than {memory.ranks} here, or allow more memory"
        )
    if memory.available < needed:
        ranks = count(memory.ranks, "rank")
        remedy = f"{ranks} take {bytes_in_words(needed)} without any pages: allow more memory"
        return advice(name, seen, remedy)
    return well(name, seen)
