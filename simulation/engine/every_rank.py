"""The device pages of one pool, on every rank at once."""

from collections.abc import Iterable, Sequence

from ..checkers.checkers import check_holding
from ..rank.memory import Slots, SymbolicMemory
from ..world.violated import Violated

NO_PAGE = -1
"""The entry of a page table at whose position the request has no page any more."""


class EveryRank:
    """One pool's device pages. A page has one number here, which `on` turns into a rank's own."""

    def __init__(
        self, devices: Sequence[Slots], numbers: Sequence[Sequence[int]] | None = None
    ) -> None:
        """`numbers` has for each rank the page's number there; without it all have the same one."""
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
        """Let the model change what a page holds from `before` to `after`; see `Slots.compute`."""
        for device, numbers in self._devices:
            device.compute(numbers[page], before, after, request)

    def fork(self, source: int, destination: int) -> None:
        """Copy one page to another at once, at this place in the order of the engine's own work."""
        for device, numbers in self._devices:
            device.fork(numbers[source], numbers[destination])

    def require_untouched(self, why: str, pages: Iterable[int]) -> None:
        """Raise if a copy may still touch one of `pages`, though the cache says that none does."""
        pages = list(pages)
        for device, numbers in self._devices:
            for page in pages:
                if device.touched(numbers[page]):
                    raise Violated(device.touched_although(numbers[page], why))

    def require_holding(self, wanted: Iterable[tuple[int, int, str]]) -> None:
        """Raise unless pages hold what `wanted` says; see `check_holding`."""
        wanted = list(wanted)
        for device, numbers in self._devices:
            on_rank = [(numbers[page], content, request) for page, content, request in wanted]
            check_holding(device, on_rank)


def every_rank(memories: Sequence[SymbolicMemory]) -> dict[str, EveryRank]:
    """Return the device pools of all ranks; in these a page has the same number on each rank."""
    return {
        pool: EveryRank([memory.device[pool] for memory in memories]) for pool in memories[0].device
    }
