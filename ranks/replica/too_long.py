"""Requests that even an empty device has no room for: they are refused by name, and do not wait."""

from ...errors import UsageError
from .state import ReplicaState
from .tree import DEVICE


def require_possible(state: ReplicaState, name: str, cached: int, reserve_tokens: int) -> None:
    """Raise `UsageError` for a request that would be told for ever to wait. Reads only.

    `cached` is how many pages of its prefix may be cached. Of pools beside full attention it is known
    only what even then is left to be computed.
    """
    reserved = max(cached, -(-reserve_tokens // state.config.page_tokens))
    for component in state.components:
        if not component.per_page:
            continue
        pool = state.pools[DEVICE][component.index]
        needed = reserved - cached if component.index else reserved
        if needed > pool.capacity:
            raise UsageError(
                f"request {name!r} needs {needed} {pool.name} pages of {state.config.page_tokens}"
                f" tokens, and there are {pool.capacity} in all: it can never be admitted; refuse it,"
                " or open the cache with more device pages"
            )
