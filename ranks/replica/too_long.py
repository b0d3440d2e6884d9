"""Requests that even an empty device has no room for: they are refused by name, and do not wait."""

from ...errors import UsageError
from .matching import match
from .state import ReplicaState
from .tree import DEVICE


def require_possible(
    state: ReplicaState, name: str, namespace: str, tokens: bytes, reserve_tokens: int
) -> None:
    """Raise `UsageError` for a request that would be told for ever to wait. Reads only.

    What it needs beside full attention depends on what of it is cached now.
    """
    reserved = _pages(state, reserve_tokens)
    most = max(state.tree.whole_pages(tokens), reserved)
    capacities = [state.pools[DEVICE][each.index].capacity for each in state.components]
    # What nothing has to be looked up for: nearly every request.
    if all(
        most <= capacity
        for each, capacity in zip(state.components, capacities, strict=True)
        if each.per_page
    ):
        return
    found = match(state, state.place(namespace), tokens).host_tokens // state.config.page_tokens
    _require(state, name, found, reserved)


def require_resumable(state: ReplicaState, name: str, prefix: int, reserve_tokens: int) -> None:
    """As `require_possible`, of a request that comes back to so many pages of its prefix."""
    _require(state, name, prefix, _pages(state, reserve_tokens))


def _pages(state: ReplicaState, tokens: int) -> int:
    return -(-tokens // state.config.page_tokens)


def _require(state: ReplicaState, name: str, cached: int, reserved: int) -> None:
    for component in state.components:
        if not component.per_page:
            continue
        pool = state.pools[DEVICE][component.index]
        # It holds what a match needs of what is cached, and gets pages for what follows.
        needed = max(cached, reserved) - component.needed_from(cached)
        if needed > pool.capacity:
            raise UsageError(
                f"request {name!r} needs {needed} {pool.name} pages of {state.config.page_tokens}"
                f" tokens, and there are {pool.capacity} in all: it can never be admitted; refuse it,"
                " reserve less at a time, or open the cache with more device pages"
            )
