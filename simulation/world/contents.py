"""Page contents represented by numbers.

A number represents the pool, the token prefix that ends with the page, and the rank whose shard the
page is. Checkers can therefore tell the right page from any wrong one without keys or trees. A
recurrent state has the number of the prefix that it follows. Numbers below one represent bytes that
belong to no prefix.
"""

from ...ranks.protocol.orders import KV_POOL

EMPTY = 0
"""The slot was never written."""
TORN = -1
"""A transfer is writing to this slot."""
GARBAGE = -2
"""A transfer into this slot has failed."""

SHARDS = 1 << 40
"""The content number of rank r's shard is the base number plus r times this."""

OVERWRITTEN = SHARDS - 1
"""Written by an engine over its pages after a request has left them."""

_NAMES = {EMPTY: "nothing", TORN: "a half-written page", GARBAGE: "garbage"}


def describe(held: int) -> str:
    """Return a description of a slot's content."""
    rank, content = divmod(held, SHARDS)
    if content == OVERWRITTEN and held > EMPTY:
        return f"what was written over a page that was left, of rank {rank}"
    return _NAMES.get(held) or f"content {content} of rank {rank}"


class ExpectedContents:
    """Numbers of token prefixes, equal only if pool, namespace, generation and all tokens are.

    Generations differ across resets, for example because the model got new weights.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str, int, bytes], int] = {}

    def of(self, namespace: str, prefix: bytes, generation: int = 0, *, pool: str = KV_POOL) -> int:
        """Return the content of the last page of `prefix`, which may be partly filled.

        For a pool of states, the content is the state after all of `prefix`.
        """
        name = (pool, namespace, generation, prefix)
        return self._numbers.setdefault(name, len(self._numbers) + 1)
