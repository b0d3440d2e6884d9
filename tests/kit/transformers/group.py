"""Starts a group of ranks under torchrun, which divide a model by its heads."""

import os
from pathlib import Path

from tests.kit.launch.replays import TORCHRUN, run
from tests.kit.source_tree import ROOT
from tests.kit.transformers.plan import Phase, PhaseResult, read_results, write_plan

RANKS = 2
START_S = 180
"""Longer than a start and its phases ever take here, shorter than anyone waits for a hang."""


def run_ranks(folder: Path, model: Path, phases: list[Phase]) -> list[list[PhaseResult]]:
    """Have all phases carried out by a group; return what came of each on every rank."""
    folder.mkdir(parents=True)
    write_plan(folder / "plan.json", model, phases)
    ended = run(
        *TORCHRUN,
        "--standalone",
        f"--nproc-per-node={RANKS}",
        *("--module", "tests.kit.transformers.rank", folder / "plan.json"),
        timeout_s=START_S,
        # Ranks import what this process does, and what the tests share.
        PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        HF_HUB_OFFLINE="1",
    )
    assert ended.status == 0, (ended.out + ended.err)[-6000:]
    ranks = [read_results(folder / f"rank{rank}.pt") for rank in range(RANKS)]
    return [list(each) for each in zip(*ranks, strict=True)]
