"""The Triton kernel that moves host pages, run in Triton's interpreter on the CPU."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import random

import torch

from lockstep.ranks.executor.kernels.host_rows import move_rows

for page_bytes in (16, 48, 18432, 8 << 10, 24 << 10, 256 << 10):
    for count in (0, 1, 3, 7, 20):
        rows, staging = (
            torch.randint(0, 256, (pages, page_bytes), dtype=torch.uint8) for pages in (24, count)
        )
        pages = torch.tensor(random.Random(count).sample(range(24), count), dtype=torch.int64)
        expected = rows.clone()
        expected[pages] = staging
        move_rows(rows, pages, staging, to_host=True)
        assert torch.equal(rows, expected), ("to the host", page_bytes, count)
        back = torch.zeros_like(staging)
        move_rows(rows, pages, back, to_host=False)
        assert torch.equal(back, staging), ("to the device", page_bytes, count)
        assert torch.equal(rows, expected), ("not to be touched", page_bytes, count)
"""


@pytest.mark.engines
def test_the_pages_that_are_named_are_moved_whole_and_no_others() -> None:
    pytest.importorskip("triton", reason="Triton, which comes with engines, is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1"}

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )

    assert done.returncode == 0, done.stderr
