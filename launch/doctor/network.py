"""Checks of the network: the host name, gloo's interface, and a gloo test with two processes."""

import json
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from ..cli.environment import LOOPBACK, address_towards, read_gloo_interface
from .finding import CheckResult, advice, problem, well

GLOO_SLOW_US: Final = 10_000.0
GLOO_TIMEOUT_S: Final = 40
RANKS: Final = 2
_ELSEWHERE: Final = "192.0.2.1"
"""An address reserved for documentation, used only to look up a route; nothing is sent to it."""
_RANK: Final = "lockstep.launch.doctor.gloo_rank"


@dataclass(frozen=True, slots=True)
class HostName:
    """The host's name, the addresses it resolves to, and this machine's addresses."""

    name: str
    stands_for: tuple[str, ...]
    own: frozenset[str]


@dataclass(frozen=True, slots=True)
class Interface:
    """The network interface that ranks would use, and its address."""

    name: str
    address: str
    chosen: str
    """The user's GLOO_SOCKET_IFNAME; empty if it is not set."""


@dataclass(frozen=True, slots=True)
class Gloo:
    """Times of one small all_reduce between two processes, or the error of the test."""

    p50_us: float = 0.0
    p99_us: float = 0.0
    failure: str = ""


def probe_host_name() -> HostName:
    """Resolve the host's own name, and list this machine's addresses."""
    name = socket.gethostname()
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        found = tuple(dict.fromkeys(str(info[4][0]) for info in infos))
    except OSError:
        found = ()
    return HostName(name, found, frozenset(_addresses()))


def judge_host_name(host: HostName) -> CheckResult:
    """Judge the addresses of the host's own name; by default gloo uses their interface."""
    name = "host name"
    remedy = (
        f"add {host.name} with an address of this machine to /etc/hosts, or set GLOO_SOCKET_IFNAME"
    )
    if not host.stands_for:
        return advice(name, f"{host.name} resolves to no address, and gloo needs one", remedy)
    seen = f"{host.name} resolves to {', '.join(host.stands_for)}"
    # All addresses in 127.0.0.0/8 are this machine, even if the interface lists only one of them.
    if not any(each in host.own or each.startswith("127.") for each in host.stands_for):
        return advice(name, f"{seen}, which is not this machine", remedy)
    return well(name, seen)


def probe_interface() -> Interface:
    """Choose the interface as a rank does: the user's, else the one to other hosts, else loopback."""
    chosen = read_gloo_interface()
    addresses = _addresses()
    if chosen:
        of_it = [address for address, name in addresses.items() if name == chosen]
        return Interface(chosen, next(iter(of_it), ""), chosen)
    address = address_towards(_ELSEWHERE, 9)
    return Interface(addresses.get(address, "lo"), address or LOOPBACK, "")


def judge_interface(interface: Interface) -> CheckResult:
    """Judge whether the chosen interface has an address, and whether it leads to other hosts."""
    name = "interface"
    if not interface.address:
        seen = f"GLOO_SOCKET_IFNAME is {interface.chosen}, which has no address here"
        return problem(name, seen, "set it to an interface that `ip address` lists, or unset it")
    seen = f"{interface.name}, {interface.address}"
    if interface.chosen:
        return well(name, f"{seen}, set by GLOO_SOCKET_IFNAME")
    if interface.address.startswith("127."):
        return well(name, f"{seen}: no route to other hosts; none is needed on a single host")
    return well(name, f"{seen}: the route to other hosts")


def probe_gloo(interface: Interface) -> Gloo:
    """Time all_reduces between two processes that connect through the interface, as ranks do."""
    from ..cli.rank_processes import run_ranks

    if not interface.address:
        return Gloo(failure="no interface to test")
    try:
        # Fail now if this machine does not have the address; torch would retry for minutes.
        socket.create_server((interface.address, 0)).close()
    except OSError as error:
        return Gloo(failure=str(error))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "gloo.json"
        status, line = run_ranks(
            ("-m", _RANK, str(os.getpid()), str(file)),
            RANKS,
            address=interface.address,
            shutdown_timeout_s=0,
            show_output=False,
        )
        if status:
            return Gloo(failure=line or f"a process ended with status {status}")
        found: Mapping[str, float] = json.loads(file.read_text(encoding="utf-8"))
        return Gloo(found["p50_us"], found["p99_us"])


def judge_gloo(gloo: Gloo, interface: Interface) -> CheckResult:
    """Judge gloo by the time of its all_reduce; a round between hosts takes at least this time."""
    name = "gloo"
    if gloo.failure:
        remedy = "allow connections inside this machine at that address, or set GLOO_SOCKET_IFNAME"
        return problem(name, f"all_reduce between two processes failed: {gloo.failure}", remedy)
    seen = (
        f"all_reduce between two processes at {interface.address}: p50 {gloo.p50_us:,.0f} us, p99"
        f" {gloo.p99_us:,.0f} us"
    )
    if gloo.p50_us > GLOO_SLOW_US:
        remedy = (
            "check for other programs that use the CPUs; rounds inside one host use shared memory"
        )
        return advice(name, seen, remedy)
    return well(name, seen)


def _addresses() -> dict[str, str]:
    """Return this machine's addresses, each with its interface."""
    return {
        each.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6)
    }
