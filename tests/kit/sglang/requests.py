"""Requests to a running SGLang and their answers, as plain data passed between processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A greedy request with a fixed output length."""

    tokens: Sequence[int]
    output_tokens: int = 8
    salt: str | None = None
    """SGLang's `cache_salt`: requests share cached pages only with requests of the same salt."""
    adapter: str | None = None
    """Name of the loaded LoRA adapter that the request uses, or None."""
    logprobs: bool = True
    """Whether the answer has log-probabilities. If so, SGLang recomputes decoded tokens after a
    retraction."""
    abort_after: int | None = None
    """Number of output tokens after which the request is aborted. With 0 it is aborted as soon as the
    scheduler has received it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of one request."""

    tokens: list[int]
    logprobs: list[float]
    """Log-probabilities of the chosen tokens."""
    cached_tokens: int
    cached_by_tier: dict[str, Any]
    """SGLang's `cached_tokens_details`: the number of cached tokens by tier."""
    retractions: int
    finish: str
    """The finish reason: `length`, `stop`, `abort` or `refused`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank's probe counters since its scheduler entered its loop."""

    rank: int
    iterations: int
    """Number of scheduler iterations, including those without a batch."""
    collectives: dict[str, int]
    """Number of collectives, keyed by `name from module.function`: the name of a `torch.distributed`
    function, and the function's caller."""
    cache: str
    """Class name of the rank's prefix cache."""
    state: Any
    """The JSON form of `lockstep_state()`, or None if the prefix cache has no such method."""


def differences(
    expected: Sequence[Answer], found: Sequence[Answer], *, tolerance: float = 0.0
) -> list[str]:
    """Return a line for each request whose answers differ.

    Tokens must be equal. Log-probabilities may differ by up to `tolerance`.
    """
    lines: list[str] = []
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one.tokens != other.tokens:
            lines.append(f"request {number}: tokens {other.tokens} instead of {one.tokens}")
            continue
        pairs = zip(one.logprobs, other.logprobs, strict=True)
        apart = max((abs(a - b) for a, b in pairs), default=0.0)
        if apart > tolerance:
            lines.append(f"request {number}: log-probabilities differ by up to {apart:g}")
    return lines


def by_tier(answers: Sequence[Answer], tier: str) -> int:
    return sum(answer.cached_by_tier.get(tier, 0) for answer in answers)


def rounds_beyond_iterations(
    before: Sequence[RankReport], after: Sequence[RankReport]
) -> list[int]:
    """Return, for each rank, by how much rounds outnumber scheduler iterations between two reports."""
    return [
        (end.state["rounds"] - begin.state["rounds"]) - (end.iterations - begin.iterations)
        for begin, end in zip(before, after, strict=True)
    ]


def growth(before: Sequence[RankReport], after: Sequence[RankReport], name: str) -> list[int]:
    return [end.state[name] - begin.state[name] for begin, end in zip(before, after, strict=True)]
