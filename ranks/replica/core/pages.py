"""Page tables and the free list of one pool.

A page number names the same slot of the pool on every rank. The free list is replicated state, because
its order decides the next allocation. Only a command or verdict may change it.
"""

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from xxhash import xxh3_64_intdigest as fingerprint

from ....errors import InternalError
from .journal import Journal

if TYPE_CHECKING:
    PageRun: TypeAlias = array[int]
else:
    # Before Python 3.12, `array` takes no type parameters at run time.
    PageRun = array
"""Page numbers of one pool, in prefix order."""


def page_run(pages: Iterable[int] = ()) -> PageRun:
    """Return the given page numbers as a compact array."""
    return array("i", pages)


class PagePool:
    """The free list of one pool; the page freed last is allocated first."""

    def __init__(self, name: str, capacity: int, journal: Journal) -> None:
        self.name = name
        self.capacity = capacity
        self._free = page_run(range(capacity - 1, -1, -1))
        self._journal = journal

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def has(self, count: int) -> bool:
        """Return whether `count` pages are free."""
        return count <= len(self._free)

    def free_pages(self) -> PageRun:
        """Return a copy of the free list; its last page is allocated first."""
        return page_run(self._free)

    def take(self, count: int) -> PageRun:
        """Allocate `count` pages; raise `InternalError` if fewer are free."""
        if count > len(self._free):
            raise InternalError(
                f"{count} {self.name} pages were allocated of {len(self._free)} free"
            )
        if not count:
            return page_run()
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        self._journal.record("take", self.name, count, pages[0], fingerprint(pages))
        return pages

    def give_back(self, pages: PageRun) -> None:
        """Return pages to the free list; the next allocation takes them in the order given here."""
        if not pages:
            return
        self._free.extend(pages[::-1])
        self._journal.record("give back", self.name, len(pages), pages[0], fingerprint(pages))
        if len(self._free) > self.capacity:
            raise InternalError(f"more {self.name} pages were freed than the pool has")
