"""The group's store: whether one is attached, and which pages it is known to have."""

from collections.abc import Iterable, Sequence
from typing import Final

from ...protocol.events import StoreChanged
from ..core.replica_parts import ReplicaParts
from ..tree.node import Node, StoreTime, TreeIdentity
from .kinds import Operation
from .remembered import Remembered

RENEWED_S: Final = 60.0
"""Seconds after which a record that the store has a page is old, and the page is persisted again at
its next use."""
RENEWED_PART: Final = 4
"""A record that the store has a page is old after N page writes, where N is the number of pages of host
memory divided by this value.

A full store evicts a page for each page written, so it may have evicted the recorded page by then. Per
page written, at most this many records become old, which bounds the cost of checking old records.
"""
_LONG_AGO: Final = StoreTime(-(1 << 62), -(1 << 62))
_NONE: frozenset[int] = frozenset()


class Store:
    """Facts about the current store; records of one store do not apply to the next store."""

    def __init__(self, basis: ReplicaParts) -> None:
        self._config = config = basis.config
        self._clock = basis.clock
        self._journal = basis.journal
        self._outbox = basis.outbox
        self._alone = tuple(frozenset((index,)) for index in range(1 + len(config.components)))
        """By component: the set that contains only the component's index, shared by nodes to save
        memory."""
        self.attached = config.has_store and config.host_pages > 0
        self.draining = False
        """Whether a detach has begun and I/O for the store is still in flight."""
        self.lost = False
        """Whether the store was detached without an operator's request."""
        self.number = int(self.attached)
        """How many stores have been attached."""
        self.lacks_older = False
        """Whether pages cached before the store was attached still have to be queued for writing to it.
        """
        self._written = 0
        self._renewed_pages = max(1, config.host_pages // RENEWED_PART)
        self._first_operation = 0
        """Operations with this id or a greater one can involve the current store or, after a detach,
        the detached store."""
        times, most = config.timeouts, config.bounds.remembered_misses
        self.misses: Remembered[tuple[str, bytes]] = Remembered(times.miss_memory_s, most)
        """Objects, by pool and key, whose read failed; not requested again for a while."""
        self.absences: Remembered[bytes] = Remembered(times.absence_memory_s, most)
        """Full-attention keys that some rank's store lacks, according to a verdict."""
        self.lately: Remembered[tuple[str, bytes]] = Remembered(RENEWED_S, most)
        """Objects, by pool and key, written recently, while a backup of lent pages waited for host
        memory."""

    def attach(self, next_operation: int) -> None:
        """Attach a new store; operations with ids from `next_operation` on may involve it.

        Quarantined pages of earlier stores do not count against the new store's bound.
        """
        self.attached = self.lacks_older = True
        self.lost = False
        self.number += 1
        self._first_operation = next_operation
        # Forget misses and recent writes, because they describe the previous store.
        self.forget_all_misses()
        self.lately.clear()
        self._changed("attached")

    def detach(self, reason: str = "") -> None:
        """Begin a detach: start no new I/O. `reason` is set if no operator requested the detach."""
        self.attached, self.draining, self.lost = False, True, bool(reason)
        self._changed("draining", reason)

    def drained(self) -> None:
        """Complete a detach: no I/O for the store is in flight any more, except quarantined I/O."""
        self.draining = False
        self._changed("detached")

    def concerns(self, operation: Operation) -> bool:
        """Return whether an operation began under the current store.

        After a detach, returns whether it began under the last store.
        """
        return operation.id >= self._first_operation

    def keeps(self, place: TreeIdentity, generation: int, source: str = "") -> bool:
        """Return whether pages of a tree may be read from storage and written to it.

        With a `source` (another group), returns whether pages may be read from that group. Returns
        False if a later run of the cache could not find the pages. Also returns False for a tree from
        before the last reset: requests in flight may have computed its pages with newer weights than
        those that its keys name.
        """
        there = self.attached or bool(source)
        return there and place.generation == generation and place.outlives

    def has(self, node: Node, component: int) -> bool:
        """Return whether the store is known to have a node's pages of a component."""
        return node.store == self.number and component in node.persisted

    @property
    def time(self) -> StoreTime:
        """The current store time: (pages written to the store so far, agreed time)."""
        return StoreTime(self._written, self._clock.agreed_ms)

    def seen_first(self, nodes: Iterable[Node]) -> StoreTime:
        """Return the earliest store time (pages written, agreed time) of the store records of `nodes`.

        Returns the current store time if there are no records.
        """
        return min((*filter(None, map(self._seen, nodes)), self.time))

    def had(self, node: Node) -> bool:
        """Return whether the store has, or once had, pages of a node."""
        return node.store == self.number and node.stored_at is not None

    def note_written(self, node: Node, component: int, pages: int, at: StoreTime) -> None:
        """Record that the store has a node's pages of a component on every rank.

        `at` is the store time at which these pages, or pages before them in the prefix, were used. If
        the node has an earlier time already, the earlier time is kept.
        """
        self._written += 0 if self.had(node) else pages
        self._note(node, component, at)

    def note_read(self, node: Node, component: int) -> None:
        """Record that a node's pages of a component were read from the store.

        The record counts as old from the start. Pages before the node in the prefix may not have been
        read, so their last use in the store was not renewed, and the store may soon evict them.
        """
        self._note(node, component, _LONG_AGO)

    def invalidate_stored(self, node: Node) -> bool:
        """Invalidate a node's record that the store has its pages, if the record is old.

        Returns whether the record was invalidated. A record is old if its store time is `RENEWED_S`
        seconds or many page writes ago (see `RENEWED_PART`). By then the store may have evicted the
        pages, because a store does not see hits in memory. Pages without a record are persisted again
        at their next use.
        """
        at = self._seen(node)
        if at is None:
            return False
        is_new = self._written - at.written < self._renewed_pages
        if is_new and self._clock.agreed_ms - at.agreed_ms < RENEWED_S * 1000:
            return False
        node.persisted = _NONE
        return True

    def _note(self, node: Node, component: int, at: StoreTime) -> None:
        if node.store != self.number:
            node.store, node.persisted = self.number, _NONE
        known = self._seen(node)
        node.stored_at = at if known is None else min(at, known)
        node.persisted |= self._alone[component]

    def _seen(self, node: Node) -> StoreTime | None:
        return node.stored_at if node.persisted and node.store == self.number else None

    def is_missed(self, pool: str, key: bytes) -> bool:
        """Return whether an object is remembered as unreadable."""
        return self.misses.has((pool, key), self._clock.agreed_ms)

    def before_misses(self, pool: str, keys: list[bytes]) -> list[bytes]:
        """Return the leading full-attention keys before the first one known missing or unreadable."""
        now_ms, misses, absences = self._clock.agreed_ms, self.misses, self.absences
        if not misses and absences.misses_all_of(keys):
            return keys
        for index, key in enumerate(keys):
            if absences.has(key, now_ms) or misses.has((pool, key), now_ms):
                return keys[:index]
        return keys

    def remember_miss(self, pool: str, key: bytes) -> None:
        """Remember that an object could not be read, so that it is not requested for a while."""
        self.misses.add((pool, key), self._clock.agreed_ms)
        self._journal.record("miss", pool, key.hex()[:16])

    def remember_absence(self, key: bytes) -> None:
        """Remember that not every rank's store has a full-attention page.

        Prefetches skip this page and the pages after it for a short time only, because another group
        may write them.
        """
        self.absences.add(key, self._clock.agreed_ms)
        self._journal.record("absent", key.hex()[:16])

    def forget_misses(self, pool: str, keys: Sequence[bytes]) -> None:
        """Forget the misses of objects that have been written."""
        self.misses.forget((pool, key) for key in keys)
        # Absences are recorded by key, without a pool. Another pool's object with the same key may
        # therefore lose its absence too early, which costs only one query.
        self.absences.forget(keys)

    def count_recent(self, pool: str, keys: Sequence[bytes]) -> None:
        """Remember in `lately` that objects were written, even if their nodes are removed."""
        for key in keys:
            self.lately.add((pool, key), self._clock.agreed_ms)

    def recent_count(self, pool: str, keys: Sequence[bytes]) -> int:
        """Return how many leading objects were written recently, up to the first that was not."""
        for index, key in enumerate(keys if len(self.lately) else ()):
            if not self.lately.has((pool, key), self._clock.agreed_ms):
                return index
        return len(keys) if len(self.lately) else 0

    def forget_all_misses(self) -> None:
        """Forget all misses, so that every object may be requested again."""
        self.misses.clear()
        self.absences.clear()

    def forget_old_misses(self) -> None:
        """Forget misses, absences and recent writes whose time has passed."""
        self.misses.forget_old(self._clock.agreed_ms)
        self.lately.forget_old(self._clock.agreed_ms)
        self.absences.forget_old(self._clock.agreed_ms)

    def _changed(self, state: str, reason: str = "") -> None:
        self._journal.record(state, self.number, reason)
        self._outbox.events.append(StoreChanged(self.number, state, reason))
