"""Computes which prefixes of a prompt can be restored, from the pages in each pool. Pure.

A prefix is restorable if the main pool has all its pages and every other pool has the pages that its
hit policy requires. If a policy requires only the last pages, a longer prefix may be restorable while a
shorter one is not. The result is therefore a set of lengths, which ranks intersect: the minimum of the
ranks' maxima may be restorable on no rank.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from ....errors import UsageError
from .contract import HicacheTransfer
from .names import KV

ALL_PAGES: Final = "all_pages"
TRAILING_PAGES: Final = "trailing_pages"
BLOCK_GROUPS: Final = "block_groups"

Has = Callable[[str, str], bool]
"""Function that returns whether a pool (first argument) has the page with a key (second argument)."""


class LookupResult(NamedTuple):
    """Result of looking up one prompt's pages in the store."""

    pages: int
    """Length in pages of the longest restorable prefix."""
    pool_pages: dict[str, int]
    """Maps each pool's name to the length in pages of the longest prefix for which this pool has all
    required pages."""
    restorable: list[int]
    """Lengths of all restorable prefixes of at least one page, ascending."""


def keys_to_query(
    keys: Sequence[str], transfers: Sequence[HicacheTransfer]
) -> dict[str, list[str]]:
    """Return the page keys to look up in the store, by pool name and without duplicates."""
    queried_keys = {KV: list(dict.fromkeys(keys))}
    for transfer in transfers:
        of_pool = keys
        if transfer.hit_policy == BLOCK_GROUPS:
            of_pool = [key for group in _groups(keys, transfer) for key in group]
        queried_keys[transfer.name] = list(
            dict.fromkeys([*queried_keys.get(transfer.name, []), *of_pool])
        )
    return queried_keys


def restorable_prefixes(
    keys: Sequence[str], transfers: Sequence[HicacheTransfer], has: Has
) -> LookupResult:
    """Return the prefixes of `keys` that can be restored, considering the main pool and `transfers`.

    Raises `UsageError` for an unknown hit policy.
    """
    reach = _leading([has(KV, key) for key in keys])
    pools = {KV: reach}
    lengths = set(range(1, reach + 1))
    for transfer in transfers:
        name, policy = transfer.name, transfer.hit_policy
        if policy == BLOCK_GROUPS:
            # Keep prefixes with missing blocks in `lengths`. Blocks are not required, because they only
            # repeat main-pool pages in another form.
            whole = [all(has(name, key) for key in group) for group in _groups(keys, transfer)]
            pools[name] = _leading(whole) * transfer.block_pages
            continue
        there = [has(name, key) for key in keys[:reach]]
        if policy == ALL_PAGES:
            pools[name] = _leading(there)
            lengths &= set(range(1, pools[name] + 1))
        elif policy == TRAILING_PAGES:
            ends = _ends_of_runs(there, max(1, len(transfer.keys or ())))
            pools[name] = max(ends, default=0)
            lengths &= ends
        else:
            raise UsageError(
                f"SGLang's hit policy is {policy!r}, which this version does not support;"
                " update lockstep-kv"
            )
    ascending = sorted(lengths)
    return LookupResult(ascending[-1] if ascending else 0, pools, ascending)


def _groups(keys: Sequence[str], transfer: HicacheTransfer) -> list[Sequence[str]]:
    """Return the keys of each block (a group of `block_pages` pages of the main pool).

    The pool stores each block under `group_pages` keys: those in `transfer.keys` or, if `transfer.keys`
    is empty, the keys of the block's last pages.
    """
    block, group = transfer.block_pages, transfer.group_pages
    if block < 1 or group < 1:
        return []
    blocks = len(keys) // block
    if transfer.keys:
        given = transfer.keys
        return [
            given[at * group : (at + 1) * group] for at in range(min(blocks, len(given) // group))
        ]
    return [keys[(at + 1) * block - group : (at + 1) * block] for at in range(blocks)]


def _ends_of_runs(there: Sequence[bool], width: int) -> set[int]:
    """Return the lengths, in pages, of all prefixes whose last `width` pages are present.

    A prefix shorter than `width` needs all its pages.
    """
    ends, run = set[int](), 0
    for number, is_there in enumerate(there, start=1):
        run = run + 1 if is_there else 0
        if run >= min(width, number):
            ends.add(number)
    return ends


def _leading(there: Sequence[bool]) -> int:
    return next((at for at, is_there in enumerate(there) if not is_there), len(there))
