"""What a page may hold, as a number.

It stands for the pool, for the token prefix whose last page it is, and for the rank whose shard it
is, so the checkers can tell the right page from every wrong one without looking at keys or trees. A
recurrent state stands for the prefix after which it is the state. Numbers below one stand for bytes
that belong to nobody.
"""

from ..ranks.orders import KV_POOL

EMPTY = 0
"""Nothing was ever written here."""
TORN = -1
"""A transfer writes here at this moment."""
GARBAGE = -2
"""A transfer into this slot ended badly."""

SHARDS = 1 << 40
"""The shard of rank r is this many times r more than the content of which it is a shard."""

OVERWRITTEN = SHARDS - 1
"""What an engine writes over pages of its own that a request has left."""

_NAMES = {EMPTY: "nothing", TORN: "a half-written page", GARBAGE: "garbage"}


def describe(held: int) -> str:
    """Say in words what a slot holds."""
    rank, content = divmod(held, SHARDS)
    if content == OVERWRITTEN and held > EMPTY:
        return f"what was written over a page that was left, of rank {rank}"
    return _NAMES.get(held) or f"content {content} of rank {rank}"


class Contents:
    """Numbers for token prefixes: equal exactly when pool, namespace and all tokens are equal.

    What was computed before a reset and what is computed after it differ, too, as when the model has
    got new weights in between.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str, int, bytes], int] = {}

    def of(self, namespace: str, prefix: bytes, generation: int = 0, *, pool: str = KV_POOL) -> int:
        """Return the content of the last page of `prefix`, which may be partly filled.

        For a pool of states it is the state after all of `prefix`.
        """
        name = (pool, namespace, generation, prefix)
        return self._numbers.setdefault(name, len(self._numbers) + 1)
