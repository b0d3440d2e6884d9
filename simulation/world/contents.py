"""What a page may hold, as a number.

The number stands for the pool, for the token prefix whose last page it is, and for the rank whose shard
it is. So the checkers tell the right page from every wrong one without keys or trees. A recurrent state
has the number of the prefix after which it is the state. Numbers below one stand for bytes that belong
to no prefix.
"""

from ...ranks.protocol.orders import KV_POOL

EMPTY = 0
"""Nothing was ever written to this slot."""
TORN = -1
"""A transfer is writing to this slot."""
GARBAGE = -2
"""A transfer into this slot has failed."""

SHARDS = 1 << 40
"""The shard of rank r has this many times r added to the content's number."""

OVERWRITTEN = SHARDS - 1
"""What an engine writes over its own pages after a request has left them."""

_NAMES = {EMPTY: "nothing", TORN: "a half-written page", GARBAGE: "garbage"}


def describe(held: int) -> str:
    """Return in words what a slot holds."""
    rank, content = divmod(held, SHARDS)
    if content == OVERWRITTEN and held > EMPTY:
        return f"what was written over a page that was left, of rank {rank}"
    return _NAMES.get(held) or f"content {content} of rank {rank}"


class Contents:
    """Numbers for token prefixes, equal exactly when pool, namespace, generation and all tokens are.

    What was computed before a reset differs from what is computed after it, as when the model has got
    new weights in between.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str, int, bytes], int] = {}

    def of(self, namespace: str, prefix: bytes, generation: int = 0, *, pool: str = KV_POOL) -> int:
        """Return the content of the last page of `prefix`, which may be partly filled.

        For a pool of states it is the state after all of `prefix`.
        """
        name = (pool, namespace, generation, prefix)
        return self._numbers.setdefault(name, len(self._numbers) + 1)
