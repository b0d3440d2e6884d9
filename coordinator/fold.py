"""The fold of many ballots to one vector, and the check that the ranks agree on what it means."""

from collections.abc import Sequence

import numpy as np

from .collective import Vector
from .lanes import HEADER_LANES, PAIRS


def fold(ballots: Sequence[Vector] | Vector) -> Vector:
    """Return the element-wise minimum: what `all_reduce(MIN)` gives every rank.

    `ballots` are vectors, or one array with a row for each.
    """
    folded: Vector = np.minimum.reduce(ballots)
    return folded


def disagreements(folded: Vector) -> tuple[str, ...]:
    """Return the names of the header's pairs that are not equal over the ranks.

    A pair (x, -x) folds to (min x, -max x): the ranks are equal exactly if the sum is zero.
    """
    header: list[int] = folded[:HEADER_LANES].tolist()
    return tuple(name for name, at in PAIRS.items() if header[at] + header[at + 1])
