"""A Ray cluster with two nodes on this machine, for tests of commands that use Ray.

All test modules share the fixture `two_nodes`, because the cluster takes seconds to start.
"""

import os
import tempfile
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

NODES, CPUS = 2, 2


@dataclass(frozen=True)
class TwoNodes:
    address: str
    ray: Any
    """The package `ray`, connected to the cluster."""

    def actors(self, kind: str) -> list[str]:
        """Return the sorted node ids of all live actors of a class, one id for each actor."""
        state: Any = import_module("ray._private.state")
        return sorted(
            str(each["Address"]["NodeID"])
            for each in state.actors().values()
            if each["State"] == "ALIVE" and each["ActorClassName"] == kind
        )


@pytest.fixture(scope="session")
def two_nodes() -> Generator[TwoNodes]:
    """Run the cluster for the test session, with this process connected to it."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    clusters: Any = import_module("ray.cluster_utils")

    with ExitStack() as opened:
        # Use a short path, because Ray's socket paths are below this directory and can have at most
        # 107 characters.
        place = opened.enter_context(
            tempfile.TemporaryDirectory(prefix="lk-", dir="/tmp", ignore_cleanup_errors=True)
        )
        # Create the folder `ray`, because the cluster writes its address there but does not create the
        # folder.
        (Path(place) / "ray").mkdir()
        opened.enter_context(pytest.MonkeyPatch.context()).setenv("RAY_TMPDIR", place)
        size: dict[str, Any] = {"num_cpus": CPUS, "object_store_memory": 80 << 20}
        head = {**size, "include_dashboard": False, "temp_dir": place}
        cluster = clusters.Cluster(initialize_head=True, head_node_args=head)
        for _ in range(NODES - 1):
            cluster.add_node(**size)
        ray.init(cluster.address, log_to_driver=False)
        yield TwoNodes(cluster.address, ray)
        ray.shutdown()
        cluster.shutdown()
