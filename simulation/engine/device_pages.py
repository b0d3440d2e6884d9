"""Simulated engine-owned device pages: an allocator with a prefix cache, like vLLM's.

The allocator makes the same decisions for all ranks, but gives a page a different number on each rank.
The different numbers show whether anything that ranks compare depends on page numbers. The contents of
free pages are checked, because no copy may access them.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from random import Random

from ..rank.memory import Slots
from ..world.contents import EMPTY, OVERWRITTEN, describe
from ..world.violated import Violated
from .every_rank import NO_PAGE, EveryRank


class AllocatedPages(EveryRank):
    """Counts the users of each device page of one pool, and allocates and frees its pages."""

    def __init__(self, devices: Sequence[Slots], random: Random) -> None:
        count = len(devices[0].content)
        super().__init__(devices, [random.sample(range(count), count) for _ in devices])
        self._users = [0] * count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        """Pages without users, in allocation order."""
        self._left = [list(device.content) for device in devices]
        """By rank: the content of each page when its last user dropped it."""
        self._cached: dict[int, int] = {}
        """By content: the page that is cached for this content."""
        self._contents: dict[int, int] = {}
        """By page: the content for which the page is cached."""

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate `count` pages with one user each; return None if fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._users[page] = 1
            self._forget(page)
        return pages

    def alone(self, pages: Iterable[int]) -> list[int]:
        """Return those of `pages` that have exactly one user."""
        return [page for page in pages if page != NO_PAGE and self._users[page] == 1]

    def has(self, content: int) -> bool:
        return content in self._cached

    def share(self, contents: Iterable[int]) -> list[int]:
        """Return the cached pages with `contents`, adding one user to each."""
        pages = [self._cached[content] for content in contents]
        for page in pages:
            self._users[page] += 1
            self._free.pop(page, None)
        return pages

    def publish(self, page: int, content: int) -> None:
        """Cache a page under its content."""
        if content not in self._cached and page not in self._contents:
            self._cached[content] = page
            self._contents[page] = content

    def give_back(self, pages: Sequence[int]) -> None:
        """Drop one user of each page; the last page that becomes free is reallocated first."""
        for page in reversed(pages):
            if page == NO_PAGE:
                continue
            self._users[page] -= 1
            if not self._users[page]:
                self._free[page] = None
                self._note_left(page)

    def overwrite(self, pages: Iterable[int]) -> None:
        """Overwrite the free pages among `pages`, as if requests of another engine had used them."""
        for page in pages:
            if page in self._free:
                self._forget(page)
                self.compute(page, EMPTY, OVERWRITTEN, "of another engine")
                self._note_left(page)

    def forget_cached(self) -> None:
        self._cached.clear()
        self._contents.clear()

    def check_free(self) -> None:
        """Raise if the content of a free page has changed, or if a transfer accesses one."""
        for (device, numbers), left in zip(self._devices, self._left, strict=True):
            for page in self._free:
                number = numbers[page]
                if device.touched(number):
                    raise Violated(device.touched_although(number, "it is free"))
                if (content := device.content[number]) != left[page]:
                    held = f"{describe(content)} instead of {describe(left[page])}"
                    what = f"{device.slot(number)} is free, but holds {held}"
                    raise Violated(f"rank {device.rank}: {what}")

    def _forget(self, page: int) -> None:
        content = self._contents.pop(page, None)
        if content is not None:
            del self._cached[content]

    def _note_left(self, page: int) -> None:
        for (device, numbers), left in zip(self._devices, self._left, strict=True):
            left[page] = device.content[numbers[page]]
