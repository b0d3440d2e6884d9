"""Starts a group of vLLM ranks, and compares the ranks' results bit for bit."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.kit.servers.ports import free_port
from tests.kit.vllm.plan import Output, Plan, RankResult, read_result, write
from tests.kit.vllm.processes import START_S, Ended, Program, environment, run_together

RANKS = 2
RANK = "tests.kit.vllm.rank"
NOTHING: dict[str, str] = {}
QUICK: dict[str, Any] = {
    "stop_policy": {"base_s": 0.5, "per_ki_token_s": 0.25, "cap_s": 5},
    "timeouts": {"lookup_s": 0.5, "persist_s": 5, "quiesce_s": 1},
}
"""Lockstep settings with short timeouts, so that a failing store delays requests only briefly."""


def lockstep_connector(store: str | None = None, **extra: Any) -> dict[str, Any]:
    """Return a `kv_transfer_config` that selects Lockstep; `extra` are Lockstep's own settings."""
    settings = {"host_pages": 1200, **extra} | ({"store": store} if store else {})
    return {
        "kv_connector": "LockstepConnector",
        "kv_connector_module_path": "lockstep.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


class Group:
    """Runs plans on a group of vLLM ranks, one after the other, each in a separate folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = str(model)
        self._runs = 0

    def run(self, plan: Plan, *, ranks: int = RANKS) -> list[RankResult]:
        """Run a plan until all ranks have exited; return the plan's result on each rank."""
        ended, folder = self.start(plan, ranks=ranks)
        ended.check()
        schedulers = 1 if plan.one_scheduler else ranks
        return [read_result(folder / f"rank{rank}.json") for rank in range(schedulers)]

    def start(self, plan: Plan, *, ranks: int = RANKS) -> tuple[Ended, Path]:
        """Run a plan until all ranks have exited; return their exit states and the output folder."""
        folder = self._new_run(plan)
        arguments = [folder / "plan.json", ranks]
        environments = [NOTHING] if plan.one_scheduler else rank_environments(ranks)
        ended = run_together([Program(RANK, arguments, each) for each in environments], folder)
        (folder / "log").write_text(ended.output)
        return ended, folder

    def start_by_torchrun(self, plan: Plan) -> subprocess.CompletedProcess[str]:
        """Run a plan under torchrun, as users do; return torchrun's exit state."""
        folder = self._new_run(plan)
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
        return subprocess.run(
            [sys.executable, *torchrun, "-m", RANK, str(folder / "plan.json"), str(RANKS)],
            env={**os.environ, **environment()},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )

    def _new_run(self, plan: Plan) -> Path:
        self._runs += 1
        folder = self.folder / f"run{self._runs}"
        folder.mkdir()
        write(folder / "plan.json", plan)
        # Delete the shared memory of vLLM's CPU ranks. It has a fixed name, and a killed rank leaves it
        # behind.
        for left in Path("/dev/shm").glob("*-cpushm_*"):  # noqa: S108 - it is what it is.
            left.unlink()
        return folder


def rank_environments(ranks: int) -> list[dict[str, str]]:
    """Return the environment variables that torchrun would set for each rank."""
    port = str(free_port())
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        for rank in range(ranks)
    ]


def differences(
    expected: Sequence[Output], found: Sequence[Output], *, rounding: float = 0.0
) -> list[str]:
    """Return a line for each request whose tokens or log-probabilities differ.

    Tokens must be equal. Log-probabilities may differ by up to `rounding`, because a sum of floats
    depends on its order.
    """
    assert len(expected) == len(found)
    lines: list[str] = []
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one.tokens != other.tokens:
            lines.append(f"request {number}: tokens {other.tokens} instead of {one.tokens}")
        elif one.logprobs != other.logprobs:
            pairs = zip(one.logprobs, other.logprobs, strict=True)
            largest = max(abs(a - b) for a, b in pairs)
            if largest > rounding:
                lines.append(f"request {number}: log-probabilities differ by up to {largest:g}")
    return lines


def assert_exact(
    reference: list[Output], ranks: list[RankResult], *, rounding: float = 0.0
) -> None:
    """Assert that every phase on every rank equals the reference; see `differences`."""
    for rank, result in enumerate(ranks):
        for phase in result.phases:
            lines = differences(reference, phase.outputs, rounding=rounding)
            assert lines == [], (
                f"rank {rank}, {phase.name}: {len(lines)} requests differ: {lines[:5]}"
            )
    assert len({result.stats["digest"] for result in ranks if result.stats}) <= 1
