"""The host pages that readers of other groups may have by now, and who is reading them.

One owner: the page server's thread. What is offered under an operation is read until that operation is
withdrawn; the same object may be offered under several, each of which holds its page by itself.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..executor.pools import PageLease

Key = tuple[str, str]
"""Pool, and the page's key as it stands in names."""

OnQuiet = Callable[[int], None]


class OfferedPage(NamedTuple):
    """One page as it is offered, with the bytes that it has at that time."""

    key: Key
    lease: PageLease


Place = tuple[int, int]
"""The slot of an offered page, and the slot's generation when it was offered."""


@dataclass(slots=True, eq=False)
class Offer:
    """Pages that are offered together, and withdrawn together."""

    number: int
    pages: set[tuple[Key, Place]] = field(default_factory=set[tuple[Key, Place]])
    sending: int = 0
    """How many sends of its pages have begun and not ended."""
    on_quiet: list[OnQuiet] = field(default_factory=list[OnQuiet])
    is_withdrawn: bool = False


@dataclass(slots=True, eq=False)
class HostPage:
    """One host page that can be read."""

    lease: PageLease
    header: bytes | None = None
    """The object's header, once somebody has read it: with the checksums of the bytes at that time."""
    operations: list[Offer] = field(default_factory=list[Offer])
    """Those under which it is offered."""


class Offers:
    """The offered pages, by operation and by object."""

    def __init__(self) -> None:
        self._operations: dict[int, Offer] = {}
        self.pages: dict[Key, dict[Place, HostPage]] = {}
        """All that is offered now, by object and place."""

    def serve(self, number: int, offered: Iterable[OfferedPage]) -> None:
        """Offer more pages under an operation; nothing if that is being withdrawn."""
        operation = self._operations.setdefault(number, Offer(number))
        if operation.is_withdrawn:
            return
        for key, lease in offered:
            place = lease.slot, lease.generation
            page = self.pages.setdefault(key, {}).setdefault(place, HostPage(lease))
            if (key, place) not in operation.pages:
                page.operations.append(operation)
                operation.pages.add((key, place))

    def withdraw(self, number: int, on_quiet: OnQuiet) -> Offer | None:
        """Begin no more sends under an operation; return it while some of them have not ended.

        `on_quiet` is called when they have, at once if there are none.
        """
        operation = self._operations.setdefault(number, Offer(number))
        operation.is_withdrawn = True
        operation.on_quiet.append(on_quiet)
        for key, place in operation.pages:
            copies = self.pages[key]
            copies[place].operations.remove(operation)
            if not copies[place].operations:
                del copies[place]
            if not copies:
                del self.pages[key]
        operation.pages.clear()
        self._settle(operation)
        return operation if operation.sending else None

    def withdraw_all(self) -> None:
        """Offer nothing any more."""
        for operation in list(self._operations.values()):
            for key, _ in operation.pages:
                self.pages.pop(key, None)
            operation.pages.clear()
            operation.is_withdrawn = True
            self._settle(operation)

    def has(self, key: Key) -> bool:
        """Say whether an object can be read now."""
        return self._current(key) is not None

    def begin(self, key: Key) -> tuple[HostPage, Offer] | None:
        """Begin to send an object; None if it is not offered. `end` must follow for the operation."""
        page = self._current(key)
        if page is None:
            return None
        operation = page.operations[0]
        operation.sending += 1
        return page, operation

    def end(self, operation: Offer) -> None:
        """Note that a send has ended: nothing touches its page any more on its behalf."""
        operation.sending -= 1
        self._settle(operation)

    def _current(self, key: Key) -> HostPage | None:
        """Return a page of an object whose slot still holds what was offered, if there is one."""
        copies = self.pages.get(key, {}).values()
        return next((each for each in copies if each.lease.is_current), None)

    def _settle(self, operation: Offer) -> None:
        if not operation.is_withdrawn or operation.sending:
            return
        self._operations.pop(operation.number, None)
        on_quiet, operation.on_quiet = operation.on_quiet, []
        for each in on_quiet:
            each(operation.number)
