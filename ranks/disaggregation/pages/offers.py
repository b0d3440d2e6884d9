"""The host pages that readers of other groups may have by now, and who is reading them.

One owner: the page server's thread. What is offered under an operation is read until that operation is
withdrawn; the same object may be offered under several, each of which holds its page by itself.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

Key = tuple[str, str]
"""Pool, and the page's key as it stands in names."""

OnQuiet = Callable[[int], None]


class OfferedPage(NamedTuple):
    """One page as it is offered: its slot in the pool, and its bytes there."""

    key: Key
    slot: int
    view: memoryview


@dataclass(slots=True, eq=False)
class Operation:
    """Pages that are offered together, and withdrawn together."""

    number: int
    pages: set[tuple[Key, int]] = field(default_factory=set[tuple[Key, int]])
    sending: int = 0
    """How many sends of its pages have begun and not ended."""
    on_quiet: list[OnQuiet] = field(default_factory=list[OnQuiet])
    is_withdrawn: bool = False


@dataclass(slots=True, eq=False)
class Page:
    """One host page that can be read."""

    view: memoryview
    header: bytes | None = None
    """The object's header, once somebody has read it: with the checksums of the bytes at that time."""
    operations: dict[int, Operation] = field(default_factory=dict[int, Operation])


class Offers:
    """What is offered, by operation and by object."""

    def __init__(self) -> None:
        self._operations: dict[int, Operation] = {}
        self.pages: dict[Key, dict[int, Page]] = {}
        """All that can be read now, by object and slot."""

    def serve(self, number: int, offered: Iterable[OfferedPage]) -> None:
        """Offer more pages under an operation; nothing if that is being withdrawn."""
        operation = self._operations.setdefault(number, Operation(number))
        if operation.is_withdrawn:
            return
        for key, slot, view in offered:
            page = self.pages.setdefault(key, {}).setdefault(slot, Page(view))
            page.operations[number] = operation
            operation.pages.add((key, slot))

    def withdraw(self, number: int, on_quiet: OnQuiet) -> Operation | None:
        """Begin no more sends under an operation; return it while some of them have not ended.

        `on_quiet` is called when they have, at once if there are none.
        """
        operation = self._operations.setdefault(number, Operation(number))
        operation.is_withdrawn = True
        operation.on_quiet.append(on_quiet)
        for key, slot in operation.pages:
            copies = self.pages[key]
            del copies[slot].operations[number]
            if not copies[slot].operations:
                del copies[slot]
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
        return key in self.pages

    def begin(self, key: Key) -> tuple[Page, Operation] | None:
        """Begin to send an object; None if it is not offered. `end` must follow for the operation."""
        copies = self.pages.get(key)
        if copies is None:
            return None
        page = next(iter(copies.values()))
        operation = next(iter(page.operations.values()))
        operation.sending += 1
        return page, operation

    def end(self, operation: Operation) -> None:
        """Note that a send has ended: nothing touches its page any more on its behalf."""
        operation.sending -= 1
        self._settle(operation)

    def _settle(self, operation: Operation) -> None:
        if not operation.is_withdrawn or operation.sending:
            return
        self._operations.pop(operation.number, None)
        on_quiet, operation.on_quiet = operation.on_quiet, []
        for each in on_quiet:
            each(operation.number)
