"""A bounded set whose entries expire in agreed time."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Remembered(Generic[T]):
    """Entries that expire after a fixed time; beyond the size bound, the oldest are dropped."""

    def __init__(self, ttl_s: float, most: int) -> None:
        self._ttl_ms = int(ttl_s * 1000)
        self._most = most
        self._until: OrderedDict[T, int] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of entries, including expired ones."""
        return len(self._until)

    def items(self) -> tuple[tuple[T, int], ...]:
        """Return the entries with their expiry times in agreed ms, oldest first."""
        return tuple(self._until.items())

    def add(self, what: T, now_ms: int) -> None:
        """Add an entry, or restart the lifetime of an entry that is present."""
        self._until.pop(what, None)
        self._until[what] = now_ms + self._ttl_ms
        while len(self._until) > self._most:
            self._until.popitem(last=False)

    def has(self, what: T, now_ms: int) -> bool:
        """Return whether an entry is present and has not expired."""
        return self._until.get(what, 0) > now_ms

    def misses_all_of(self, these: Iterable[T]) -> bool:
        """Return whether none of these entries is present; expired entries count as present.

        Faster than one query per entry.
        """
        return self._until.keys().isdisjoint(these)

    def forget(self, these: Iterable[T]) -> None:
        """Remove the given entries, if present."""
        if self._until:
            for each in these:
                self._until.pop(each, None)

    def forget_old(self, now_ms: int) -> None:
        """Remove the expired entries."""
        while self._until and next(iter(self._until.values())) <= now_ms:
            self._until.popitem(last=False)

    def clear(self) -> None:
        """Remove all entries."""
        self._until.clear()
