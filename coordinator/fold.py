"""The fold of many ballots to one vector, and the check that the ranks agree on what it means."""

from collections.abc import Sequence
from functools import reduce

import numpy as np

from .collective import Vector
from .lanes import PAIRS


def fold(ballots: Sequence[Vector] | Vector) -> Vector:
    """Return the element-wise minimum: what `all_reduce(MIN)` gives every rank.

    `ballots` are vectors, or one array with a row for each. One alone is returned as it is.
    """
    return reduce(np.minimum, ballots)


def disagreements(header: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the folded header's pairs that are not equal over the ranks.

    A pair (x, -x) folds to (min x, -max x): the ranks are equal exactly if the sum is zero.
    """
    different: tuple[str, ...] = ()
    for name, at in PAIRS.items():
        if header[at] + header[at + 1]:
            different += (name,)
    return different
