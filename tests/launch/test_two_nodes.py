"""Ranks started by hand on two nodes that share only a network cable."""

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
    """Ranks of two nodes connect although no option names a network interface for gloo."""
    ended = run(sys.executable, ROOT / "examples" / "two_nodes" / "run.py")

    assert (ended.status, ended.err) == (0, "")
    assert ended.out.splitlines() == [
        "replay: 12 requests on 4 ranks",
        "  transport hierarchical: 4 ranks are on 2 hosts",
        "  replicas equal: True",
        "  corrupt pages: 0",
    ]
