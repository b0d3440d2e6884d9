"""Search for the least host memory with which a cache reaches a given hit ratio."""

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import TypedDict

from .evaluation import Evaluation
from .plan_settings import PlanPoint, Size
from .pools import GIB
from .workers import Workers

_STEPS = 512
"""The search divides the host memory that holds the whole trace into this number of steps."""
_WHOLE_FROM_GIB = 64
"""If the whole trace needs at least this many GiB, the step of the search is a whole number of GiB."""


class Goal(TypedDict):
    """Result of the search for a hit ratio."""

    wanted: float
    ideal_ratio: float
    within_gib: float
    """Step of the search in GiB; the true minimum is at most one step smaller than the result."""
    point: PlanPoint | None
    """The smallest size that reaches the wanted hit ratio; None if no size reaches it."""


def reach(
    wanted: float,
    start: Size,
    evaluation: Evaluation,
    workers: Workers,
    tell: Callable[[str], None] = lambda _what: None,
) -> Goal:
    """Search for the least host memory per rank that reaches the hit ratio `wanted`.

    All other sizes are those of `start`.
    """
    best = evaluation.ideal_tokens(start.page_tokens) / evaluation.tokens
    whole = evaluation.whole_gib(start.page_tokens)
    step = max(whole / _STEPS, evaluation.pools(start.page_tokens).nbytes(1, "host") / GIB)
    if whole >= _WHOLE_FROM_GIB:
        step = ceil(step)
    goal = Goal(wanted=wanted, ideal_ratio=best, within_gib=step, point=None)
    if best < wanted:
        return goal
    # Count memory in steps of the search. Begin with -1 as a size that is too small, because size 0
    # (no host memory) is possibly enough.
    too_little, enough = -1, ceil(whole / step)
    while enough - too_little > 1 or goal["point"] is None:
        tries = _between(too_little, enough, workers.count)
        tell(f"{', '.join(f'{at * step:,.4g}' for at in tries)} GiB of host memory")
        points = workers.evaluate([replace(start, host_gib=at * step) for at in tries])
        for at, point in zip(tries, points, strict=True):
            if point["hit_ratio"] >= wanted:
                goal["point"], enough = point, at
                break
            too_little = at
        if goal["point"] is None and too_little >= enough:
            return goal
    return goal


def _between(too_little: int, enough: int, count: int) -> list[int]:
    """Return up to `count` sizes evenly spaced between `too_little` and `enough`.

    Return only `enough` if there is no size between the two.
    """
    gap = enough - too_little
    inner = {too_little + gap * part // (count + 1) for part in range(1, count + 1)}
    return sorted(inner - {too_little, enough}) or [enough]
