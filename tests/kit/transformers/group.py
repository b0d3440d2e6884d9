"""Starts a tensor-parallel group of ranks under torchrun."""

import os
from pathlib import Path

from tests.kit.launch.replays import TORCHRUN, run
from tests.kit.source_tree import ROOT
from tests.kit.transformers.plan import Phase, PhaseResult, read_results, write_plan

RANKS = 2
START_S = 180
"""Seconds within which the ranks must start and run all phases."""


def run_ranks(folder: Path, model: Path, phases: list[Phase]) -> list[list[PhaseResult]]:
    """Run all phases on a group of ranks; return each rank's results, one for each phase."""
    folder.mkdir(parents=True)
    write_plan(folder / "plan.json", model, phases)
    ended = run(
        *TORCHRUN,
        "--standalone",
        f"--nproc-per-node={RANKS}",
        *("--module", "tests.kit.transformers.rank", folder / "plan.json"),
        timeout_s=START_S,
        # Let the ranks import the tests from this checkout, and other modules from this process's
        # import paths.
        PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        HF_HUB_OFFLINE="1",
    )
    assert ended.status == 0, (ended.out + ended.err)[-6000:]
    ranks = [read_results(folder / f"rank{rank}.pt") for rank in range(RANKS)]
    return [list(each) for each in zip(*ranks, strict=True)]
