"""Paths of which something is still to be written to host memory or to the store."""

from collections import Counter
from enum import StrEnum
from typing import NamedTuple

from .node import Node


class Undone(StrEnum):
    """Why pages are not yet where the write policy wants them."""

    NO_HOST_ROOM = "no_host_room"
    """Host memory had no room for a backup."""
    COPY_FAILED = "copy_failed"
    """A copy to host memory failed on some rank."""
    STORE_FAILED = "store_failed"
    """A write to the store failed on some rank, or the store has lost what was written."""
    STORE_BUSY = "store_busy"
    """Too many writes to the store were waiting."""
    NEW_STORE = "new_store"
    """They were cached before the store was attached."""


class Awaited(NamedTuple):
    """A backup of pages that a request lends, of which not all could begin or go well."""

    cause: Undone
    pages: int
    ended: int
    """How many operations had ended when it was tried last."""
    store_paused: bool
    """Whether it had to wait for the store then."""


class Backlog:
    """The ends of these paths, in the order in which they are tried again.

    An entry stands for the whole path to its node. When the node leaves the tree, its parent takes the
    entry over. A node with an entry counts one in `Node.ends`, so it is not merged into its child.
    """

    def __init__(self, changed: dict[Node, None]) -> None:
        """`changed` gets the nodes that an entry no longer keeps from being merged."""
        self._changed = changed
        self._entries: dict[Node, tuple[Undone, int]] = {}
        self.pages: Counter[Undone] = Counter()
        """How many pages were left undone when the entries were made, by cause."""
        self.lost: Counter[Undone] = Counter()
        """Pages that left memory before they were written, by cause."""
        self.awaited: dict[str, Awaited] = {}
        """Of pages that an engine lends, by request: the engine gives them again, or gives up."""

    def __contains__(self, node: Node) -> bool:
        """Say whether a node has an entry."""
        return node in self._entries

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    def add(self, node: Node, cause: Undone, pages: int) -> None:
        """Put the path to a node at the end, with the number of pages that are not written."""
        parent = node.parent
        if parent is None:
            return
        if parent in self._entries and len(parent.children) == 1:
            # A prompt that grows: the entry of the longer path stands for the shorter one.
            pages = max(pages, self._remove(parent)[1])
        if node in self._entries:
            pages = max(pages, self._remove(node)[1])
        self._entries[node] = cause, pages
        self.pages[cause] += pages
        node.ends += 1

    def lender_waits(self, request: str, awaited: Awaited) -> None:
        """Note what was tried last of a backup of lent pages that is not complete."""
        self.lender_is_done(request)
        self.awaited[request] = awaited
        self.pages[awaited.cause] += awaited.pages

    def lender_is_done(self, request: str, *, gave_up: bool = False) -> None:
        """Forget that a request's backup waits; if its engine `gave_up`, its pages are lost."""
        awaited = self.awaited.pop(request, None)
        if awaited is not None:
            self.pages[awaited.cause] -= awaited.pages
            if gave_up:
                self.lost[awaited.cause] += awaited.pages

    def take(self) -> tuple[Node, Undone, int] | None:
        """Remove the first entry and return it; None if there is none."""
        node = next(iter(self._entries), None)
        return None if node is None else (node, *self._remove(node))

    def left(self, node: Node, parent: Node) -> None:
        """Hand the entry of a node that has left the tree to its parent."""
        if node in self._entries:
            cause, pages = self._remove(node)
            # Only of host memory are pages missing that a store has.
            gone = 0 if 0 in node.persisted else min(pages, node.width)
            self.lost[cause] += gone
            self.add(parent, cause, pages - gone)

    def clear(self) -> None:
        """Forget all entries."""
        while self.take() is not None:
            pass

    def nodes(self) -> list[Node]:
        """Return the nodes that have entries, in order."""
        return list(self._entries)

    def _remove(self, node: Node) -> tuple[Undone, int]:
        cause, pages = self._entries.pop(node)
        self.pages[cause] -= pages
        node.ends -= 1
        self._changed[node] = None
        return cause, pages
