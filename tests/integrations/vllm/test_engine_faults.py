"""What goes wrong on one rank changes nothing that vLLM says, and nobody hangs.

The store is a directory for each rank, as on local disks, so that one rank's can be spoiled.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from lockstep.page_format.object_header import HEADER_BYTES
from tests.kit.vllm.faults import SLOW_S, flip_a_byte
from tests.kit.vllm.group import (
    Group,
    assert_exact,
    differences,
    lockstep_connector,
    restored_tokens,
)
from tests.kit.vllm.mixed_prompts import REQUESTS, mixed_prompts
from tests.kit.vllm.plan import Output, Phase, Plan, RankResult

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

PROMPTS = mixed_prompts()
SPOILED = 1
QUICK: dict[str, Any] = {
    "stop_policy": {"base_s": 0.5, "per_ki_token_s": 0.25, "cap_s": 5},
    "timeouts": {"lookup_s": 0.5, "persist_s": 5, "quiesce_s": 1},
}


@pytest.fixture(scope="module")
def filled_once(
    tmp_path_factory: pytest.TempPathFactory, model: Path, reference: list[Output]
) -> Path:
    """Stores that have every page of the prompts, one for each rank."""
    folder = tmp_path_factory.mktemp("filled")
    cold = run(Group(folder, model), f"file://{folder}/rank{{rank}}")
    assert_exact(reference, cold)
    assert len(objects(folder, 0)) == len(objects(folder, 1)) > 300
    return folder


@pytest.fixture
def filled(filled_once: Path, tmp_path: Path) -> str:
    """The URI of such stores, for one test to spoil."""
    for rank in range(2):
        shutil.copytree(filled_once / f"rank{rank}", tmp_path / f"rank{rank}")
    return f"file://{tmp_path}/rank{{rank}}"


def run(group: Group, store: str, fault: str | None = None, **extra: Any) -> list[RankResult]:
    """Send the prompts to an engine that was just started."""
    connector = lockstep_connector(store, **QUICK, **extra)
    plan = Plan(model=group.model, phases=[Phase(PROMPTS, "all")], connector=connector, fault=fault)
    ranks = group.run(plan)
    restored_tokens(ranks[0], fault or "stores as the test left them")
    return ranks


def objects(folder: Path, rank: int) -> list[Path]:
    """Return the files of the pages in one rank's store, in a fixed order.

    Each namespace has a folder. One of them holds the pages and the mark of the group's TP size, which
    is one byte, the other the note on whose they are.
    """
    namespaces = (folder / f"rank{rank}" / "objects").iterdir()
    files = max((sorted(files_under(each)) for each in namespaces), key=len)
    return [path for path in files if path.stat().st_size > HEADER_BYTES + 1]


def files_under(folder: Path) -> list[Path]:
    """Return the files in a folder and below."""
    return [path for path in folder.rglob("*") if path.is_file()]


def test_one_rank_s_store_has_lost_every_second_page(
    group: Group, reference: list[Output], filled: str, tmp_path: Path
) -> None:
    """Rule R9. The ranks agree on the pages that both have."""
    lost = objects(tmp_path, SPOILED)[::2]
    for path in lost:
        path.unlink()

    ranks = run(group, filled)

    assert_exact(reference, ranks)
    assert outcomes(ranks, "prefetch").get("partial", 0) + outcomes(ranks, "prefetch")["miss"] > 0
    # What was computed again is written again.
    assert len(objects(tmp_path, SPOILED)) == len(objects(tmp_path, 0))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["down", "silent"])
def test_one_rank_s_store_is_down(
    group: Group, reference: list[Output], filled: str, fault: str
) -> None:
    ranks = run(group, filled, fault)

    assert_exact(reference, ranks)
    assert outcomes(ranks, "prefetch").get("complete", 0) == 0
    assert loaded_from_storage(ranks) == 0


@pytest.mark.slow
def test_one_rank_is_slower_on_every_read(
    group: Group, reference: list[Output], filled: str
) -> None:
    """The others wait for it, and use what it has by the deadline."""
    ranks = run(group, filled, "slow")

    assert_exact(reference, ranks)
    assert ranks[0].phases[0].seconds > SLOW_S
    assert loaded_from_storage(ranks) > 0


@pytest.mark.slow
def test_one_load_fails_half_way(group: Group, reference: list[Output], filled: str) -> None:
    """Its request computes on every rank, and what the load wrote is never read."""
    ranks = run(group, filled, "half a load")

    assert_exact(reference, ranks)
    assert outcomes(ranks, "load_back")["failed"] == 1
    assert outcomes(ranks, "load_back")["complete"] > 3


@pytest.mark.slow
def test_pages_that_are_corrupt_on_one_rank_s_disk_are_misses(
    group: Group, reference: list[Output], filled: str, tmp_path: Path
) -> None:
    spoiled = objects(tmp_path, SPOILED)[::10]
    for path in spoiled:
        flip_a_byte(path)

    ranks = run(group, filled)

    assert_exact(reference, ranks)
    assert ranks[SPOILED].stats["pages_corrupt"] > 0
    assert ranks[0].stats["pages_corrupt"] == 0


def test_a_poisoned_page_that_is_loaded_is_seen_by_the_comparison(
    group: Group, reference: list[Output], filled: str, tmp_path: Path
) -> None:
    """With the check of checksums off, the same damage changes what the model says."""
    for path in objects(tmp_path, SPOILED):
        flip_a_byte(path)

    ranks = run(group, filled, "trusting")

    told = differences(reference, ranks[0].phases[0].outputs)
    assert len(told) > REQUESTS // 2
    assert ranks[SPOILED].stats["pages_corrupt"] == 0


def outcomes(ranks: list[RankResult], kind: str) -> dict[str, int]:
    """Return how the operations of one kind ended, which is the same on every rank."""
    ended: list[dict[str, int]] = [
        result.stats["replica"]["operations"].get(kind, {}) for result in ranks
    ]
    assert ended[0] == ended[1]
    return ended[0]


def loaded_from_storage(ranks: list[RankResult]) -> int:
    """Return the tokens that came from the cache on top of what the engine's own one has."""
    kinds = outcomes(ranks, "load_back")
    return sum(kinds.values())
