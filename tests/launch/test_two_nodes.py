"""Ranks on two nodes that have nothing in common but a cable, started as by hand."""

import os
import shutil
import sys

import pytest

from tests.kit.launch.replays import run
from tests.kit.source_tree import ROOT

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"
)


@pytest.mark.slow
@pytest.mark.distributed
@needs_namespaces
def test_two_nodes_replay_together() -> None:
    """Nothing says which interface gloo is to use, and the host's own name means loopback on many."""
    ended = run(sys.executable, ROOT / "examples" / "two_nodes" / "run.py")

    assert (ended.status, ended.err) == (0, "")
    assert ended.out.splitlines() == [
        "replay: 12 requests on 4 ranks",
        "  carried by hierarchical: 4 ranks are on 2 hosts",
        "  replicas equal: True",
        "  corrupt pages: 0",
    ]
