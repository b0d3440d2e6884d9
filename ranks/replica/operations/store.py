"""The store that the group uses: whether there is one, and which pages it is known to have."""

from collections.abc import Iterable, Sequence
from typing import Final

from ...protocol.notices import StoreChanged
from ..core.basis import Basis
from ..tree.node import Node, Place, StoreTime
from .kinds import Operation
from .remembered import Remembered

RENEWED_S: Final = 60.0
"""How long the group believes that the store has what it had."""
RENEWED_PART: Final = 4
"""It believes so no longer once it has written this part of host memory, since a store that is full has
removed as much. So at most this many pages are seen to be there for each that is written."""
_LONG_AGO: Final = StoreTime(-(1 << 62), -(1 << 62))
_NONE: frozenset[int] = frozenset()


class Store:
    """The facts about the present store; what nodes know of one says nothing of the next."""

    def __init__(self, basis: Basis) -> None:
        self._config = config = basis.config
        self._clock = basis.clock
        self._journal = basis.journal
        self._outbox = basis.outbox
        self._alone = tuple(frozenset((index,)) for index in range(1 + len(config.components)))
        """A set of each component alone; nodes share these sets."""
        self.attached = config.has_store and config.host_pages > 0
        self.draining = False
        """Whether the store is detached while something is still in flight for it."""
        self.lost = False
        """Whether the store was detached though nobody has asked for it."""
        self.number = int(self.attached)
        """How many stores there have been."""
        self.lacks_older = False
        """Whether nothing was done yet to write what was cached before the store was attached."""
        self._written = 0
        self._renewed_pages = max(1, config.host_pages // RENEWED_PART)
        self._first_operation = 0
        """The first operation that can have to do with the present store, or the last one."""
        times, most = config.timeouts, config.bounds.remembered_misses
        self.misses: Remembered[tuple[str, bytes]] = Remembered(times.miss_memory_s, most)
        """Objects, by pool and key, whose read failed: they are not asked for again for a while."""
        self.absences: Remembered[bytes] = Remembered(times.absence_memory_s, most)
        """Keys of full attention that not every rank's store has, as all of them have answered."""
        self.lately: Remembered[tuple[str, bytes]] = Remembered(RENEWED_S, most)
        """Objects, by pool and key, that were written while a backup of lent pages waited for room."""

    def attach(self, next_operation: int) -> None:
        """Use another store. What those before keep in quarantine is not held against it."""
        self.attached = self.lacks_older = True
        self.lost = False
        self.number += 1
        self._first_operation = next_operation
        # They tell what the store before did not have, or had.
        self.forget_all_misses()
        self.lately.clear()
        self._changed("attached")

    def detach(self, reason: str = "") -> None:
        """Begin nothing more for the store; with a reason if nobody has asked for it."""
        self.attached, self.draining, self.lost = False, True, bool(reason)
        self._changed("draining", reason)

    def drained(self) -> None:
        """Let go of the store: nothing is in flight for it."""
        self.draining = False
        self._changed("detached")

    def concerns(self, operation: Operation) -> bool:
        """Say whether an operation has to do with the present store, or the last one."""
        return operation.id >= self._first_operation

    def keeps(self, place: Place, generation: int, source: str = "") -> bool:
        """Say whether what is cached in a place is worth reading from storage and writing there.

        With a `source`, whether it is worth reading from another group, whatever store there is.

        Not where another life could not find it; nor what was computed before the last reset, which
        requests in flight may go on with under other weights than those that its keys stand for.
        """
        there = self.attached or bool(source)
        return there and place.generation == generation and place.outlives

    def has(self, node: Node, component: int) -> bool:
        """Say whether the store has a node's pages of a component, as far as is known."""
        return node.store == self.number and component in node.persisted

    @property
    def time(self) -> StoreTime:
        """Return what time it is in the life of the store."""
        return StoreTime(self._written, self._clock.agreed_ms)

    def seen_first(self, nodes: Iterable[Node]) -> StoreTime:
        """Return when the store was seen to have something of one of `nodes`, the earliest; or now."""
        return min((*filter(None, map(self._seen, nodes)), self.time))

    def had(self, node: Node) -> bool:
        """Say whether the store has, or had once, pages of a node."""
        return node.store == self.number and node.stored_at is not None

    def note_written(self, node: Node, component: int, pages: int, at: StoreTime) -> None:
        """Note that the store has a node's pages of a component on every rank.

        `at` is when they were used, or when what they continue was, if that was earlier.
        """
        self._written += 0 if self.had(node) else pages
        self._note(node, component, at)

    def note_read(self, node: Node, component: int) -> None:
        """Note that a node's pages of a component came from the store, which saw no use of its path."""
        self._note(node, component, _LONG_AGO)

    def doubt_old(self, node: Node) -> bool:
        """Forget what the store has of a node if it was seen too long ago; say if it was.

        A store removes what nobody has used for long, and hits in memory are no use of it. So what is
        forgotten at the next use is persisted again: it counts as used, and is written if it is gone.
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
        """Say whether an object is remembered as one that cannot be read."""
        return self.misses.has((pool, key), self._clock.agreed_ms)

    def before_misses(self, pool: str, keys: list[bytes]) -> list[bytes]:
        """Return the leading keys of full attention that are not remembered as not to be had."""
        now_ms, misses, absences = self._clock.agreed_ms, self.misses, self.absences
        if not misses and absences.has_none_of(keys):
            return keys
        for index, key in enumerate(keys):
            if absences.has(key, now_ms) or misses.has((pool, key), now_ms):
                return keys[:index]
        return keys

    def remember_miss(self, pool: str, key: bytes) -> None:
        """Ask no more for an object that could not be read, for a while."""
        self.misses.add((pool, key), self._clock.agreed_ms)
        self._journal.record("miss", pool, key.hex()[:16])

    def remember_absence(self, key: bytes) -> None:
        """Ask no more for a page of full attention that not every rank's store has, for a while.

        For a short one: another group may write it. What continues it is not asked for either.
        """
        self.absences.add(key, self._clock.agreed_ms)
        self._journal.record("absent", key.hex()[:16])

    def forget_misses(self, pool: str, keys: Sequence[bytes]) -> None:
        """Ask again for objects that were written."""
        self.misses.forget((pool, key) for key in keys)
        # The keys of other pools mean other objects, and forgetting costs no more than a question.
        self.absences.forget(keys)

    def note_lately(self, pool: str, keys: Sequence[bytes]) -> None:
        """Remember for a while that objects were written, whether or not their nodes stay."""
        for key in keys:
            self.lately.add((pool, key), self._clock.agreed_ms)

    def count_lately(self, pool: str, keys: Sequence[bytes]) -> int:
        """Return how many of the first objects were written lately."""
        for index, key in enumerate(keys if len(self.lately) else ()):
            if not self.lately.has((pool, key), self._clock.agreed_ms):
                return index
        return len(keys) if len(self.lately) else 0

    def forget_all_misses(self) -> None:
        """Ask again for everything."""
        self.misses.clear()
        self.absences.clear()

    def forget_old_misses(self) -> None:
        """Ask again for what was not to be had long ago."""
        self.misses.forget_old(self._clock.agreed_ms)
        self.lately.forget_old(self._clock.agreed_ms)
        self.absences.forget_old(self._clock.agreed_ms)

    def _changed(self, state: str, reason: str = "") -> None:
        self._journal.record(state, self.number, reason)
        self._outbox.notices.append(StoreChanged(self.number, state, reason))
