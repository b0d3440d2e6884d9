"""Finds pages that groups of another TP size have written to the same store.

Each writing group writes a marker, a small object whose name states the group's TP size. From the TP
size, readers derive the names under which that group stored pages. A marker is a hint and may be out of
date. All TP sizes that are too large to divide any column share one marker, because their ranks hold
the same data under the same names.

The sweeper of `file://` keeps markers, but a user may remove a namespace in use, and some stores evict
objects that were not used for long. So each writer periodically writes its marker again, which restores
the marker or counts as its use.
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
"""In a list of TP sizes, this value means the objects under this rank's own names."""
LOOK_AGAIN_S: Final = 10.0
ANNOUNCE_AGAIN_S: Final = 60.0
_MARK: Final = ObjectShape.whole(1)


@dataclass(slots=True)
class _Look:
    """One lookup of markers in the store, shared by all callers that wait for its result."""

    call: asyncio.Task[None]
    waiting: int = 0


class Shardings:
    """The TP sizes of the groups that have written to one store, as their markers state.

    Only the storage loop's thread uses an instance.
    """

    def __init__(
        self,
        place: ShardPlace,
        layouts: Mapping[str, PageLayout],
        namespace: str,
        absent: Sequence[str] = (),
    ) -> None:
        """`layouts` are by pool name; `absent` lists the optional columns that this rank lacks."""
        self._place = place
        self._namespace = namespace
        dividing = {size for layout in layouts.values() for size in layout.tp_sizes()}
        # One TP size stands for all that are too large to divide any column: the largest TP size that
        # divides a column, plus one.
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
        # Find out whether groups of other TP sizes can read this group's objects. Assume that the
        # reading rank has no optional columns, because such a rank can use the most objects.
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
        """Return the name of the marker that this rank's group writes."""
        return self._mark(self._size)

    async def look(self, backend: StorageBackend, now: float, deadline: float) -> None:
        """Look up the markers of other groups, unless that was done less than `LOOK_AGAIN_S` ago.

        Concurrent callers share one lookup, and each waits until its own deadline. TP sizes found
        earlier stay known. Raises the store's errors.
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
                # Cancel the lookup of markers, because no caller waits for it any more.
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
        """Write the marker of this rank's group, at most once per `ANNOUNCE_AGAIN_S`."""
        # Write no marker if no group of another TP size can read this group's objects.
        if not self._is_read or now < self._announce_at:
            return
        # Set the time of the next write before the await, so that a concurrent call does not write the
        # marker too.
        self._announce_at = now + ANNOUNCE_AGAIN_S
        outcome = WriteOutcome.FAILED
        try:
            mark = Write(self.mark, (memoryview(b"\1"),), _MARK)
            (outcome,) = await backend.write([mark], deadline=deadline)
        finally:
            if outcome not in (WriteOutcome.OK, WriteOutcome.PRESENT):
                self._announce_at = 0.0

    def order(self, pool: str) -> list[int]:
        """Return the TP sizes at which to look for pages of a pool, the preferred one first.

        `OWN` means the objects under this rank's own names.
        """
        sizes = [OWN, *self.elsewhere(pool)]
        preferred = self._preferred.get(pool, OWN)
        return sorted(sizes, key=lambda size: size != preferred)

    def elsewhere(self, pool: str) -> list[int]:
        """Return the other TP sizes at which groups may have stored pages of a pool.

        Only groups whose markers were found count. One of the sizes may represent all TP sizes that are
        too large to divide any column.
        """
        return [size for size in self._known if self._others[size][pool]]

    def prefer(self, pool: str, size: int) -> None:
        """Record the TP size whose objects held most pages of a batch, to try it first next time."""
        self._preferred[pool] = size

    def sources(self, pool: str, size: int) -> tuple[ShardSource, ...]:
        """Return the objects written at TP size `size` that contain this rank's part of a page."""
        return self._others[size][pool]

    def _mark(self, size: int) -> ObjectName:
        stage = f"stage{self._place.stage}of{self._place.stages}"
        group = "tp.all" if size == self._alike else f"tp{size}"
        return ObjectName(self._namespace, self._namespace, MARK_POOL, f"{stage}.{group}")
