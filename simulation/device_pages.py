"""The device pages of an engine that owns them: an allocator with a prefix cache, as vLLM has one.

All ranks decide alike, and give each page another number on each rank: nothing that the ranks compare
may depend on a number. What a free page holds is watched, since no copy may touch it any more.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from random import Random

from .checkers import Violated, check_expected, check_hit
from .memory import Slots, describe


class DevicePages:
    """Who uses which page. Pages are numbered by the engine; `on` says how a rank numbers them."""

    def __init__(self, devices: Sequence[Slots], random: Random) -> None:
        self.count = len(devices[0].content)
        self._devices = devices
        self._numbers = [random.sample(range(self.count), self.count) for _ in devices]
        self._users = [0] * self.count
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.count))
        """Those without users, in the order in which they are handed out."""
        self._left = [list(device.content) for device in devices]
        """By rank: what a page without users held when its last user left it."""
        self._cached: dict[int, int] = {}
        """By content: the page that holds it."""
        self._contents: dict[int, int] = {}
        """By page: the content for which it is cached."""

    @property
    def free(self) -> int:
        """How many pages have no user."""
        return len(self._free)

    def on(self, rank: int, pages: Iterable[int]) -> list[int]:
        """Return the numbers of `pages` on `rank`."""
        numbers = self._numbers[rank]
        return [numbers[page] for page in pages]

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` pages for one user, or None if there are fewer without one."""
        if count > len(self._free):
            return None
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._users[page] = 1
            content = self._contents.pop(page, None)
            if content is not None:
                del self._cached[content]
        return pages

    def share(self, contents: Iterable[int]) -> list[int]:
        """Return the pages that hold the first of `contents`, for one user more."""
        pages: list[int] = []
        for content in contents:
            page = self._cached.get(content)
            if page is None:
                break
            self._users[page] += 1
            self._free.pop(page, None)
            pages.append(page)
        return pages

    def publish(self, pages: Sequence[int], contents: Sequence[int]) -> None:
        """Offer full pages to whoever needs what they hold."""
        for page, content in zip(pages, contents, strict=True):
            if content not in self._cached and page not in self._contents:
                self._cached[content] = page
                self._contents[page] = content

    def give_back(self, pages: Sequence[int]) -> None:
        """Drop one user of each page; the last page of a prefix is handed out before the others."""
        for page in reversed(pages):
            self._users[page] -= 1
            if not self._users[page]:
                self._free[page] = None
                for rank, device in enumerate(self._devices):
                    self._left[rank][page] = device.content[self._numbers[rank][page]]

    def forget_cached(self) -> None:
        """Offer nothing of what the pages hold now any more."""
        self._cached.clear()
        self._contents.clear()

    def require_untouched(self, who: str, pages: Iterable[int]) -> None:
        """Raise if a copy may still touch one of `pages`, of which the cache says that none does."""
        pages = list(pages)
        for rank, device in enumerate(self._devices):
            for number in self.on(rank, pages):
                if device.touched(number):
                    raise Violated(f"rank {rank}, {who}: a transfer touches device page {number}")

    def require_holding(self, who: str, table: Sequence[int], wanted: Sequence[int]) -> None:
        """Raise unless the first pages of `table` hold what is `wanted` of them on every rank."""
        by_place = dict(enumerate(wanted))
        for rank, device in enumerate(self._devices):
            check_hit(f"rank {rank}, {who}", device, self.on(rank, table), by_place)

    def compute(self, page: int, before: int, after: int, who: str) -> None:
        """Let the model turn what a page holds from `before` to `after` on every rank."""
        for rank, device in enumerate(self._devices):
            device.compute(self._numbers[rank][page], before, after, f"rank {rank}, {who}")

    def check(self, expected: Mapping[int, int]) -> None:
        """Raise unless pages hold what is `expected`, and those without a user what they held."""
        for rank, device in enumerate(self._devices):
            numbers, left = self._numbers[rank], self._left[rank]
            by_number = {numbers[page]: content for page, content in expected.items()}
            check_expected(f"rank {rank}", device, by_number)
            for page in self._free:
                number = numbers[page]
                if device.touched(number):
                    raise Violated(
                        f"rank {rank}: device page {number} is free, and a transfer touches it"
                    )
                if device.content[number] != left[page]:
                    raise Violated(
                        f"rank {rank}: device page {number} is free, and holds "
                        f"{describe(device.content[number])} instead of {describe(left[page])}"
                    )
