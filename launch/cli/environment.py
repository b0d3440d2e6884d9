"""What the launcher tells a rank through its environment. The only reader of `os.environ`.

torch's launchers set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and
variables of torch's own, by which ranks find the store in which they meet.
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
"""Seconds that the Mooncake client waits over TCP for the next bytes, and for the first answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """Which rank this is, and where it meets the others."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int


def read_rank_environment() -> RankEnvironment:
    """Return what the launcher said. Raises `ConfigError` that names what is missing or wrong."""
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
"""Holds the settings of a rank that our own launcher has started, in JSON.

They may have a store's password in them, and command lines can be read by every user of a machine.
"""


def give_to_ranks(variables: Mapping[str, str]) -> None:
    """Set variables of this process and of those that it starts."""
    os.environ.update(variables)


def take_settings() -> str:
    """Return the settings that the launcher gave, which processes started from now on do not get."""
    return os.environ.pop(SETTINGS_VARIABLE)


def prepare_for_ray(temporary: Path, *, embedded: bool) -> None:
    """Keep Ray quiet, and an embedded one to itself: no token in the user's home, no usage reports.

    Sets variables of this process, which Ray's own processes inherit; call it before Ray is
    imported. What the user has set is left alone, and so is how somebody's cluster knows its users.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    if embedded:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_TMPDIR", str(temporary))


def choose_interface(address: str) -> None:
    """Let gloo use the interface that has this address.

    It would take the one that the host's own name stands for, which on many is loopback, where no other
    host reaches it. What the user has set is left alone.
    """
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if address in {each.address for each in addresses}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def read_gloo_interface() -> str:
    """Return the interface that the user wants gloo to use; empty where it may be any."""
    return os.environ.get("GLOO_SOCKET_IFNAME", "")


def prepare_for_mooncake() -> None:
    """Let the Mooncake client give a member up that has stopped after two seconds.

    It waits 30 seconds otherwise, for each piece of an object and whatever a call's deadline, and
    takes no other setting than these variables, which it reads whenever it connects to a member.
    What the user has set is left alone.
    """
    for name in MOONCAKE_TIMEOUTS:
        os.environ.setdefault(name, "2")


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine from which `host` is reached; loopback if it is not."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            # Nothing is sent: the system only looks up the way.
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return LOOPBACK
