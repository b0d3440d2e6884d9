"""Checks of kernel resources: system calls, open files, clocks and processors."""

import ctypes
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ..cli.amounts import count
from .finding import CheckResult, advice, problem, well

FILES_WANTED: Final = 4096
FILES_NEEDED: Final = 256
_EARLIEST: Final = datetime(2025, 1, 1, tzinfo=UTC)
"""Earliest plausible date; a wall clock that shows an earlier date was never set."""
_CPU_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
_UNSYNCHRONISED: Final = 5
"""Return value of `adjtimex` for a clock that is not synchronised."""
_TIMEX_BYTES: Final = 208


@dataclass(frozen=True, slots=True)
class Clocks:
    """Resolution of the monotonic clock, time of the wall clock, and state of NTP."""

    resolution_s: float
    wall_s: float
    kept: bool | None
    """Whether the wall clock is synchronised; None if the kernel does not report it."""


@dataclass(frozen=True, slots=True)
class Processors:
    """Processors of the machine, processors that this process may use, and the cgroup's CPU quota."""

    usable: int
    there: int
    quota: float | None
    ranks: int


def probe_calls() -> dict[str, str]:
    """Try the system calls with which ranks share memory; return each call's error, "" if none."""
    calls: dict[str, Callable[[], int]] = {
        "memfd_create": lambda: os.memfd_create("lockstep-doctor", os.MFD_CLOEXEC),
        "pidfd_open": lambda: os.pidfd_open(os.getpid()),
    }
    failures: dict[str, str] = {}
    for name, call in calls.items():
        try:
            os.close(call())
            failures[name] = ""
        except AttributeError:
            failures[name] = "this Python was built without it"
        except OSError as error:
            failures[name] = error.strerror or str(error)
    return failures


def judge_calls(failures: Mapping[str, str]) -> CheckResult:
    """Judge the system calls that rounds over shared memory need."""
    name = "kernel calls"
    failed = [f"{call} ({why})" for call, why in failures.items() if why]
    if failed:
        seen = f"ranks of one host cannot share memory without {' and '.join(failed)}"
        return problem(
            name, seen, "allow them in the container's seccomp profile, or use the transport torch"
        )
    return well(name, f"{' and '.join(failures)} work")


def probe_open_files() -> tuple[int, int]:
    """Return the (soft, hard) limits on open files."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def judge_open_files(limits: tuple[int, int]) -> CheckResult:
    """Judge the limit on open files by the files and connections that ranks and stores need."""
    name = "open files"
    soft, hard = ("unlimited" if each == resource.RLIM_INFINITY else f"{each:,}" for each in limits)
    seen = f"soft limit {soft}, hard limit {hard}"
    if limits[0] == resource.RLIM_INFINITY or limits[0] >= FILES_WANTED:
        return well(name, seen)
    remedy = "run ulimit -n 65536 before starting ranks, or use docker run --ulimit nofile=65536"
    return (problem if limits[0] < FILES_NEEDED else advice)(name, seen, remedy)


def probe_clocks() -> Clocks:
    """Read the clocks, and whether the wall clock is synchronised."""
    resolution_s = time.get_clock_info("monotonic").resolution
    return Clocks(resolution_s, time.time(), _is_kept())


def _is_kept() -> bool | None:
    if not sys.platform.startswith("linux"):
        return None
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)
    if adjtimex is None:
        return None
    # Pass an all-zero `timex`, which changes nothing. Some containers forbid even this call.
    state = int(adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))
    return None if state < 0 else state != _UNSYNCHRONISED


def judge_clocks(clocks: Clocks) -> CheckResult:
    """Judge the monotonic clock (for deadlines) and the wall clock (for comparison between hosts)."""
    name = "clocks"
    wall = datetime.fromtimestamp(clocks.wall_s, UTC)
    ticks = f"resolution of the monotonic clock {clocks.resolution_s * 1e9:,.0f} ns"
    seen = f"{wall:%Y-%m-%d %H:%M:%S} UTC; {ticks}"
    if wall < _EARLIEST:
        return problem(
            name, f"{seen}; the date was never set", "set the date: leases and ages depend on it"
        )
    if clocks.resolution_s > 0.001:
        remedy = (
            "deadlines and measured times are no finer; check `timedatectl` and the clock source"
        )
        return advice(name, seen, remedy)
    if clocks.kept is None:
        return well(name, f"{seen}; the kernel does not say whether NTP synchronises the clock")
    if not clocks.kept:
        remedy = "run chrony or ntpd, because times of several hosts are compared"
        return advice(name, f"{seen}; not synchronised", remedy)
    return well(name, f"{seen}; synchronised by NTP")


def probe_processors(ranks: int) -> Processors:
    """Read the number of usable processors and the cgroup's quota."""
    quota: float | None = None
    try:
        share, period = _CPU_QUOTA.read_text(encoding="ascii").split()
        quota = None if share == "max" else int(share) / int(period)
    except (OSError, ValueError):
        pass
    return Processors(len(os.sched_getaffinity(0)), os.cpu_count() or 1, quota, ranks)


def judge_processors(processors: Processors) -> CheckResult:
    """Judge whether each rank can have a processor, because every round waits for the slowest rank."""
    name = "processors"
    seen = f"{processors.usable} of {processors.there} usable"
    given = float(processors.usable)
    if processors.quota is not None:
        given = min(given, processors.quota)
        seen += f"; cgroup quota {processors.quota:g}"
    if given < processors.ranks:
        seen += f", for {count(processors.ranks, 'rank')}"
        remedy = (
            "every round waits for the slowest rank: run fewer ranks here, or allow more processors"
        )
        return advice(name, seen, remedy)
    return well(name, seen)
