"""What reports and answers of a running SGLang come to."""

from collections.abc import Sequence

from tests.kit.sglang.requests import Answer, RankReport


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
