"""A bounded cache of the object names seen in a store, to answer `exists` without a system call.

An entry may be stale after another process has removed the object, which S7 permits. A caller that
finds an object missing or corrupt removes the entry.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from ..page_format.object_name import ObjectName
from .base import Read, ReadOutcome, Write, WriteOutcome

_NAMES_MAX: Final = 1 << 20


class SeenNames:
    """A cache of at most `names_max` object names, used only by the event loop's thread."""

    def __init__(self, names_max: int = _NAMES_MAX) -> None:
        self._names_max = names_max
        self._count = 0
        self._keys: dict[tuple[str, str, str], set[str]] = {}

    def add(self, names: Iterable[ObjectName]) -> None:
        """Add `names` to the cache."""
        namespace = pool = shard = ""
        keys: set[str] = set()
        for name in names:
            # Consecutive names almost always share namespace, pool and shard. So look up `keys`, the
            # cached keys of a shard, only if one of the three has changed.
            if name.namespace != namespace or name.pool != pool or name.shard != shard:
                namespace, pool, shard = name.namespace, name.pool, name.shard
                keys = self._keys.setdefault((namespace, pool, shard), set())
            if name.key in keys:
                continue
            if self._count >= self._names_max:
                # When the cache is full, clear it completely, because evicting single names would make
                # each look-up slower. After that, the next look-up of a name costs one system call and
                # caches the name again.
                self._keys = {(namespace, pool, shard): (keys := set())}
                self._count = 0
            keys.add(name.key)
            self._count += 1

    def discard(self, names: Iterable[ObjectName]) -> None:
        """Remove `names` from the cache."""
        for name in names:
            group = (name.namespace, name.pool, name.shard)
            keys = self._keys.get(group)
            if keys is not None and name.key in keys:
                keys.remove(name.key)
                self._count -= 1
                if not keys:
                    del self._keys[group]

    def look_up(self, names: Sequence[ObjectName]) -> list[bool]:
        """Return for each name whether it is in the cache."""
        found: list[bool] = []
        namespace = pool = shard = ""
        keys: set[str] = set()
        # Consecutive names almost always share namespace, pool and shard. So look up `keys`, the cached
        # keys of a shard, only if one of the three has changed.
        for name in names:
            if name.namespace != namespace or name.pool != pool or name.shard != shard:
                namespace, pool, shard = name.namespace, name.pool, name.shard
                keys = self._keys.get((namespace, pool, shard), set())
            found.append(name.key in keys)
        return found

    async def exist(
        self,
        names: Sequence[ObjectName],
        ask: Callable[[Sequence[ObjectName]], Awaitable[list[bool]]],
    ) -> list[bool]:
        """Return for each name whether it exists; call `ask` for those that are not cached."""
        found = self.look_up(names)
        if False not in found:
            return found
        unknown = [name for name, seen in zip(names, found, strict=True) if not seen]
        answers = await ask(unknown)
        self.add(name for name, answer in zip(unknown, answers, strict=True) if answer)
        rest = iter(answers)
        return [seen or next(rest) for seen in found]

    def note_reads(self, reads: Sequence[Read], outcomes: Sequence[ReadOutcome]) -> None:
        """Remove the names whose reads were MISSING or CORRUPT from the cache."""
        if outcomes.count(ReadOutcome.OK) != len(outcomes):
            gone = (ReadOutcome.MISSING, ReadOutcome.CORRUPT)
            self.discard(
                read.name for read, each in zip(reads, outcomes, strict=True) if each in gone
            )

    def note_writes(self, writes: Sequence[Write], outcomes: Sequence[WriteOutcome]) -> None:
        """Add the names whose writes were OK or PRESENT to the cache."""
        there = (WriteOutcome.OK, WriteOutcome.PRESENT)
        self.add(write.name for write, each in zip(writes, outcomes, strict=True) if each in there)
