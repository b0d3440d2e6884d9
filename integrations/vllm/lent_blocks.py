"""vLLM's blocks as engine-owned device pages (lent), and blocks kept allocated during copies.

A request has one block table per layer group, in token order. Block 0 is vLLM's placeholder for a
missing block. A recurrent state has the same position in its table as the last tokens that it covers.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...ranks.group.host_cache import HostCache
from ...ranks.replica.operations.lent import NO_PAGE
from .contract import BlockPool
from .groups import GroupKind, PoolGroup
from .tracked import TrackedRequest

BlockTables = Sequence[Sequence[int]]
"""A request's block ids in token order, one sequence per layer group."""

Pages = npt.NDArray[np.int32]

NOBODYS = 0
"""Block id of vLLM's placeholder for a missing block."""


@dataclass(slots=True)
class HeldBlocks:
    """Blocks kept allocated because a request may free them before a backup has read them on all ranks.

    A refcount in vLLM's block pool keeps a block allocated. All ranks hold and free the same blocks,
    because they follow the same commands and verdicts.
    """

    pool: BlockPool | None = None
    _held: list[tuple[str, int, list[int]]] = field(
        default_factory=list[tuple[str, int, list[int]]]
    )

    @property
    def can_be_found(self) -> bool:
        """Whether vLLM's prefix cache has any block; False until the block pool is set."""
        return self.pool is not None and len(self.pool.cached_block_hash_to_block) > 0

    def hold(self, request: str, copy: int, blocks: Sequence[int]) -> None:
        """Hold a request's blocks, by refcount, until the copy with the id `copy` has finished."""
        assert self.pool is not None, "the engine has not given its block pool"
        self.pool.touch([self.pool.blocks[each] for each in blocks])
        self._held.append((request, copy, list(blocks)))

    def let_go(self, copies: Callable[[str], Collection[int]]) -> None:
        """Release blocks whose copies have finished.

        `copies` is a function that returns the copies in flight of a request.
        """
        held, self._held = self._held, []
        for request, copy, blocks in held:
            if copy in copies(request):
                self._held.append((request, copy, blocks))
                continue
            assert self.pool is not None
            self.pool.free_blocks([self.pool.blocks[each] for each in blocks])


@dataclass(frozen=True, slots=True)
class LentBlocks:
    """Selects a request's blocks for a copy, by pool; holds those that the request may free early."""

    pools: Sequence[PoolGroup]
    held: HeldBlocks = field(default_factory=HeldBlocks)
    """Blocks kept allocated by an incremented refcount, because copies in flight read them."""

    @property
    def has_states(self) -> bool:
        """Whether a prefix can be restored only up to a token with a saved recurrent state."""
        return any(pool.kind is GroupKind.STATE for pool in self.pools)

    def for_load(self, blocks: BlockTables, first: int, last: int) -> dict[str, Pages]:
        """Return the blocks that a load of pages `first` to `last` (exclusive) fills, by pool."""
        return {
            pool.name: _pages(
                blocks, pool, last - 1 if pool.kind is GroupKind.STATE else first, last
            )
            for pool in self.pools
        }

    def for_backup(self, blocks: BlockTables, pages: int, *, state: bool) -> dict[str, Pages]:
        """Return the blocks from which a backup of the first `pages` pages reads, by pool.

        With `state`, the recurrent state at the end of these pages is included.
        """
        of_state = pages - 1 if state else pages
        return {
            pool.name: _pages(blocks, pool, of_state if pool.kind is GroupKind.STATE else 0, pages)
            for pool in self.pools
        }

    def passing(self, lent: dict[str, Pages]) -> list[int]:
        """Return the ids of window and state blocks in `lent`, which a running request may free."""
        passing = [lent[pool.name] for pool in self.pools if pool.kind is not GroupKind.FULL]
        found = np.concatenate(passing) if passing else np.empty(0, dtype=np.int32)
        return [int(block) for block in found[found != NO_PAGE]]


def load(
    cache: HostCache, lending: LentBlocks, tracked: TrackedRequest, blocks: BlockTables, tokens: int
) -> None:
    """Load the first `tokens` tokens of a request's host match, as many as the engine has accepted.

    The load fails if these tokens cannot be restored, for example because they end inside a page.
    """
    start, unit = tracked.device_tokens, tracked.page_tokens
    taken = tracked.head(start + tokens)
    # Use `match`: `match_host` would count this lookup as a second query in the statistics.
    found = cache.match(taken, tracked.namespace).host_tokens
    if found == start + tokens:
        lent = lending.for_load(blocks, start // unit, (start + tokens) // unit)
        cache.load(tracked.name, taken, lent, device_tokens=start)
    else:
        tracked.failures += 1
        tracked.refused = True
    tracked.loaded = True


def _pages(blocks: BlockTables, pool: PoolGroup, first: int, last: int) -> Pages:
    found = np.array(blocks[pool.group][first:last], dtype=np.int32)
    if pool.kind is not GroupKind.FULL:
        found[found == NOBODYS] = NO_PAGE
    return found
