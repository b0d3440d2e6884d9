"""Backups of a request's whole pages, including backups that wait for free host memory.

A backup without host memory is retried in later passes, even after the request has finished. It is
abandoned after `PATIENCE_S` without progress. A waiting backup does not keep its blocks allocated, so
that the engine can reset its prefix cache at any time. A free block keeps its content until the engine
reallocates it, which `BlockPool.unpin_blocks` reports. The backup then ends before its first lost page.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...ranks.group.host_cache import HostCache
from ...ranks.protocol.orders import KV_POOL
from ...ranks.replica.operations.lent import NO_PAGE
from .contract import BlockState
from .groups import GroupKind
from .lent_blocks import LentBlocks, Pages
from .tracked import TrackedRequest

PATIENCE_S = 10.0
"""A backup is abandoned after this many seconds of agreed time without progress."""
LAST_WAIT_S = 1.0
"""Maximum seconds of agreed time that an engine without requests continues backups."""
REQUESTS_MAX = 64
"""Maximum number of requests with waiting backups. If there are more, those of the oldest request are
abandoned."""
TRIES_MAX = 4
"""Maximum number of requests whose backups are retried per pass."""


@dataclass(slots=True, eq=False)
class _Backup:
    """A backup: the tokens of a prefix, and the device blocks that hold its pages."""

    tokens: bytes
    lent: dict[str, Pages]
    state: bool
    """Whether a recurrent state at the end of the prefix is also backed up."""

    def blocks(self) -> list[int]:
        """Return the ids of the backup's blocks, without blocks that were reallocated."""
        lent = np.concatenate(list(self.lent.values()))
        return [int(block) for block in np.unique(lent[lent != NO_PAGE])]

    def intact(self) -> int:
        """Return how many pages the prefix has before the first page whose block was reallocated."""
        gone = np.flatnonzero(self.lent[KV_POOL] == NO_PAGE)
        return int(gone[0]) if len(gone) else len(self.lent[KV_POOL])


@dataclass(slots=True, eq=False)
class _Pending:
    """The waiting backups of one request, shortest prefix first."""

    tracked: TrackedRequest
    name: str
    namespace: str
    until_ms: int
    backups: list[_Backup] = field(default_factory=list[_Backup])
    ended: bool = False
    """Whether the engine has finished the request. If so, the request is released after its last
    backup."""


class PendingBackups:
    """Backs up computed pages at once, or in a later pass if host memory is full."""

    def __init__(self, cache: HostCache, lending: LentBlocks) -> None:
        self._cache = cache
        self._lending = lending
        self._states = [pool.name for pool in lending.pools if pool.kind is GroupKind.STATE]
        self._pending: dict[str, _Pending] = {}

    def __contains__(self, name: str) -> bool:
        """Return whether the request has a waiting backup."""
        return name in self._pending

    def __len__(self) -> int:
        """Return the number of requests with waiting backups."""
        return len(self._pending)

    @property
    def is_due(self) -> bool:
        """Whether a retry of a waiting backup in the next pass may make progress."""
        return any(map(self._cache.backup_is_due, self._pending))

    def back_up(self, tracked: TrackedRequest, scheduled: int, blocks: BlockState) -> None:
        """Back up the pages that become full when the tokens scheduled in this pass are computed.

        Pages that depend on previous weights are skipped, because no other request may match them.
        """
        computed, known = tracked.tokens_after(scheduled)
        pages = known // tracked.page_tokens
        if tracked.stale or pages <= tracked.lent_pages:
            return
        tracked.lent_pages = pages
        length = pages * tracked.page_tokens
        # Include the recurrent state only if the pass ends exactly at the end of this prefix, and
        # without draft tokens, which could be rejected.
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
            if not self._cache.waits_for_host_pages(tracked.name):
                return
            pending = self._wait_for(tracked)
        elif len(pending.backups) > 1 and not pending.backups[-1].state:
            # Replace the last waiting backup by the new, longer one, which contains the same pages
            # except for some window pages.
            pending.backups.pop()
        pending.backups.append(backup)
        self._watch(backup)

    def try_again(self) -> None:
        """Retry backups for which host memory may be free. Called once per scheduler pass."""
        tries, now_ms = 0, self._cache.inspection.agreed_ms
        for pending in list(self._pending.values()):
            if not self._cache.waits_for_host_pages(pending.name) or now_ms > pending.until_ms:
                self._give_up(pending)
            elif tries < TRIES_MAX and self._cache.backup_is_due(pending.name):
                tries += 1
                self._try(pending)

    def finish(self, patience_s: float = LAST_WAIT_S) -> None:
        """Continue backups while they make progress, before an engine stops stepping.

        When this method returns, no backup on this rank reads a block any more.
        """
        cache = self._cache

        def over() -> bool:
            self.try_again()
            cache.begin_backups()
            return not (self._pending and (cache.inspection.in_flight or self.is_due))

        if self._pending:
            cache.step_until(over, patience_s)
            cache.wait_for_copies()
            self._lending.held.let_go(lambda _: ())

    def ended(self, name: str) -> None:
        """Record that the engine has finished a request; it is released after its last backup."""
        self._pending[name].ended = True

    def drop(self, name: str) -> None:
        """Drop the waiting backups of a request that was released or whose blocks were reallocated."""
        self._pending.pop(name, None)

    def give_up(self) -> None:
        """Abandon all waiting backups, because blocks may now be overwritten without a callback."""
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
            if self._cache.waits_for_host_pages(pending.name):
                return
            pending.backups.pop(0)
        self._give_up(pending)

    def _intact(self, pending: _Pending) -> Iterator[_Backup]:
        """Yield the waiting backups of a request, shortest first.

        Each backup is cut before its first page whose block was reallocated. The caller must remove
        each backup that it has started; otherwise this method yields the backup again.
        """
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
        """Start a backup, and keep the blocks `passing` allocated until the backup's copy ends.

        Return whether the backup started.
        """
        before = self._cache.copies(name)
        self._cache.back_up(name, backup.tokens, backup.lent, namespace)
        begun = self._cache.copies(name)
        if passing and begun != before:
            self._lending.held.hold(name, begun[-1], passing)
        return begun != before

    def _watch(self, backup: _Backup) -> None:
        """Register a callback with vLLM that reports when the backup's blocks are reallocated."""
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
