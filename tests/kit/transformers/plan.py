"""The phases that a group of Transformers ranks runs, and the result of each phase on a rank."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from tests.kit.transformers.generated import Generated


@dataclass(frozen=True)
class Phase:
    """Prompts that run one after the other, with or without a Lockstep cache."""

    prompts: list[list[int]]
    settings: dict[str, Any] | None = None
    """Settings of the Lockstep cache; None means that the phase runs without one."""
    apart: bool = False
    """Whether each rank prepends a different token to the prompts, so that the ranks diverge on
    purpose."""


@dataclass(frozen=True)
class PhaseResult:
    """The result of a phase on one rank."""

    outputs: list[Generated]
    stats: dict[str, Any]
    error: str


def write_plan(path: Path, model: Path, phases: list[Phase]) -> None:
    path.write_bytes(msgspec.json.encode((str(model), phases)))


def read_plan(path: Path) -> tuple[Path, list[Phase]]:
    model, phases = msgspec.json.decode(path.read_bytes(), type=tuple[str, list[Phase]])
    return Path(model), phases


def write_results(path: Path, results: list[PhaseResult]) -> None:
    torch.save([(list(map(tuple, each.outputs)), each.stats, each.error) for each in results], path)


def read_results(path: Path) -> list[PhaseResult]:
    return [
        PhaseResult([Generated(*each) for each in outputs], stats, error)
        for outputs, stats, error in torch.load(path, weights_only=True)
    ]
