"""Lockstep's storage behind SGLang's HiCache factory, host pools and transfers, on a CPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.sglang.processes import last_line_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

POOLS = "tests.kit.sglang.hicache_pools"


def results_of(what: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Run `hicache_pools` with the command `what` in a new process; return its results by layout.

    The results are the answers of its calls, and its numbers of pages read and written.
    """
    found: dict[str, dict[str, Any]] = json.loads(last_line_of(POOLS, what, folder))
    return found


def test_pages_of_one_process_are_read_by_the_next_byte_for_byte(tmp_path: Path) -> None:
    wrote = results_of("write", tmp_path)
    read = results_of("read", tmp_path)

    held = {layout: each["answers"][2:] for layout, each in wrote.items()}
    written = [[True] * 5, [True] * 2]
    assert list(held) == ["page_first", "page_first_direct", "layer_first"]
    assert wrote == {
        layout: {"answers": [*written, *each], "moved": [0, 7]} for layout, each in held.items()
    }
    # A prefix is restorable only if it ends with a state: 2 or 5 pages.
    assert read == {
        layout: {"answers": [5, [2, 5], *written, *each, True, 0], "moved": [7, 0]}
        for layout, each in held.items()
    }
