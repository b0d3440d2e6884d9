"""Page contents of simulated memory, represented by numbers.

A content number stands for a pool, the token prefix that ends with the page, and the rank whose shard
the page is. Checkers can therefore recognise the right page without keys or trees. A recurrent state
has the number of the prefix after which it was taken. Numbers below one represent bytes that belong to
no prefix.
"""

from ...ranks.protocol.orders import KV_POOL

EMPTY = 0
"""Content of a slot that was never written."""
TORN = -1
"""Content of a slot while a transfer writes to it."""
GARBAGE = -2
"""Content of a slot after a transfer into it has failed."""

SHARDS = 1 << 40
"""A rank's offset is its number times this constant. A shard's content number is the number of the
prefix plus the offset of the shard's rank."""

OVERWRITTEN = SHARDS - 1
"""Content that an engine writes over a request's freed pages before other requests use the pages."""

_NAMES = {EMPTY: "nothing", TORN: "a half-written page", GARBAGE: "garbage"}


def describe(held: int) -> str:
    """Return a description of a slot's content for use in a violation message."""
    rank, content = divmod(held, SHARDS)
    if content == OVERWRITTEN and held > EMPTY:
        return f"what was written over a page that was left, of rank {rank}"
    return _NAMES.get(held) or f"content {content} of rank {rank}"


class ExpectedContents:
    """Gives numbers to token prefixes: equal only if pool, namespace, generation and tokens are equal.

    Each reset, for example after a change of weights, begins a new generation.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str, int, bytes], int] = {}

    def of(self, namespace: str, prefix: bytes, generation: int = 0, *, pool: str = KV_POOL) -> int:
        """Return the content number of the last page of `prefix`; the page may be partly filled.

        For a pool of states, return the number of the state after all of `prefix`.
        """
        name = (pool, namespace, generation, prefix)
        return self._numbers.setdefault(name, len(self._numbers) + 1)
