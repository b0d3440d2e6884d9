"""A Ray cluster: one that somebody runs, or one that is embedded and ends with the command."""

import logging
import shutil
import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ...errors import ConfigError
from ..cli.environment import LOOPBACK, prepare_for_ray

CONNECT_TIMEOUT_S = 5.0
"""How long a cluster may take to accept a connection."""
_END_TIMEOUT_S = 1.5
"""How long processes of an embedded Ray have to be gone, once they were killed."""
_OBJECT_STORE_BYTES = 80 << 20
"""Ray's own store, which carries only outcomes; this is about the least that it takes."""


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A cluster that this process is connected to."""

    ray: Any
    host: str
    """The address at which actors reach this process."""


@contextmanager
def ray_cluster(address: str | None, *, ranks: int) -> Generator[RayCluster]:
    """Connect to the cluster at `address`, or embed one for so many ranks; leave nothing of it behind.

    Raises `ConfigError` if Ray is not installed, or the cluster cannot be reached.
    """
    # Ray's sockets live below this directory, and their paths may have 107 characters.
    temporary = Path(tempfile.mkdtemp(prefix="lk-", dir="/tmp"))
    try:
        prepare_for_ray(temporary, embedded=address is None)
        try:
            import ray
        except ImportError as error:
            raise ConfigError("--launcher ray needs Ray: pip install 'ray>=2.40'") from error
        try:
            _connect(ray, ranks, address, temporary)
            # An embedded cluster is this machine alone, so that nobody else has to reach this process.
            yield RayCluster(ray, LOOPBACK if address is None else _node_address(ray))
        finally:
            _shut_down(ray)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _node_address(ray: Any) -> str:
    """Return the address of the node that this process is on, as the cluster knows it."""
    return str(ray.util.get_node_ip_address())


def _connect(ray: Any, ranks: int, address: str | None, temporary: Path) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        ray.init(
            num_cpus=ranks,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(temporary),
            **quiet,
        )
        return
    _check_that_somebody_listens(address)
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        why = (str(error).splitlines() or ["no reason given"])[0]
        raise ConfigError(f"--ray-address: cannot reach Ray at {address}: {why}") from error


def _check_that_somebody_listens(address: str) -> None:
    """Raise `ConfigError` at once where Ray itself would try again for minutes."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal()):
        raise ConfigError(f"--ray-address is {address!r}, must be HOST:PORT, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--ray-address: cannot reach Ray at {address}: {error}") from error


def _shut_down(ray: Any) -> None:
    """Leave Ray, and end what it has started here even if it was interrupted while starting."""
    started = psutil.Process().children(recursive=True)
    ray.shutdown()
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(started, timeout=_END_TIMEOUT_S)
