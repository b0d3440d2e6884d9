"""How much host memory it takes to hit a given share of all prompt tokens."""

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import TypedDict

from .evaluation import Evaluation
from .pools import GIB
from .settings import Point, Size
from .workers import Workers

_STEPS = 512
"""The answer is found to within such a part of what has room for the whole trace,"""
_WHOLE_FROM_GIB = 64
"""and in whole GiB if that is so much."""


class Goal(TypedDict):
    """The answer."""

    wanted: float
    ideal_ratio: float
    within_gib: float
    """How far the answer may be above the least."""
    point: Point | None
    """The smallest size that reaches it; None where none does."""


def reach(
    wanted: float,
    start: Size,
    evaluation: Evaluation,
    workers: Workers,
    tell: Callable[[str], None] = lambda _what: None,
) -> Goal:
    """Look for the least host memory of each rank with which the rest of `start` hits so much."""
    best = evaluation.ideal_tokens(start.page_tokens) / evaluation.tokens
    whole = evaluation.whole_gib(start.page_tokens)
    step = max(whole / _STEPS, evaluation.pools(start.page_tokens).nbytes(1, "host") / GIB)
    if whole >= _WHOLE_FROM_GIB:
        step = ceil(step)
    goal = Goal(wanted=wanted, ideal_ratio=best, within_gib=step, point=None)
    if best < wanted:
        return goal
    # In steps; none is too little unless the device alone is enough.
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
    """Return numbers that divide what is between evenly, or `enough` where nothing is."""
    gap = enough - too_little
    inner = {too_little + gap * part // (count + 1) for part in range(1, count + 1)}
    return sorted(inner - {too_little, enough}) or [enough]
