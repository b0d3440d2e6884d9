"""Plans for a group of vLLM ranks, and the results: plain data, stored as JSON."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tests.kit.vllm.mixed_prompts import Prompt

BLOCK_TOKENS = 32
"""Number of tokens in a block of the engine."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests that are all sent at once, after a reset of vLLM's own prefix cache."""

    prompts: list[Prompt]
    name: str = "cold"
    output_tokens: int = 8
    reset_connector: bool = False
    """Whether the connector's cache is reset before the phase, in addition to vLLM's own prefix cache.
    """
    aborts: bool = False
    """Whether every second request is aborted while it runs. Only the other requests have outputs."""
    sleeps: int = 0
    """How often the engine sleeps and wakes up while requests run. If this is above 0, the engine
    sleeps once more after all requests have finished."""
    adapter: str = ""
    """Folder of the LoRA adapter that all requests use, or empty. Not combined with `aborts`."""
    weights: str = ""
    """Folder of the model whose weights are loaded before the phase, or empty."""
    weights_version: str = ""
    """Version of the weights that is reported to the engine before the phase, or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run of a vLLM engine on every rank: its arguments, and the phases that it serves."""

    model: str
    phases: list[Phase]
    engine: dict[str, Any] = field(default_factory=dict[str, Any])
    """Additional arguments of vLLM's `LLM`."""
    connector: dict[str, Any] | None = None
    """vLLM's `kv_transfer_config`, or None for an engine without a connector."""
    fault: str | None = None
    """Name of the fault to inject on the last rank (see `faults`), or None."""
    one_scheduler: bool = False
    """Whether one scheduler process serves the workers of all ranks. If False, every rank has a
    scheduler."""


NO_LOGPROB = -1e30


@dataclass(frozen=True, slots=True)
class Output:
    """The result of one request."""

    tokens: list[int]
    logprobs: list[float]
    """Log-probabilities of the chosen tokens; NaN is stored as `NO_LOGPROB`."""
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
    """The cache's statistics just before the cache is closed; empty without Lockstep."""

    def phase(self, name: str) -> PhaseResult:
        return next(phase for phase in self.phases if phase.name == name)


def write(path: Path, value: Plan | RankResult) -> None:
    path.write_bytes(msgspec.json.encode(value))


def read_plan(path: Path) -> Plan:
    return msgspec.json.decode(path.read_bytes(), type=Plan)


def read_result(path: Path) -> RankResult:
    return msgspec.json.decode(path.read_bytes(), type=RankResult)
