"""The engine's blocks as device pages that are lent, by pool, and blocks that are held while copied.

A request's block tables are by group, and in each a block's place is that of its tokens. Block 0 is
nobody's: it stands where a window has moved past, and where no state was kept. A state is in the block
of the tokens that it comes after.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...ranks.group.host_cache import HostCache
from ...ranks.replica.operations.lent import NO_PAGE
from .contract import BlockPool
from .groups import Kind, PoolGroup
from .tracked import TrackedRequest

BlockTables = Sequence[Sequence[int]]
"""The block ids of a request, for each group of the engine's."""

Pages = npt.NDArray[np.int32]

NOBODYS = 0
"""The block that stands where a request has none."""


@dataclass(slots=True)
class HeldBlocks:
    """Blocks that backups read, and that a request may give up before these have ended on every rank.

    The engine's pool counts who uses a block, and gives it to nobody else while it is held here. Ranks
    hold and let go alike, since both follow from commands and verdicts.
    """

    pool: BlockPool | None = None
    _held: list[tuple[str, int, list[int]]] = field(
        default_factory=list[tuple[str, int, list[int]]]
    )

    @property
    def can_be_found(self) -> bool:
        """Whether the engine's own prefix cache finds any block in the pool, as far as is known."""
        return self.pool is not None and len(self.pool.cached_block_hash_to_block) > 0

    def hold(self, request: str, copy: int, blocks: Sequence[int]) -> None:
        """Keep blocks until a copy of a request's has ended."""
        assert self.pool is not None, "the engine has not given its block pool"
        self.pool.touch([self.pool.blocks[each] for each in blocks])
        self._held.append((request, copy, list(blocks)))

    def let_go(self, copies: Callable[[str], Collection[int]]) -> None:
        """Give back the blocks of copies that have ended: those not among a request's `copies`."""
        held, self._held = self._held, []
        for request, copy, blocks in held:
            if copy in copies(request):
                self._held.append((request, copy, blocks))
                continue
            assert self.pool is not None
            self.pool.free_blocks([self.pool.blocks[each] for each in blocks])


@dataclass(frozen=True, slots=True)
class Lending:
    """Says which blocks a request lends to each pool, and holds some of them."""

    pools: Sequence[PoolGroup]
    held: HeldBlocks = field(default_factory=HeldBlocks)
    """Those that are copied from."""

    @property
    def has_states(self) -> bool:
        """Whether a prefix can be restored only where a state was kept."""
        return any(pool.kind is Kind.STATE for pool in self.pools)

    def for_load(self, blocks: BlockTables, first: int, last: int) -> dict[str, Pages]:
        """Return what the pages of tokens from `first` to `last` are brought to."""
        return {
            pool.name: _pages(blocks, pool, last - 1 if pool.kind is Kind.STATE else first, last)
            for pool in self.pools
        }

    def for_backup(self, blocks: BlockTables, pages: int, *, state: bool) -> dict[str, Pages]:
        """Return what holds the first `pages` pages, and, if there is one, the `state` after them."""
        of_state = pages - 1 if state else pages
        return {
            pool.name: _pages(blocks, pool, of_state if pool.kind is Kind.STATE else 0, pages)
            for pool in self.pools
        }

    def passing(self, lent: dict[str, Pages]) -> list[int]:
        """Return the blocks among these that the request may give up while it still runs."""
        passing = [lent[pool.name] for pool in self.pools if pool.kind is not Kind.FULL]
        found = np.concatenate(passing) if passing else np.empty(0, dtype=np.int32)
        return [int(block) for block in found[found != NO_PAGE]]


def load(
    cache: HostCache, lending: Lending, tracked: TrackedRequest, blocks: BlockTables, tokens: int
) -> None:
    """Load what the engine takes of a request's hit, which may be less than it was promised.

    The load fails where that cannot be restored: a part of a page, or no window at its end.
    """
    start, unit = tracked.device_tokens, tracked.page_tokens
    taken = tracked.head(start + tokens)
    # Another `hit` would count as another question, for no more than is taken.
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
    if pool.kind is not Kind.FULL:
        found[found == NOBODYS] = NO_PAGE
    return found
