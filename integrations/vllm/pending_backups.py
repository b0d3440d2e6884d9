"""Backups of a request's whole pages, also those that host memory has no room for yet.

What found no room is tried again in later passes, also after the request has ended, until it has gone
to host memory and the store, or there was no progress for `PATIENCE_S`. No block is held for that: a
block that is free keeps its content until the engine hands it out again, and the engine says when it
does so (`BlockPool.unpin_blocks`). From the first page on that is gone, a backup is given up. So the
engine's own prefix cache can be emptied at any time, and no request waits for blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...ranks.group.host_cache import HostCache
from ...ranks.protocol.orders import KV_POOL
from ...ranks.replica.operations.lent import NO_PAGE
from .contract import BlockState
from .groups import Kind
from .lending import Lending, Pages
from .tracked import TrackedRequest

PATIENCE_S = 10.0
"""A backup that has come no further for so long, in agreed time, is given up."""
LAST_WAIT_S = 1.0
"""For so long an engine that has nothing left to compute goes on with backups, in agreed time."""
REQUESTS_MAX = 64
"""Of at most so many requests backups wait; the oldest are given up for others."""
TRIES_MAX = 4
"""So many are tried in one pass."""


@dataclass(slots=True, eq=False)
class _Backup:
    """The pages of a prefix, and the blocks that held them when they were computed."""

    tokens: bytes
    lent: dict[str, Pages]
    state: bool
    """Whether they end with a state."""

    def blocks(self) -> list[int]:
        """Return the blocks that are not gone."""
        lent = np.concatenate(list(self.lent.values()))
        return [int(block) for block in np.unique(lent[lent != NO_PAGE])]

    def intact(self) -> int:
        """Return how many of the first pages are in their blocks still."""
        gone = np.flatnonzero(self.lent[KV_POOL] == NO_PAGE)
        return int(gone[0]) if len(gone) else len(self.lent[KV_POOL])


@dataclass(slots=True, eq=False)
class _Pending:
    """The backups that a request still waits for, the shortest prefix first."""

    tracked: TrackedRequest
    name: str
    namespace: str
    until_ms: int
    backups: list[_Backup] = field(default_factory=list[_Backup])
    ended: bool = False
    """Whether the engine has done with the request, so that it is released with its last backup."""


class PendingBackups:
    """Backs up what requests compute, in this pass or in a later one."""

    def __init__(self, cache: HostCache, lending: Lending) -> None:
        self._cache = cache
        self._lending = lending
        self._states = [pool.name for pool in lending.pools if pool.kind is Kind.STATE]
        self._pending: dict[str, _Pending] = {}

    def __contains__(self, name: str) -> bool:
        """Say whether a request's backup waits."""
        return name in self._pending

    def __len__(self) -> int:
        """Return of how many requests backups wait."""
        return len(self._pending)

    @property
    def is_due(self) -> bool:
        """Whether the next pass may bring one further."""
        return any(map(self._cache.backup_is_due, self._pending))

    def back_up(self, tracked: TrackedRequest, scheduled: int, blocks: BlockState) -> None:
        """Back up the whole pages that a request fills with the tokens that are scheduled for it.

        Not those of former weights, which nobody else may get.
        """
        computed, known = tracked.tokens_after(scheduled)
        pages = known // tracked.page_tokens
        if tracked.stale or pages <= tracked.lent_pages:
            return
        tracked.lent_pages = pages
        length = pages * tracked.page_tokens
        # A state is not the one after a page if it has gone beyond, or may yet go back.
        state = computed == known == length
        if state and length <= tracked.loadable_elsewhere:
            tracked.state_pages = pages
        tables = blocks.resolve_block_ids(tracked.request.request_id)
        backup = _Backup(
            tracked.head(length),
            self._lending.for_backup(tables, pages, state=state),
            state and bool(self._states),
        )
        pending = self._pending.get(tracked.name)
        if pending is None:
            self._copy(tracked.name, tracked.namespace, backup, self._lending.passing(backup.lent))
            if not self._cache.awaits_room(tracked.name):
                return
            pending = self._wait_for(tracked)
        elif len(pending.backups) > 1 and not pending.backups[-1].state:
            # The longer one has all but the ends of windows in between.
            pending.backups.pop()
        pending.backups.append(backup)
        self._watch(backup)

    def try_again(self) -> None:
        """Go on with backups for which there may be room by now; once in each pass."""
        tries, now_ms = 0, self._cache.inspection.agreed_ms
        for pending in list(self._pending.values()):
            if not self._cache.awaits_room(pending.name) or now_ms > pending.until_ms:
                self._give_up(pending)
            elif tries < TRIES_MAX and self._cache.backup_is_due(pending.name):
                tries += 1
                self._try(pending)

    def finish(self, patience_s: float = LAST_WAIT_S) -> None:
        """Go on with them for an engine that takes no further step, as long as that helps.

        No copy touches a block on this rank after that.
        """
        cache = self._cache

        def over() -> bool:
            self.try_again()
            cache.begin_backups()
            return not (self._pending and (cache.inspection.in_flight or self.is_due))

        if self._pending:
            cache.step_until(over, patience_s)
            cache.keep_off()
            self._lending.held.let_go(lambda _: ())

    def ended(self, name: str) -> None:
        """Release a request once its backups are over: the engine has done with it."""
        self._pending[name].ended = True

    def drop(self, name: str) -> None:
        """Forget the backups of a request whose blocks hold them no more, or that is released."""
        self._pending.pop(name, None)

    def give_up(self) -> None:
        """Give all up: blocks may be overwritten with nobody asking."""
        for pending in list(self._pending.values()):
            self._give_up(pending)

    def _wait_for(self, tracked: TrackedRequest) -> _Pending:
        if len(self._pending) >= REQUESTS_MAX:
            self._give_up(next(iter(self._pending.values())))
        pending = _Pending(tracked, tracked.name, tracked.namespace, self._until_ms())
        self._pending[tracked.name] = pending
        return pending

    def _until_ms(self) -> int:
        return self._cache.inspection.agreed_ms + int(PATIENCE_S * 1000)

    def _try(self, pending: _Pending) -> None:
        for backup in self._intact(pending):
            if self._copy(pending.name, pending.namespace, backup, backup.blocks()):
                pending.until_ms = self._until_ms()
            if self._cache.awaits_room(pending.name):
                return
            pending.backups.pop(0)
        self._give_up(pending)

    def _intact(self, pending: _Pending) -> Iterator[_Backup]:
        """Yield what is left of each backup, the shortest first; the caller removes what is done."""
        while pending.backups:
            backup = pending.backups[0]
            pages, unit = backup.intact(), pending.tracked.page_tokens
            if pages < len(backup.lent[KV_POOL]):
                lent = {name: pages_[:pages] for name, pages_ in backup.lent.items()}
                lent |= dict.fromkeys(self._states, lent[KV_POOL][:0])
                tokens = bytes(memoryview(backup.tokens).cast("i")[: pages * unit])
                backup = pending.backups[0] = _Backup(tokens, lent, state=False)
            if pages:
                yield backup
            else:
                pending.backups.pop(0)

    def _copy(self, name: str, namespace: str, backup: _Backup, passing: Sequence[int]) -> bool:
        """Begin a backup, and hold the blocks that are `passing` for its copy; say if there is one."""
        before = self._cache.copies(name)
        self._cache.back_up(name, backup.tokens, backup.lent, namespace)
        begun = self._cache.copies(name)
        if passing and begun != before:
            self._lending.held.hold(name, begun[-1], passing)
        return begun != before

    def _watch(self, backup: _Backup) -> None:
        """Have the engine say when it hands a block out again."""
        pool = self._lending.held.pool
        if pool is not None:
            blocks = [pool.blocks[each] for each in backup.blocks()]
            pool.touch(blocks)
            pool.unpin_blocks(blocks, self._reused)

    def _reused(self, block: Any) -> None:
        for pending in self._pending.values():
            for backup in pending.backups:
                for pages in backup.lent.values():
                    pages[pages == block.block_id] = NO_PAGE

    def _give_up(self, pending: _Pending) -> None:
        del self._pending[pending.name]
        if pending.ended:
            self._cache.release(pending.name)
