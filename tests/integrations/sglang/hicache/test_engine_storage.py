"""Lockstep's storage in SGLang's own hands: its factory, its host pools, its transfers, on a CPU."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kit.programs import program
from tests.kit.source_tree import ROOT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

POOLS = "tests.kit.sglang.hicache_pools"
STAND_INS = ROOT / "tests" / "kit" / "sglang" / "stand_ins"
LAYOUTS = ("page_first", "page_first_direct", "layer_first")
FIVE = [0, 1, 2, 3, 4]
LATER = [7, 8, 9, 10, 11]
WRITES = [
    {"call": "set_v1", "keys": FIVE},
    {"call": "set_v2", "keys": [1, 4], "pool": "mamba"},
    {"call": "digests", "keys": FIVE},
    {"call": "digests", "keys": [1, 4], "pool": "mamba"},
]
READS = [
    {"call": "exists", "keys": [*FIVE, 5]},
    {"call": "restorable", "keys": [*FIVE, 5]},
    {"call": "get_v1", "keys": FIVE, "pages": LATER},
    {"call": "get_v2", "keys": [1, 4], "pages": [6, 7], "pool": "mamba"},
    {"call": "digests", "keys": LATER},
    {"call": "digests", "keys": [6, 7], "pool": "mamba"},
]
WRITES_TO_SPOIL = [
    {"call": "set", "keys": FIVE},
    {"call": "set_v2", "keys": FIVE, "pool": "mamba"},
]
READS_OF_SPOILED = [
    {"call": "get_v1", "keys": FIVE},
    {"call": "exists", "keys": [0, 2, 3, 4]},
    {"call": "restorable", "keys": [0, 2]},
    {"call": "get_v2", "keys": FIVE, "pool": "mamba"},
    {"call": "clear", "keys": [0]},
    {"call": "exists", "keys": FIVE},
]

Told = dict[str, Any]
"""What a process said of one plan: `answers`, and the pages `moved` (read, written)."""


def run(plans: Sequence[dict[str, Any]]) -> list[Told]:
    """Carry out plans in a new process."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(STAND_INS),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    finished = subprocess.run(
        program(POOLS, json.dumps(plans)),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=environment,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    told: list[Told] = json.loads(finished.stdout.splitlines()[-1])
    return told


def objects_in(store: Path, pool: str) -> list[Path]:
    """The objects of one pool, in the order of their keys."""
    files = (store / "objects").rglob("*")
    names = {each: each.read_bytes()[66:581] for each in files if each.is_file()}
    ours = [each for each in names if f"/hicache-{pool}/".encode() in names[each]]
    return sorted(ours, key=lambda each: names[each])


def spoil(store: Path) -> None:
    """Damage the pages 1 and lose the pages 3 of the main pool; lose the states 1, cut the states 4."""
    pages, states = objects_in(store, "kv"), objects_in(store, "mamba")
    assert (len(pages), len(states)) == (5, 5)
    pages[1].write_bytes(pages[1].read_bytes()[:-1] + b"?")
    pages[3].unlink()
    states[1].unlink()
    states[4].write_bytes(states[4].read_bytes()[:-9])


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """What one process said of writing and, after some objects were spoiled, the next of reading."""
    root = tmp_path_factory.mktemp("hicache")
    kinds = {"sound": (WRITES, READS), "spoiled": (WRITES_TO_SPOIL, READS_OF_SPOILED)}
    told: dict[str, Told] = {}
    for turn, verb in enumerate(["wrote", "read"]):
        named = {
            f"{verb} {kind} {layout}": {
                "store": f"file://{root}/{kind}-{layout}",
                "layout": layout,
                "seed": 1 + 100 * turn,
                "calls": calls[turn],
            }
            for kind, calls in kinds.items()
            for layout in LAYOUTS
        }
        told |= dict(zip(named, run(list(named.values())), strict=True))
        for layout in LAYOUTS if verb == "wrote" else ():
            spoil(root / f"spoiled-{layout}")
    return told


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_one_process_are_read_by_the_next_byte_for_byte(
    told: dict[str, Told], layout: str
) -> None:
    wrote, read = told[f"wrote sound {layout}"], told[f"read sound {layout}"]

    assert wrote["answers"][:2] == [[True] * 5, [True] * 2]
    assert read["answers"][2:4] == [[True] * 5, [True] * 2]
    assert read["answers"][4:] == wrote["answers"][2:]
    assert (wrote["moved"], read["moved"]) == ([0, 7], [7, 0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_prefixes_that_end_with_a_state_are_restorable(
    told: dict[str, Told], layout: str
) -> None:
    assert told[f"read sound {layout}"]["answers"][:2] == [5, [2, 5]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_and_lost_objects_are_misses_in_every_pool(
    told: dict[str, Told], layout: str
) -> None:
    pages, leading, restorable, states, *_ = told[f"read spoiled {layout}"]["answers"]

    assert pages == [True, False, True, False, True]
    assert leading == 2
    assert restorable == [1, 2]
    assert states == [True, False, True, True, False]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_clear_leaves_nothing(told: dict[str, Told], layout: str) -> None:
    assert told[f"read spoiled {layout}"]["answers"][4:] == [True, 0]
