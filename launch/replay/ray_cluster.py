"""Connects to an existing Ray cluster or starts an embedded one, and places ranks on its nodes."""

import logging
import shutil
import socket
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ...errors import ConfigError
from ..cli.environment import LOOPBACK, prepare_for_ray

CONNECT_TIMEOUT_S = 5.0
"""Timeout of the connection to a cluster, in seconds."""
_END_TIMEOUT_S = 1.5
"""Seconds to wait until the killed processes of an embedded Ray cluster have exited."""
_OBJECT_STORE_BYTES = 80 << 20
"""Bytes of Ray's object store: about Ray's minimum, because only the outcomes of ranks pass through the
store."""


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A Ray cluster that this process is connected to."""

    ray: Any
    host: str
    """Address at which Ray actors can connect to this process."""


@contextmanager
def ray_cluster(address: str | None, *, ranks: int) -> Generator[RayCluster]:
    """Connect to the cluster at `address`, or start an embedded cluster; clean up at exit.

    Raises `ConfigError` if Ray is not installed, or the cluster cannot be reached.
    """
    # Use a short path under /tmp, because Ray's sockets are there, and a socket's path has at most 107
    # characters.
    temporary = Path(tempfile.mkdtemp(prefix="lk-", dir="/tmp"))
    try:
        prepare_for_ray(temporary, embedded=address is None)
        try:
            import ray
        except ImportError as error:
            raise ConfigError("--launcher ray needs Ray: pip install 'ray>=2.40'") from error
        try:
            yield RayCluster(ray, _connect(ray, ranks, address, temporary))
        finally:
            _shut_down(ray)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def reserve(ray: Any, ranks: int, *, ranks_per_node: int | None, gpus: bool) -> Any:
    """Return a placement group of bundles with `ranks_per_node` ranks each (None: all ranks in one).

    Each rank takes one CPU, and also one GPU if `gpus` is true. Raises `ConfigError` if the cluster is
    too small. If other jobs use the resources, the actors in the group wait for them.
    """
    most = ranks_per_node or ranks
    sizes = [min(most, ranks - first) for first in range(0, ranks, most)]
    bundles = [{"CPU": each} | ({"GPU": each} if gpus else {}) for each in sizes]
    _check_that_nodes_suffice(ray, bundles)
    # A bundle is never divided among nodes, and SPREAD puts bundles on different nodes if possible. Ray
    # reserves all bundles or none, so that two replays cannot block each other.
    return ray.util.placement_group(bundles, strategy="SPREAD")


def _check_that_nodes_suffice(ray: Any, bundles: Sequence[dict[str, int]]) -> None:
    """Raise `ConfigError` if the nodes are too small for the bundles; Ray would wait forever."""
    nodes = [
        node["Resources"] | {"at": node["NodeManagerAddress"]}
        for node in ray.nodes()
        if node["Alive"]
    ]
    for resource in bundles[0]:
        largest = max(nodes, key=lambda node: float(node.get(resource, 0)))
        has = int(largest.get(resource, 0))
        wanted = max(each[resource] for each in bundles)
        if wanted > has:
            raise ConfigError(
                f"{wanted} ranks on one node need {wanted} {resource}s, but the largest node of the"
                f" cluster, {largest['at']}, has {has}; lower --ranks, or set --ranks-per-node"
            )
        needed = sum(each[resource] for each in bundles)
        in_all = sum(int(node.get(resource, 0)) for node in nodes)
        if needed > in_all:
            raise ConfigError(
                f"{needed} ranks need {needed} {resource}s, but the cluster has {in_all}; lower --ranks"
            )


def _connect(ray: Any, ranks: int, address: str | None, temporary: Path) -> str:
    """Connect this process to Ray; return the address at which actors can connect to this process."""
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        ray.init(
            num_cpus=ranks,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(temporary),
            **quiet,
        )
        # A loopback address is enough, because an embedded cluster runs only on this machine.
        return LOOPBACK
    _check_that_somebody_listens(address)
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        why = (str(error).splitlines() or ["no reason given"])[0]
        raise ConfigError(f"--ray-address: cannot reach Ray at {address}: {why}") from error
    return str(ray.util.get_node_ip_address())


def _check_that_somebody_listens(address: str) -> None:
    """Raise `ConfigError` at once if no server listens at `address`; Ray would retry for minutes."""
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
    """Disconnect from Ray, and kill the processes that Ray started on this machine for us.

    This also works after an interrupted start.
    """
    started = psutil.Process().children(recursive=True)
    ray.shutdown()
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(started, timeout=_END_TIMEOUT_S)
