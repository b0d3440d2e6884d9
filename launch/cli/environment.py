"""What the launcher tells a rank through its environment. The only reader of `os.environ`.

torchrun and our own launcher set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
MASTER_PORT and two variables of torchrun's: whether the launcher hosts the store in which the ranks
meet, and how often it has restarted the group. A launcher that has no environment to set makes a
`RankEnvironment` directly.
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

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
    store_is_hosted: bool
    """Whether the launcher hosts the store at the master address; otherwise rank 0 does."""
    attempt: int = 0
    """How often the launcher has restarted the group; each attempt meets under a prefix of its own,
    because the store outlives the ranks and remembers addresses of dead ones."""


def read_rank_environment() -> RankEnvironment:
    """Return what the launcher said. Raises `ConfigError` that names what is missing or wrong."""
    rank = _whole_number("RANK")
    world_size = _whole_number("WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK is {rank}, must be from 0 to WORLD_SIZE - 1 = {world_size - 1}")
    return RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=_whole_number("LOCAL_RANK", rank),
        local_world_size=_whole_number("LOCAL_WORLD_SIZE", world_size),
        master_addr=_text("MASTER_ADDR"),
        master_port=_whole_number("MASTER_PORT"),
        store_is_hosted=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_whole_number("TORCHELASTIC_RESTART_COUNT", 0),
    )


SETTINGS_VARIABLE = "LOCKSTEP_SETTINGS"
"""Holds the settings of a rank that our own launcher has started, in JSON.

They may have a store's password in them, and command lines can be read by every user of a machine.
"""


def take_settings() -> str:
    """Return the settings that the launcher gave this process, which its children do not get."""
    try:
        return os.environ.pop(SETTINGS_VARIABLE)
    except KeyError:
        raise ConfigError(
            f"{SETTINGS_VARIABLE} is not set: ranks that are `--launched-by` another process find their"
            " settings there; start ranks by hand with options instead"
        ) from None


def variables_of(place: RankEnvironment, settings: str) -> dict[str, str]:
    """Return the environment of a process that finds its place and its settings in it.

    `read_rank_environment` finds the place, and `take_settings` the settings.
    """
    return os.environ | {
        SETTINGS_VARIABLE: settings,
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_USE_AGENT_STORE": str(place.store_is_hosted),
        "TORCHELASTIC_RESTART_COUNT": str(place.attempt),
    }


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


def _text(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ConfigError(
            f"{name} is not set; start the ranks with torchrun, or use `lockstep replay`"
        )
    return value


def _whole_number(name: str, default: int | None = None) -> int:
    if default is not None and name not in os.environ:
        return default
    value = _text(name)
    try:
        number = int(value)
    except ValueError:
        raise ConfigError(f"{name} is {value!r}, must be a whole number") from None
    if number < 0:
        raise ConfigError(f"{name} is {number}, must not be negative")
    return number


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
