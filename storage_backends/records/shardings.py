"""Where else a rank's pages may be: in the objects of groups of another TP size on the same store.

Whoever writes leaves a mark that says how its group divides pages. So readers know which other names
to ask for, and a store that only groups of one size use costs nothing more. A mark is a hint, like
existence: what the objects hold decides. Groups of sizes that divide nothing hold the same on every
rank, under one name whatever their size, so one mark stands for all of them.

The sweeper of `file://` spares marks, but somebody may remove a namespace while engines use it, and
some stores give up whatever was not used for long. So a writer leaves its mark again now and then:
where it is there, that counts as its use, and where it is not, new pages can soon be found again.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ...page_format.object_name import MARK_POOL, ObjectName
from ...page_format.object_shape import ObjectShape
from ...page_format.page_layout import PageLayout, ShardPlace
from ...page_format.shard_sources import ShardSource, sources_of
from ..base import StorageBackend, Write, WriteOutcome

OWN: Final = 0
"""In place of a TP size: the objects that are named as this rank's own."""
LOOK_AGAIN_S: Final = 10.0
ANNOUNCE_AGAIN_S: Final = 60.0
_MARK: Final = ObjectShape.whole(1)


@dataclass(slots=True)
class _Look:
    """One call that asks for marks, for all lookups that wait for its answer."""

    call: asyncio.Task[None]
    waiting: int = 0


class Shardings:
    """The TP sizes of the groups that have written to a store. One owner: the storage loop's thread."""

    def __init__(
        self,
        place: ShardPlace,
        layouts: Mapping[str, PageLayout],
        namespace: str,
        absent: Sequence[str] = (),
    ) -> None:
        """`layouts` are those of all pools by name, `absent` the optional columns not kept here."""
        self._place = place
        self._namespace = namespace
        dividing = {size for layout in layouts.values() for size in layout.tp_sizes()}
        # No units can be divided by more ranks than there are, so this stands for all such sizes.
        self._alike = max(dividing, default=1) + 1
        self._size = place.tp_size if place.tp_size in dividing else self._alike
        sizes = [
            size
            for size in sorted({*dividing, self._alike} - {self._size})
            if all(layout.can_be_held(size) for layout in layouts.values())
        ]
        others = {
            size: {
                pool: sources_of(layout, place, size, absent=absent)
                for pool, layout in layouts.items()
            }
            for size in sizes
        }
        self._others = {size: pools for size, pools in others.items() if any(pools.values())}
        # Who keeps least finds most, so nobody else could read what such ranks cannot.
        self._is_read = any(
            sources_of(
                layout,
                place._replace(tp_rank=0, tp_size=size),
                self._size,
                absent=layout.optional_names,
            )
            for layout in layouts.values()
            for size in sizes
        )
        self._known: tuple[int, ...] = ()
        self._preferred: dict[str, int] = {}
        self._look: _Look | None = None
        self._look_at = 0.0
        self._announce_at = 0.0

    @property
    def mark(self) -> ObjectName:
        """The name of the mark that this rank's group leaves."""
        return self._mark(self._size)

    async def look(self, backend: StorageBackend, now: float, deadline: float) -> None:
        """Find out who else has written, unless that was done a short time ago.

        Whoever comes while another looks waits for the same answer, until its own deadline. Raises what
        the store raises. What is known already is not forgotten.
        """
        look = self._look
        if look is None or look.call.done():
            unknown = [size for size in self._others if size not in self._known]
            if not unknown or now < self._look_at:
                return
            call = asyncio.create_task(self._look_for(unknown, backend, now, deadline))
            look = self._look = _Look(call)
        look.waiting += 1
        try:
            timeout_s = max(0.0, deadline - time.monotonic())
            await asyncio.wait([look.call], timeout=timeout_s)
        finally:
            look.waiting -= 1
            if not look.waiting and not look.call.done():
                # Nobody waits any more, and no call may outlive those who asked for it.
                self._look = None
                look.call.cancel()
                await asyncio.wait([look.call])
        if look.call.done() and not look.call.cancelled():
            look.call.result()

    async def _look_for(
        self, sizes: Sequence[int], backend: StorageBackend, now: float, deadline: float
    ) -> None:
        there = await backend.exists([self._mark(size) for size in sizes], deadline=deadline)
        found = {*self._known, *(size for size, each in zip(sizes, there, strict=True) if each)}
        self._known = tuple(size for size in self._others if size in found)
        self._look_at = now + LOOK_AGAIN_S

    async def announce(self, backend: StorageBackend, now: float, deadline: float) -> None:
        """Leave the mark of this rank's group, unless that was done a short time ago."""
        # What no group divides otherwise needs no mark.
        if not self._is_read or now < self._announce_at:
            return
        # Other batches begin while this one waits.
        self._announce_at = now + ANNOUNCE_AGAIN_S
        outcome = WriteOutcome.FAILED
        try:
            mark = Write(self.mark, (memoryview(b"\1"),), _MARK)
            (outcome,) = await backend.write([mark], deadline=deadline)
        finally:
            if outcome not in (WriteOutcome.OK, WriteOutcome.PRESENT):
                self._announce_at = 0.0

    def order(self, pool: str) -> list[int]:
        """Return whose objects to read a page from, as TP sizes, `OWN` for this rank's own names."""
        sizes = [OWN, *self.elsewhere(pool)]
        preferred = self._preferred.get(pool, OWN)
        return sorted(sizes, key=lambda size: size != preferred)

    def elsewhere(self, pool: str) -> list[int]:
        """Return the other TP sizes whose objects may hold pages of a pool.

        One of them may stand for all sizes that divide nothing.
        """
        return [size for size in self._known if self._others[size][pool]]

    def prefer(self, pool: str, size: int) -> None:
        """Note whose objects most pages of a batch were read from: the next are likely to be there."""
        self._preferred[pool] = size

    def sources(self, pool: str, size: int) -> tuple[ShardSource, ...]:
        """Return which objects of a group of that size hold this rank's part of a page."""
        return self._others[size][pool]

    def _mark(self, size: int) -> ObjectName:
        stage = f"stage{self._place.stage}of{self._place.stages}"
        group = "tp.all" if size == self._alike else f"tp{size}"
        return ObjectName(self._namespace, self._namespace, MARK_POOL, f"{stage}.{group}")
