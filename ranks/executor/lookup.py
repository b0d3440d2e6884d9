"""One lookup: it asks the store for objects, and answers with the lengths that can be restored."""

from collections.abc import Sequence

from ...coordinator.ballot import Answered
from ...page_format.object_name import ObjectName
from ...storage_backends.base import StorageBackend
from ..protocol.orders import LookUp, Need
from .restorable import leading, restorable
from .storage_transfers import RankObjects

LOOKUP_KEYS = 1024
"""Keys that one call asks for. Of full attention, no call follows the one that misses a key."""


class StoreLookUp:
    """Asks a store for no more than can make a difference to the answer.

    Full attention comes first, since no length goes beyond its first missing page. Of the other pools
    only those positions are asked for that some length up to there needs.
    """

    def __init__(self, order: LookUp, backend: StorageBackend, objects: RankObjects) -> None:
        self._order = order
        self._backend = backend
        self._objects = objects
        self._present = [[False] * len(need.keys) for need in order.needs]

    async def ask(self, now: float, deadline: float) -> None:
        """Ask the store; raises what the store raises. `now` is on the deadline's scale."""
        await self._objects.shardings.look(self._backend, now, deadline)
        full, *others = self._order.needs
        there = self._present[0]
        possible = leading(full, [True] * len(full.keys))
        await self._ask(full, there, range(possible), deadline)
        last = full.first + leading(full, there)
        if last <= self._order.floor:
            return
        for need, there in zip(others, self._present[1:], strict=True):
            assert need.span is not None
            # The shortest length ends one position after the floor.
            first = max(need.first, self._order.floor + 1 - need.span)
            stop = min(last, need.first + len(need.keys))
            indices = range(first - need.first, max(first, stop) - need.first)
            await self._ask(need, there, indices, deadline)

    def answer(self) -> Answered:
        """Return the answer, in which whatever the store did not say is missing (rule R9)."""
        return Answered(self._order.operation, *restorable(self._order, self._present))

    async def _ask(
        self, need: Need, there: list[bool], indices: Sequence[int], deadline: float
    ) -> None:
        queried = [
            index
            for index in indices
            if need.keys[index] and need.first + index not in need.on_host
        ]
        for first in range(0, len(queried), LOOKUP_KEYS):
            chunk = queried[first : first + LOOKUP_KEYS]
            if need.span is None and chunk[0] > leading(need, there):
                return
            names = self._objects.names(need.pool, [need.keys[index] for index in chunk])
            answers = await self._backend.exists(names, deadline=deadline)
            for index, answer in zip(chunk, answers, strict=True):
                there[index] = answer
            await self._ask_elsewhere(need, there, chunk, deadline)

    async def _ask_elsewhere(
        self, need: Need, there: list[bool], chunk: Sequence[int], deadline: float
    ) -> None:
        """Ask for the objects of groups of other TP sizes where this rank's own are missing."""
        shardings = self._objects.shardings
        sizes = [
            [source.name for source in shardings.sources(need.pool, size)]
            for size in shardings.elsewhere(need.pool)
        ]
        missing = [index for index in chunk if not there[index]]
        # A page is several objects there, and one call is to ask for no more of them than elsewhere.
        step = max(1, LOOKUP_KEYS // max(map(len, sizes), default=1))
        for first in range(0, len(missing), step):
            some = missing[first : first + step]
            for shards in sizes:
                queried = [index for index in some if not there[index]]
                if queried:
                    await self._ask_shards(need, there, queried, shards, deadline)
            if need.span is None and not all(there[index] for index in some):
                return

    async def _ask_shards(
        self,
        need: Need,
        there: list[bool],
        queried: Sequence[int],
        shards: Sequence[str],
        deadline: float,
    ) -> None:
        """Ask for all of the objects that pages consist of: a page needs all of its parts."""
        own = self._objects.names(need.pool, [need.keys[index] for index in queried])
        names = [
            ObjectName(name.namespace, name.key, name.pool, shard)
            for name in own
            for shard in shards
        ]
        answers = await self._backend.exists(names, deadline=deadline)
        for at, index in enumerate(queried):
            there[index] = all(answers[at * len(shards) : (at + 1) * len(shards)])
