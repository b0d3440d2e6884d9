"""`lockstep bench tree`: its report and its output, but not the measured numbers."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from lockstep.benchmarks.cached_prompts import NOTHING, CachedPrompts, TreeShape
from lockstep.benchmarks.tree import LEAVES, OPS, TreePoint
from tests.kit.launch.in_process import Run, run_lockstep

TINY = ["--nodes", "128", "--page-tokens", "4", "--repetitions", "2"]


@pytest.fixture
def bench_tree(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    yield from run_lockstep(monkeypatch, capfd, "bench", "tree")


def cached_prompts(components: str = "full", spare_tokens: int = 0) -> CachedPrompts:
    shape = TreeShape(nodes=128, page_tokens=4, components=components)
    return CachedPrompts(shape, spare_tokens=spare_tokens)


def nodes_of(cached: CachedPrompts) -> int:
    return cached.cache.inspection.prefixes.tree.node_count


def test_the_report_has_a_point_for_every_call_tree_and_prompt(
    bench_tree: Run, tmp_path: Path
) -> None:
    path = tmp_path / "tree.json"

    status, out, _ = bench_tree("--tokens", "64", "--tokens", "128", *TINY, "--report", path)

    report = json.loads(path.read_text(encoding="utf-8"))
    assert status == 0
    assert all(set(point) == set(TreePoint.__annotations__) for point in report["points"])
    paths = {(point["tokens"], point["path_nodes"]) for point in report["points"]}
    assert paths == {(64, 2), (128, 2), (128, 32), (64 * LEAVES, 0)}
    # For each model, the benchmark measures one eviction, and a match, insert and lock of each prompt.
    ops = sorted([*OPS[:3] * 3, OPS[3]])
    measured = sorted((point["components"], point["op"]) for point in report["points"])
    assert measured == sorted(product(("full", "full+window"), ops))
    assert report["python"]
    assert report["machine"]
    assert all(op in out for op in OPS)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--nodes", "5"], "--nodes. Must be >= 128"),
        (["--page-tokens", "0"], "--page-tokens. Must be >= 1"),
        (["--tokens", "64"], "--tokens is 64, must be two pages of 64 or more"),
        (["--components", "mamba"], '--components. Choose from: "full", "full+window"'),
        (["--repetitions", "0"], "--repetitions. Must be >= 1"),
        (["--report", "/nowhere/tree.json"], "there is no directory /nowhere"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(
    bench_tree: Run, arguments: list[str], complaint: str
) -> None:
    status, _, error = bench_tree(*arguments)

    assert status == 2
    assert complaint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("components", ["full", "full+window"])
def test_an_eviction_takes_64_nodes_and_finds_the_next_64_as_the_first(components: str) -> None:
    cached = cached_prompts(components)
    room = LEAVES * cached.shape.leaf_tokens

    before = nodes_of(cached)
    cached.cache.load_back("evicting", NOTHING, reserve_tokens=room)
    between = nodes_of(cached)
    cached.cache.release("evicting")
    cached.add_group()
    cached.add_group()

    assert (before, between, nodes_of(cached)) == (128, 128 - LEAVES, 128)
    cached.cache.inspection.check()


def test_a_prompt_lies_in_as_many_nodes_as_are_asked_for() -> None:
    cached = cached_prompts(spare_tokens=1000)
    cached.open_spare_room()
    prompt = np.arange(100, dtype=np.int32)

    cached.add_prompt(prompt, 5)

    # The prompt adds five nodes. Four branches start at the ends of nodes, so each branch adds one
    # node and splits none.
    assert nodes_of(cached) == 128 + 5 + 4
    assert cached.cache.match(prompt).device_tokens == 100
