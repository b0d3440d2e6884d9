"""Sockets: what the host's name stands for, the interface for gloo, and two processes that try it."""

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
from .finding import Finding, advice, problem, well

GLOO_SLOW_US: Final = 10_000.0
GLOO_TIMEOUT_S: Final = 40
RANKS: Final = 2
_ELSEWHERE: Final = "192.0.2.1"
"""An address for documentation, which no machine has; nothing is sent there."""
_RANK: Final = "lockstep.launch.doctor.gloo_rank"


@dataclass(frozen=True, slots=True)
class HostName:
    """The host's name, what it stands for, and the addresses that this machine has."""

    name: str
    stands_for: tuple[str, ...]
    own: frozenset[str]


@dataclass(frozen=True, slots=True)
class Interface:
    """The interface over which other hosts are reached, or that the user has chosen."""

    name: str
    address: str
    chosen: str
    """What GLOO_SOCKET_IFNAME says; empty where it is not set."""


@dataclass(frozen=True, slots=True)
class Gloo:
    """How long two processes took for one small all_reduce, or why they could not."""

    p50_us: float = 0.0
    p99_us: float = 0.0
    failure: str = ""


def probe_host_name() -> HostName:
    """Ask what the host's name stands for."""
    name = socket.gethostname()
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        found = tuple(dict.fromkeys(str(info[4][0]) for info in infos))
    except OSError:
        found = ()
    return HostName(name, found, frozenset(_addresses()))


def judge_host_name(host: HostName) -> Finding:
    """Judge by what gloo does by itself: it takes the interface that the host's name stands for."""
    name = "host name"
    remedy = (
        f"add {host.name} with an address of this machine to /etc/hosts, or set GLOO_SOCKET_IFNAME"
    )
    if not host.stands_for:
        return advice(name, f"{host.name} stands for no address, and gloo asks for one", remedy)
    seen = f"{host.name} stands for {', '.join(host.stands_for)}"
    # All of 127.0.0.0/8 is this machine, and one address of it stands at the interface.
    if not any(each in host.own or each.startswith("127.") for each in host.stands_for):
        return advice(name, f"{seen}, which is not this machine", remedy)
    return well(name, seen)


def probe_interface() -> Interface:
    """Choose as ranks do: what the user says, else the interface towards other hosts, else loopback."""
    chosen = read_gloo_interface()
    addresses = _addresses()
    if chosen:
        of_it = [address for address, name in addresses.items() if name == chosen]
        return Interface(chosen, next(iter(of_it), ""), chosen)
    address = address_towards(_ELSEWHERE, 9)
    return Interface(addresses.get(address, "lo"), address or LOOPBACK, "")


def judge_interface(interface: Interface) -> Finding:
    """Judge whether other hosts can be reached at all."""
    name = "interface"
    if not interface.address:
        seen = f"GLOO_SOCKET_IFNAME is {interface.chosen}, which has no address here"
        return problem(name, seen, "name an interface that `ip address` shows, or leave it unset")
    seen = f"{interface.name}, {interface.address}"
    if interface.chosen:
        return well(name, f"{seen}, as GLOO_SOCKET_IFNAME says")
    if interface.address.startswith("127."):
        return well(name, f"{seen}: no way leads to other hosts, and none is needed on one")
    return well(name, f"{seen}: the way to other hosts")


def probe_gloo(interface: Interface) -> Gloo:
    """Start two processes that meet at the interface, as ranks do, and let them vote some times."""
    from ..cli.rank_processes import run_ranks

    if not interface.address:
        return Gloo(failure="there is no interface to try it on")
    try:
        # Nobody waits long for an address that is not there.
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
            are_heard=False,
        )
        if status:
            return Gloo(failure=line or f"a process ended with status {status}")
        found: Mapping[str, float] = json.loads(file.read_text(encoding="utf-8"))
        return Gloo(found["p50_us"], found["p99_us"])


def judge_gloo(gloo: Gloo, interface: Interface) -> Finding:
    """Judge by what a round between hosts would take at least."""
    name = "gloo"
    if gloo.failure:
        remedy = (
            "let processes of this machine connect to each other there, or set GLOO_SOCKET_IFNAME"
        )
        return problem(name, f"two processes could not vote: {gloo.failure}", remedy)
    seen = (
        f"two processes at {interface.address}: p50 {gloo.p50_us:,.0f} us, p99 {gloo.p99_us:,.0f} us"
        " for an all_reduce"
    )
    if gloo.p50_us > GLOO_SLOW_US:
        remedy = "another program has the processors; rounds of one host go by shared memory"
        return advice(name, seen, remedy)
    return well(name, seen)


def _addresses() -> dict[str, str]:
    """Return the addresses of this machine, each with the name of its interface."""
    return {
        each.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6)
    }
