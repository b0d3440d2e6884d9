"""Names that were seen in a store: a bounded memory that answers existence without a system call.

It may be wrong about what others have removed since, as existence may (S7); whoever finds a name
missing or corrupt takes it out again, so that a wrong answer is not repeated.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from ..page_format.object_name import ObjectName
from .base import Read, ReadOutcome, Write, WriteOutcome

_NAMES_MAX: Final = 1 << 20


class SeenNames:
    """At most `names_max` names. One owner: the event loop's thread."""

    def __init__(self, names_max: int = _NAMES_MAX) -> None:
        self._names_max = names_max
        self._count = 0
        self._keys: dict[tuple[str, str, str], set[str]] = {}

    def add(self, names: Iterable[ObjectName]) -> None:
        """Remember that these exist."""
        namespace = pool = shard = ""
        keys: set[str] = set()
        for name in names:
            # As in `look_up`, names that follow each other almost always differ in the key alone.
            if name.namespace != namespace or name.pool != pool or name.shard != shard:
                namespace, pool, shard = name.namespace, name.pool, name.shard
                keys = self._keys.setdefault((namespace, pool, shard), set())
            if name.key in keys:
                continue
            if self._count >= self._names_max:
                # Starting over keeps the bound without a price on each look-up; what is still
                # asked for comes back at the price of one system call each.
                self._keys = {(namespace, pool, shard): (keys := set())}
                self._count = 0
            keys.add(name.key)
            self._count += 1

    def discard(self, names: Iterable[ObjectName]) -> None:
        """Forget these."""
        for name in names:
            group = (name.namespace, name.pool, name.shard)
            keys = self._keys.get(group)
            if keys is not None and name.key in keys:
                keys.remove(name.key)
                self._count -= 1
                if not keys:
                    del self._keys[group]

    def look_up(self, names: Sequence[ObjectName]) -> list[bool]:
        """Say for each name whether it was seen."""
        found: list[bool] = []
        namespace = pool = shard = ""
        keys: set[str] = set()
        # A call's names almost always share all parts but the key, and then most of a look-up is
        # one test for membership.
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
        """Say for each name whether it exists: as `ask` answers for those that were not seen."""
        found = self.look_up(names)
        if False not in found:
            return found
        unknown = [name for name, seen in zip(names, found, strict=True) if not seen]
        answers = await ask(unknown)
        self.add(name for name, answer in zip(unknown, answers, strict=True) if answer)
        rest = iter(answers)
        return [seen or next(rest) for seen in found]

    def note_reads(self, reads: Sequence[Read], outcomes: Sequence[ReadOutcome]) -> None:
        """Forget what reads have found to be missing or corrupt."""
        if outcomes.count(ReadOutcome.OK) != len(outcomes):
            gone = (ReadOutcome.MISSING, ReadOutcome.CORRUPT)
            self.discard(
                read.name for read, each in zip(reads, outcomes, strict=True) if each in gone
            )

    def note_writes(self, writes: Sequence[Write], outcomes: Sequence[WriteOutcome]) -> None:
        """Remember what writes have stored, or found to be there."""
        there = (WriteOutcome.OK, WriteOutcome.PRESENT)
        self.add(write.name for write, each in zip(writes, outcomes, strict=True) if each in there)
