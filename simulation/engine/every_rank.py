"""The device pages of one pool on all ranks of a simulated group, changed together."""

from collections.abc import Iterable, Sequence

from ..checkers.checkers import check_holding
from ..rank.memory import Slots, SymbolicMemory
from ..world.violated import Violated

NO_PAGE = -1
"""The page-table entry of a position that has no page."""


class EveryRank:
    """One pool's device pages on all ranks, addressed by one common number for each page.

    `on` converts common numbers to a rank's own numbers.
    """

    def __init__(
        self, devices: Sequence[Slots], numbers: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Create the pool on these devices, one device per rank.

        `numbers` has, by rank, the rank's own number of every page; None means that all ranks use the
        same numbers.
        """
        self.count = len(devices[0].content)
        same = range(self.count)
        self._devices = [
            (device, same if numbers is None else numbers[rank])
            for rank, device in enumerate(devices)
        ]

    def on(self, rank: int, pages: Iterable[int]) -> list[int]:
        numbers = self._devices[rank][1]
        return [page if page == NO_PAGE else numbers[page] for page in pages]

    def compute(self, page: int, before: int, after: int, request: str) -> None:
        """Change a page's content from `before` to `after`; see `Slots.compute`."""
        for device, numbers in self._devices:
            device.compute(numbers[page], before, after, request)

    def fork(self, source: int, destination: int) -> None:
        """Copy one page's content to another page without delay; later work sees the copy."""
        for device, numbers in self._devices:
            device.fork(numbers[source], numbers[destination])

    def require_untouched(self, why: str, pages: Iterable[int]) -> None:
        """Raise if a copy may still access one of `pages`; `why` says why no copy should."""
        pages = list(pages)
        for device, numbers in self._devices:
            for page in pages:
                if device.touched(numbers[page]):
                    raise Violated(device.touched_although(numbers[page], why))

    def require_holding(self, wanted: Iterable[tuple[int, int, str]]) -> None:
        """Raise unless pages hold the contents in `wanted`; see `check_holding`."""
        wanted = list(wanted)
        for device, numbers in self._devices:
            on_rank = [(numbers[page], content, request) for page, content, request in wanted]
            check_holding(device, on_rank)


def every_rank(memories: Sequence[SymbolicMemory]) -> dict[str, EveryRank]:
    """Return the device pools of all ranks, with the same page numbers on each rank."""
    return {
        pool: EveryRank([memory.device[pool] for memory in memories]) for pool in memories[0].device
    }
