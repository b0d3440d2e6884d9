"""Requests that even an empty device has no room for: they are refused by name, and do not wait."""

from ...errors import UsageError
from .tree.matching import match
from .tree.node import DEVICE, Place
from .tree.prefixes import Prefixes


def require_possible(
    prefixes: Prefixes,
    name: str,
    place: Place,
    tokens: bytes,
    reserve_tokens: int,
) -> None:
    """Raise `UsageError` for a request that would be told for ever to wait. Reads only.

    What it needs beside full attention depends on what of it is cached now.
    """
    reserved = _pages(prefixes, reserve_tokens)
    if max(prefixes.tree.whole_pages(tokens), reserved) <= prefixes.device_least:
        # Nothing has to be looked up for nearly every request.
        return
    found = match(prefixes, place, tokens).host_tokens // prefixes.tree.page_tokens
    _require(prefixes, name, found, reserved)


def require_resumable(prefixes: Prefixes, name: str, prefix: int, reserve_tokens: int) -> None:
    """As `require_possible`, for a retracted request that shares `prefix` pages with the tree."""
    _require(prefixes, name, prefix, _pages(prefixes, reserve_tokens))


def _pages(prefixes: Prefixes, tokens: int) -> int:
    return -(-tokens // prefixes.tree.page_tokens)


def _require(prefixes: Prefixes, name: str, cached: int, reserved: int) -> None:
    for component in prefixes.components:
        if not component.per_page:
            continue
        pool = prefixes.residence.pools[DEVICE][component.index]
        # It holds what a match needs of what is cached, and gets pages for what follows.
        needed = max(cached, reserved) - component.needed_from(cached)
        if needed > pool.capacity:
            raise UsageError(
                f"request {name!r} needs {needed} {pool.name} pages of {prefixes.tree.page_tokens}"
                f" tokens, and there are {pool.capacity} in all: it can never be admitted; refuse it,"
                " reserve less at a time, or open the cache with more device pages"
            )
