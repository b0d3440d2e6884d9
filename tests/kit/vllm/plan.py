"""Plans for a group of vLLM ranks and their results: plain data, stored as JSON."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tests.kit.vllm.mixed_prompts import Prompt

BLOCK_TOKENS = 32
"""Tokens per block of the engine."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests sent at once, after a reset of the engine's own prefix cache."""

    prompts: list[Prompt]
    name: str = "cold"
    output_tokens: int = 8
    reset_connector: bool = False
    """Also reset the connector's cache."""
    aborts: bool = False
    """Abort every second request while it runs; only the others have outputs."""
    sleeps: int = 0
    """How often the engine sleeps and wakes up while requests run. One more sleep follows after all
    have finished."""
    adapter: str = ""
    """The folder of the adapter that all requests use. Not combined with `aborts`."""
    weights: str = ""
    """A model folder whose weights are loaded before the phase."""
    weights_version: str = ""
    """The weights version that the engine is given then."""


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
    """The fault of the last rank; see `faults`."""
    one_scheduler: bool = False
    """Use one scheduler process with a worker for each rank, instead of a scheduler on every rank."""


NO_LOGPROB = -1e30


@dataclass(frozen=True, slots=True)
class Output:
    """The result of one request."""

    tokens: list[int]
    logprobs: list[float]
    """Log-probabilities of the chosen tokens; `NO_LOGPROB` for NaN."""
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """The result of a phase on one rank."""

    name: str
    outputs: list[Output]
    preemptions: int

    @property
    def cached_tokens(self) -> int:
        return sum(output.cached_tokens for output in self.outputs)


@dataclass(frozen=True, slots=True)
class RankResult:
    """The result of a plan on one rank."""

    phases: list[PhaseResult]
    stats: dict[str, Any]
    """The cache's statistics just before it closes; empty without Lockstep."""

    def phase(self, name: str) -> PhaseResult:
        return next(phase for phase in self.phases if phase.name == name)


def write(path: Path, value: Plan | RankResult) -> None:
    path.write_bytes(msgspec.json.encode(value))


def read_plan(path: Path) -> Plan:
    return msgspec.json.decode(path.read_bytes(), type=Plan)


def read_result(path: Path) -> RankResult:
    return msgspec.json.decode(path.read_bytes(), type=RankResult)
