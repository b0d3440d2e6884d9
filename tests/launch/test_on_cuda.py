"""Replays with device pages on one GPU that two ranks share: every page is restored whole."""

from pathlib import Path

import pytest

from lockstep.launch.replay.report import Report
from lockstep.small_engine.profiles import PROFILES
from tests.kit.launch.replays import replay, torchrun

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

PRESSURE = ("--device-pages", 120, "--host-pages", 110, "--concurrency", 4, "--requests", 24)


def on_cuda(report: Path, *arguments: object) -> Report:
    """Replay on two ranks, with a stop policy that waits for pages, so a slow start loses no hits."""
    policy = ("--stop-policy", "wait_complete", "--device", "cuda")
    return replay(report, *arguments, *policy, start=torchrun(2))


@pytest.mark.parametrize("profile", PROFILES)
def test_every_pool_of_every_model_comes_back_to_a_gpu_exactly(
    tmp_path: Path, profile: str
) -> None:
    store = ("--store", (tmp_path / "store").as_uri(), "--profile", profile)

    report = on_cuda(tmp_path / "report.json", *PRESSURE, *store)

    assert report["pages_corrupt"] == report["storage_corrupt"] == 0
    assert report["violations"] == []
    assert len(set(report["digests"])) == 1
    assert report["bytes"]["l1_to_l2"] > 0
    assert report["bytes"]["l2_to_l1"] > 0
    assert all(pool["pages_verified"] > 0 for pool in report["pools"].values())


def test_what_a_gpu_s_ranks_persist_a_processor_s_ranks_find(tmp_path: Path) -> None:
    arguments = ("--requests", 20, "--store", (tmp_path / "store").as_uri(), "--concurrency", 1)
    policy = ("--stop-policy", "wait_complete")

    on_cuda(tmp_path / "cold.json", *arguments)
    found = replay(tmp_path / "warm.json", *arguments, *policy, start=torchrun(2))

    assert found["pages_corrupt"] == found["storage_corrupt"] == 0
    assert found["hit_tokens"]["storage"] > 0
    assert found["pages_verified"] > 0
