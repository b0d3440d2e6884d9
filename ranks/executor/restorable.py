"""The lengths of a prefix that can be restored from what a store has and what host memory holds.

A length is restorable if every pool has what a match of that length needs: full attention every page
from the start, a sliding window the pages of its trailing window, a recurrent state the one object at
its end. Only the first is closed downward; the set of lengths that meet all is not.
"""

from collections.abc import Sequence

from ..protocol.orders import LookUp, Need


def restorable(order: LookUp, present: Sequence[Sequence[bool]]) -> tuple[int, tuple[int, ...]]:
    """Return the restorable lengths of a lookup, as `coordinator.ballot.Answered` has them.

    `present` says by need and key what the store has. It may be shorter than the keys: what is
    beyond its end is not there, and neither is what has an empty key.
    """
    full, *others = order.needs
    last = full.first + leading(full, present[0])
    if not others:
        # A prefix that begins at the floor: every length up to the last page is there.
        return max(0, last - order.floor), ()
    common, *rest = [_ends(need, has, last) for need, has in zip(others, present[1:], strict=True)]
    common = common.intersection(*rest)
    return 0, tuple(end - order.floor for end in sorted(common) if end > order.floor)


def leading(need: Need, present: Sequence[bool]) -> int:
    """Return how many of the positions of a need, from its first on, are there without a gap."""
    if not need.on_host:
        # Nearly always; and then this takes no time for each position.
        keys = need.keys
        present = [*present[: len(keys)], False]
        return min(present.index(False), keys.index(b"") if b"" in keys else len(keys))
    for index in range(len(need.keys)):
        if not _there(need, need.first + index, present):
            return index
    return len(need.keys)


def _there(need: Need, position: int, present: Sequence[bool]) -> bool:
    index = position - need.first
    in_store = 0 <= index < len(present) and present[index] and need.keys[index] != b""
    return in_store or position in need.on_host


def _ends(need: Need, present: Sequence[bool], last: int) -> set[int]:
    """Return the positions, up to `last`, where a prefix may end as far as this need goes."""
    assert need.span is not None
    ends: set[int] = set()
    run = 0
    for position in range(min((need.first, *need.on_host)), last):
        run = run + 1 if _there(need, position, present) else 0
        if run >= min(need.span, position + 1):
            ends.add(position + 1)
    return ends
