"""Backlogs: paths with pages still to be written to host memory or to the store."""

from collections import Counter
from enum import StrEnum
from typing import NamedTuple

from .node import Node


class Undone(StrEnum):
    """The reasons why pages are not yet written to a tier although the write policy demands it."""

    NO_HOST_ROOM = "no_host_room"
    """Host memory had no room for a backup."""
    COPY_FAILED = "copy_failed"
    """A copy to host memory failed on some rank."""
    STORE_FAILED = "store_failed"
    """A write to the store failed on some rank, or the store has lost the pages."""
    STORE_BUSY = "store_busy"
    """Too many writes to the store were waiting."""
    NEW_STORE = "new_store"
    """The pages were cached before the store was attached."""


class Awaited(NamedTuple):
    """An incomplete backup of device pages that a request lends."""

    cause: Undone
    pages: int
    ended: int
    """The number of operations that had ended in the epoch when the backup was last tried."""
    store_paused: bool
    """Whether the last try had to wait for room in the store's write queue or the end of a backoff."""


class Backlog:
    """Paths with unwritten pages, each represented by its last node, in retry order.

    When the last node of a path leaves the tree, the path's entry moves to the node's parent. Entries
    are counted in `Node.ends`, so that a node with an entry is not merged into its child.
    """

    def __init__(self, changed: dict[Node, None]) -> None:
        """`changed` receives the nodes that have lost their entry and may now be mergeable."""
        self._changed = changed
        self._entries: dict[Node, tuple[Undone, int]] = {}
        self.pages: Counter[Undone] = Counter()
        """Number of unwritten pages of the current entries, by cause."""
        self.lost: Counter[Undone] = Counter()
        """Number of pages evicted before they were written, by cause."""
        self.awaited: dict[str, Awaited] = {}
        """Incomplete backups of lent pages, by request; each continues when the engine lends the pages
        again."""

    def __contains__(self, node: Node) -> bool:
        """Return whether a node has an entry in the backlog."""
        return node in self._entries

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    def add(self, node: Node, cause: Undone, pages: int) -> None:
        """Add an entry for the path to a node, of which `pages` pages are unwritten."""
        parent = node.parent
        if parent is None:
            return
        if parent in self._entries and len(parent.children) == 1:
            # Keep one entry for a growing prompt: the longer path's entry replaces its parent's.
            pages = max(pages, self._remove(parent)[1])
        if node in self._entries:
            pages = max(pages, self._remove(node)[1])
        self._entries[node] = cause, pages
        self.pages[cause] += pages
        node.ends += 1

    def engine_waits_for(self, request: str, awaited: Awaited) -> None:
        """Record that a request's backup of lent pages is incomplete, as of the last try."""
        self.engine_is_done(request)
        self.awaited[request] = awaited
        self.pages[awaited.cause] += awaited.pages

    def engine_is_done(self, request: str, *, gave_up: bool = False) -> None:
        """Remove a request's incomplete backup; if the engine `gave_up`, count its pages as lost."""
        awaited = self.awaited.pop(request, None)
        if awaited is not None:
            self.pages[awaited.cause] -= awaited.pages
            if gave_up:
                self.lost[awaited.cause] += awaited.pages

    def take(self) -> tuple[Node, Undone, int] | None:
        """Remove and return the first entry; None if there is none."""
        node = next(iter(self._entries), None)
        return None if node is None else (node, *self._remove(node))

    def left(self, node: Node, parent: Node) -> None:
        """Move the entry, if any, of a node that has left the tree to the node's parent."""
        if node in self._entries:
            cause, pages = self._remove(node)
            # Count as lost only pages that the store lacks; the others are missing only in host memory.
            gone = 0 if 0 in node.persisted else min(pages, node.width)
            self.lost[cause] += gone
            self.add(parent, cause, pages - gone)

    def clear(self) -> None:
        """Remove all entries."""
        while self.take() is not None:
            pass

    def nodes(self) -> list[Node]:
        """Return the nodes that have entries, in retry order."""
        return list(self._entries)

    def _remove(self, node: Node) -> tuple[Undone, int]:
        cause, pages = self._entries.pop(node)
        self.pages[cause] -= pages
        node.ends -= 1
        self._changed[node] = None
        return cause, pages
