"""What is remembered for a while, in agreed time, and never more of it than a bound."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Remembered(Generic[T]):
    """Some things, each until its time is over; the oldest are forgotten first."""

    def __init__(self, ttl_s: float, most: int) -> None:
        self._ttl_ms = int(ttl_s * 1000)
        self._most = most
        self._until: OrderedDict[T, int] = OrderedDict()

    def __len__(self) -> int:
        """Return how many are remembered."""
        return len(self._until)

    def items(self) -> tuple[tuple[T, int], ...]:
        """Return what is remembered and until when, the oldest first."""
        return tuple(self._until.items())

    def add(self, what: T, now_ms: int) -> None:
        """Remember something from now on."""
        self._until.pop(what, None)
        self._until[what] = now_ms + self._ttl_ms
        while len(self._until) > self._most:
            self._until.popitem(last=False)

    def has(self, what: T, now_ms: int) -> bool:
        """Say whether something is remembered and its time not over."""
        return self._until.get(what, 0) > now_ms

    def has_none_of(self, these: Iterable[T]) -> bool:
        """Say whether none of these is remembered, whatever its time; cheaper than to ask of each."""
        return self._until.keys().isdisjoint(these)

    def forget(self, these: Iterable[T]) -> None:
        """Forget some things."""
        if self._until:
            for each in these:
                self._until.pop(each, None)

    def forget_old(self, now_ms: int) -> None:
        """Forget what has been remembered for its time."""
        while self._until and next(iter(self._until.values())) <= now_ms:
            self._until.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._until.clear()
