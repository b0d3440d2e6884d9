"""Starts a group of vLLM ranks under torchrun, and compares what came of it, bit for bit."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.kit.source_tree import ROOT
from tests.kit.vllm.plan import Output, Plan, RankResult, read_result, write

RANKS = 2
START_S = 180
"""Longer than a start and its phases ever take here, shorter than anyone waits for a hang."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def lockstep_connector(store: str | None = None, **extra: Any) -> dict[str, Any]:
    """Return a `kv_transfer_config` with Lockstep; `extra` goes to its extra configuration."""
    settings = {"host_pages": 1200, **extra} | ({"store": store} if store else {})
    return {
        "kv_connector": "LockstepConnector",
        "kv_connector_module_path": "lockstep.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


def offloading_connector(
    store: str, *, host_bytes: int, canonical: bool = False, **tier: Any
) -> dict[str, Any]:
    """Return a `kv_transfer_config` of vLLM's offloading with Lockstep's tier below so much memory."""
    ours = "lockstep.integrations.vllm.tier"
    return {
        "kv_connector": "LockstepOffloadingConnector",
        "kv_connector_module_path": ours,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.kit.vllm.tier.cpu_tiering",
            "cpu_bytes_to_use": host_bytes,
            "canonical_layout": canonical,
            "secondary_tiers": [
                {
                    "type": "LockstepTier",
                    "module_path": ours,
                    "store": store,
                    "on_reset": "keep",
                    **tier,
                }
            ],
        },
    }


class Group:
    """Runs plans in a folder of their own, one after the other."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = str(model)
        self._runs = 0

    def run(self, plan: Plan, *, ranks: int = RANKS) -> list[RankResult]:
        """Start the ranks, wait for them, and return what came of the plan on each."""
        finished, folder = self.start(plan, ranks=ranks)
        assert finished.returncode == 0, _tail(finished)
        schedulers = 1 if plan.one_scheduler else ranks
        return [read_result(folder / f"rank{rank}.json") for rank in range(schedulers)]

    def start(
        self, plan: Plan, *, ranks: int = RANKS
    ) -> tuple[subprocess.CompletedProcess[str], Path]:
        """Start the ranks and wait for them; return how they ended and where they wrote."""
        self._runs += 1
        folder = self.folder / f"run{self._runs}"
        folder.mkdir()
        write(folder / "plan.json", plan)
        # Ranks on CPUs meet in shared memory under one name, and one that was killed leaves it there.
        for left in Path("/dev/shm").glob("*-cpushm_*"):  # noqa: S108 - it is what it is.
            left.unlink()
        torchrun = (
            "torch.distributed.run",
            *("--standalone", f"--nproc-per-node={ranks}", "--module"),
        )
        command = [
            *(sys.executable, "-m", *(() if plan.one_scheduler else torchrun)),
            *("tests.kit.vllm.rank", str(folder / "plan.json"), str(ranks)),
        ]
        # Ranks import what this process does, and what the tests share.
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": paths}
        finished = subprocess.run(
            command,
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        (folder / "log").write_text(finished.stdout + finished.stderr)
        return finished, folder


def differences(
    expected: Sequence[Output], found: Sequence[Output], *, rounding: float = 0.0
) -> list[str]:
    """Return a sentence for each request whose tokens or log-probabilities are not the same.

    Log-probabilities may differ by `rounding`, where the same sums were made in another order.
    """
    assert len(expected) == len(found)
    told: list[str] = []
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one.tokens != other.tokens:
            told.append(f"request {number}: tokens {other.tokens} instead of {one.tokens}")
        elif one.logprobs != other.logprobs:
            pairs = zip(one.logprobs, other.logprobs, strict=True)
            largest = max(abs(a - b) for a, b in pairs)
            if largest > rounding:
                told.append(f"request {number}: log-probabilities differ by up to {largest:g}")
    return told


def assert_exact(
    reference: list[Output], ranks: list[RankResult], *, rounding: float = 0.0
) -> None:
    """Every phase on every rank came to what the reference came to; see `differences`."""
    for rank, result in enumerate(ranks):
        for phase in result.phases:
            told = differences(reference, phase.outputs, rounding=rounding)
            assert told == [], f"rank {rank}, {phase.name}: {len(told)} requests differ: {told[:5]}"
    assert len({result.stats["digest"] for result in ranks if result.stats}) <= 1


def _tail(finished: subprocess.CompletedProcess[str]) -> str:
    return f"exit status {finished.returncode}:\n{(finished.stdout + finished.stderr)[-6000:]}"
