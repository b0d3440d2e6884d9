"""What is asked of a running SGLang, and what it answers: plain data that passes between processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, greedy and of a length that is fixed."""

    tokens: Sequence[int]
    output_tokens: int = 8
    salt: str | None = None
    """SGLang's `cache_salt`: what is cached under one is no hit under another."""
    adapter: str | None = None
    """The name of an adapter that the engine has loaded."""
    logprobs: bool = True
    """SGLang computes again what a request with them had decoded before it was retracted."""
    abort_after: int | None = None
    """Abort it once so many tokens have come out; 0: as soon as it has been sent to the scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of one request."""

    tokens: list[int]
    logprobs: list[float]
    """Of the tokens that were chosen, as the engine has them."""
    cached_tokens: int
    cached_by_tier: dict[str, Any]
    """SGLang's `cached_tokens_details`."""
    retractions: int
    finish: str
    """`length`, `stop` or `abort`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What the probe has counted on one rank since its scheduler began its loop."""

    rank: int
    iterations: int
    """Turns in which the scheduler chose a batch, or that there was none."""
    collectives: dict[str, int]
    """By `name from module.function`: the name in `torch.distributed`, and who called it."""
    cache: str
    """The class of the rank's prefix cache."""
    state: Any
    """What its `lockstep_state()` returned, through JSON; None where it has none."""


def differences(
    expected: Sequence[Answer], found: Sequence[Answer], *, tolerance: float = 0.0
) -> list[str]:
    """Return a sentence for each request with other tokens, or log-probabilities further apart."""
    told: list[str] = []
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one.tokens != other.tokens:
            told.append(f"request {number}: tokens {other.tokens} instead of {one.tokens}")
            continue
        pairs = zip(one.logprobs, other.logprobs, strict=True)
        apart = max((abs(a - b) for a, b in pairs), default=0.0)
        if apart > tolerance:
            told.append(f"request {number}: log-probabilities differ by up to {apart:g}")
    return told


def by_tier(answers: Sequence[Answer], tier: str) -> int:
    """Return how many tokens of all answers came from one tier."""
    return sum(answer.cached_by_tier.get(tier, 0) for answer in answers)


def rounds_beyond_iterations(
    before: Sequence[RankReport], after: Sequence[RankReport]
) -> list[int]:
    """Return how many more rounds than iterations each rank has had."""
    return [
        (end.state["rounds"] - begin.state["rounds"]) - (end.iterations - begin.iterations)
        for begin, end in zip(before, after, strict=True)
    ]


def growth(before: Sequence[RankReport], after: Sequence[RankReport], name: str) -> list[int]:
    """Return by how much a number in each rank's state has grown."""
    return [end.state[name] - begin.state[name] for begin, end in zip(before, after, strict=True)]
