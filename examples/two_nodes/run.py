"""Two simulated nodes on one machine: `sudo python examples/two_nodes/run.py`.

Each node is a network namespace with a PID namespace, connected by a veth pair. Requires Linux, root
and `ip`. Runs the two-host case of docs/launching.md: a replay under torchrun, whose ranks share memory
within a node and use gloo between nodes.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

IP = shutil.which("ip") or "/usr/sbin/ip"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
SIZES = ("--device-pages", "512", "--host-pages", "2048")
TIMEOUT_S = 240.0


class Nodes:
    """Two simulated nodes and the processes started on them."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._names = [f"lk{os.getpid()}-{node}" for node in range(2)]
        self._running: list[subprocess.Popen[bytes]] = []

    def join(self) -> None:
        """Create the namespaces and the veth pair between them."""
        cables = [f"v{os.getpid() % 100000}-{node}" for node in range(2)]
        for name in self._names:
            _ip("netns", "add", name)
        _ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for name, cable, address in zip(self._names, cables, ADDRESSES, strict=True):
            _ip("link", "set", cable, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            for each in (cable, "lo"):
                _ip("-n", name, "link", "set", each, "up")

    def start(self, node: int, *command: str) -> "subprocess.Popen[bytes]":
        """Start a command on a node, in a new PID namespace.

        When the command exits, the kernel ends all other processes of the namespace.
        """
        alone = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        log = (self._place / f"{len(self._running)}.log").open("wb")
        process = subprocess.Popen(
            (IP, "netns", "exec", self._names[node], *alone, *command),
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._running.append(process)
        return process

    def wait(self, processes: Sequence["subprocess.Popen[bytes]"]) -> None:
        """Wait until the commands have exited; exit with the log of the first that failed."""
        for process in processes:
            if process.wait(TIMEOUT_S):
                log = self._place / f"{self._running.index(process)}.log"
                sys.exit(f"a command ended with {process.returncode}:\n{log.read_text()[-2000:]}")

    def part(self) -> None:
        """Kill commands that still run and delete the network namespaces."""
        for process in self._running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for name in self._names:
            subprocess.run((IP, "netns", "del", name), check=False, stderr=subprocess.DEVNULL)


@contextmanager
def two_nodes() -> Generator[tuple[Nodes, Path]]:
    """Provide two nodes and a directory visible to both, and remove them afterwards."""
    with tempfile.TemporaryDirectory(prefix="two-nodes-") as place:
        nodes = Nodes(Path(place))
        try:
            nodes.join()
            yield nodes, Path(place)
        finally:
            nodes.part()


def torchrun(node: int, *module: str) -> tuple[str, ...]:
    """Return the torchrun command that starts two ranks on node number `node`."""
    return (
        *(*TORCHRUN, "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2"),
        *("--master-addr", ADDRESSES[0], "--master-port", "29555", "-m", *module),
    )


def replay(nodes: Nodes, place: Path) -> dict[str, Any]:
    """Run a replay on two ranks of each node, with one store for all ranks; return the report."""
    report = place / "replay.json"
    options = ("--requests", "12", "--store", (place / "store").as_uri(), *SIZES)
    module = ("lockstep.launch.replay.replay", *options, "--report", str(report))
    nodes.wait([nodes.start(node, *torchrun(node, *module)) for node in range(2)])
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Run the replay and print its results."""
    with two_nodes() as (nodes, place):
        replayed = replay(nodes, place)
        print(f"replay: {replayed['requests']} requests on {replayed['ranks']} ranks")
        print(f"  transport {replayed['transport']}")
        print(f"  replicas equal: {len(set(replayed['digests'])) == 1}")
        print(f"  corrupt pages: {replayed['pages_corrupt']}")


def _ip(*arguments: str) -> None:
    subprocess.run((IP, *arguments), check=True)


if __name__ == "__main__":
    main()
