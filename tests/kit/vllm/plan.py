"""What a group of vLLM ranks is to do, and what came of it: plain data, read and written as JSON."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tests.kit.vllm.mixed_prompts import Prompt

BLOCK_TOKENS = 32
"""How many tokens a block of the engine has."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests that are sent at once, after the engine has dropped its own prefix cache."""

    prompts: list[Prompt]
    name: str = "cold"
    output_tokens: int = 8
    reset_connector: bool = False
    """Drop what the connector has, too."""
    aborts: bool = False
    """Abort every second request while it runs; the others alone come to something."""
    sleeps: int = 0
    """How often the engine goes to sleep meanwhile and wakes up, with requests under way; and once when
    all have ended."""
    adapter: str = ""
    """The folder of the adapter that all of them use; not where requests are aborted."""
    weights: str = ""
    """The folder of a model whose weights are loaded in place of those of now, before all else."""
    weights_version: str = ""
    """What the engine is told of its weights then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One start of the engine on every rank."""

    model: str
    phases: list[Phase]
    engine: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of `LLM`."""
    connector: dict[str, Any] | None = None
    """`kv_transfer_config`, or None for an engine without a connector."""
    fault: str | None = None
    """What is wrong with the last rank; see `faults`."""
    one_scheduler: bool = False
    """One process schedules for a worker on each rank, in place of a scheduler on every rank."""


NO_LOGPROB = -1e30


@dataclass(frozen=True, slots=True)
class Output:
    """What came of one request."""

    tokens: list[int]
    logprobs: list[float]
    """Of the tokens that were chosen; `NO_LOGPROB` for NaN."""
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """What came of a phase on one rank."""

    name: str
    outputs: list[Output]
    preemptions: int

    @property
    def cached_tokens(self) -> int:
        """Tokens that were not computed, over all requests."""
        return sum(output.cached_tokens for output in self.outputs)


@dataclass(frozen=True, slots=True)
class RankResult:
    """What came of a plan on one rank."""

    phases: list[PhaseResult]
    stats: dict[str, Any]
    """Of the cache, right before it was closed; empty without Lockstep."""

    def phase(self, name: str) -> PhaseResult:
        """Return the phase of that name."""
        return next(phase for phase in self.phases if phase.name == name)


def write(path: Path, value: Plan | RankResult) -> None:
    """Write a plan or a result."""
    path.write_bytes(msgspec.json.encode(value))


def read_plan(path: Path) -> Plan:
    """Read a plan."""
    return msgspec.json.decode(path.read_bytes(), type=Plan)


def read_result(path: Path) -> RankResult:
    """Read a result."""
    return msgspec.json.decode(path.read_bytes(), type=RankResult)
