"""What ranks of a group are to do, and what came of it on each."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from tests.kit.transformers.generated import Said


@dataclass(frozen=True)
class Phase:
    """Prompts, one after the other, with a cache that is opened for them or without any."""

    prompts: list[list[int]]
    settings: dict[str, Any] | None = None
    """Those of the cache; None for none."""
    apart: bool = False
    """Whether each rank begins the prompts with a token of its own, which it must not."""


@dataclass(frozen=True)
class PhaseResult:
    """What came of a phase on one rank."""

    said: list[Said]
    stats: dict[str, Any]
    error: str


def write_plan(path: Path, model: Path, phases: list[Phase]) -> None:
    """Write a plan for the ranks to read."""
    path.write_bytes(msgspec.json.encode((str(model), phases)))


def read_plan(path: Path) -> tuple[Path, list[Phase]]:
    """Read a plan."""
    model, phases = msgspec.json.decode(path.read_bytes(), type=tuple[str, list[Phase]])
    return Path(model), phases


def write_results(path: Path, results: list[PhaseResult]) -> None:
    """Write what came of a plan on one rank."""
    torch.save([(list(map(tuple, each.said)), each.stats, each.error) for each in results], path)


def read_results(path: Path) -> list[PhaseResult]:
    """Read what came of a plan on one rank."""
    return [
        PhaseResult([Said(*each) for each in said], stats, error)
        for said, stats, error in torch.load(path, weights_only=True)
    ]
