"""Environment variables that Lockstep reads and sets; only this module uses `os.environ`.

torch's launchers set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and
further variables with which ranks find torch's rendezvous store.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...errors import ConfigError

LOOPBACK: Final = "127.0.0.1"
MOONCAKE_TIMEOUTS: Final = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")
"""Names of the variables for the Mooncake client's two TCP timeouts, both in seconds. The first limits
each wait for more bytes; the second limits the wait for the first answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """This rank's number, the world size, and the address of torch's rendezvous."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int


def read_rank_environment() -> RankEnvironment:
    """Return this rank's environment; raise `ConfigError` that names a missing or wrong variable."""
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        environment = RankEnvironment(
            rank=rank,
            world_size=world_size,
            local_rank=int(os.environ.get("LOCAL_RANK", rank)),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
            master_addr=os.environ["MASTER_ADDR"],
            master_port=int(os.environ["MASTER_PORT"]),
        )
    except KeyError as error:
        raise ConfigError(
            f"{error.args[0]} is not set; start the ranks with torchrun, or use `lockstep replay`"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"RANK, WORLD_SIZE and MASTER_PORT must be whole numbers, as torchrun sets them: {error}"
        ) from error
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK is {rank}, must be from 0 to WORLD_SIZE - 1 = {world_size - 1}")
    return environment


SETTINGS_VARIABLE = "LOCKSTEP_SETTINGS"
"""Environment variable with which our launcher passes settings to its ranks, as JSON.

The settings are not on the command line, because they may contain a store's password and every user of
the machine can read command lines.
"""


def export_to_ranks(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process, which its future child processes inherit."""
    os.environ.update(variables)


def take_settings() -> str:
    """Return the launcher's settings, and remove them from this process's environment."""
    return os.environ.pop(SETTINGS_VARIABLE)


def prepare_for_ray(temporary: Path, *, embedded: bool) -> None:
    """Reduce Ray's output, disable its usage reports, and isolate an embedded Ray cluster.

    Sets variables of this process, which Ray's processes inherit, so call it before Ray is imported.
    Variables that the user has set are kept. The authentication of an existing cluster is not changed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    if embedded:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_TMPDIR", str(temporary))


def choose_interface(address: str) -> None:
    """Make gloo use the network interface of `address`, unless the user has set GLOO_SOCKET_IFNAME.

    By default gloo uses the interface to which the host's own name resolves. On many hosts that is
    loopback, which other hosts cannot reach.
    """
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if address in {each.address for each in addresses}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def read_gloo_interface() -> str:
    """Return the user's GLOO_SOCKET_IFNAME; empty if it is not set."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "")


def prepare_for_mooncake() -> None:
    """Let the Mooncake client wait only 2 s for a stopped server, unless the user has set a time.

    By default the client waits 30 seconds for each piece of an object, even after the call's deadline.
    Only environment variables can change this timeout; the client reads them for each new connection.
    """
    for name in MOONCAKE_TIMEOUTS:
        os.environ.setdefault(name, "2")


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to `host`; loopback if there is no route."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            # A UDP connect sends nothing; the kernel only looks up the route.
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK
