"""Retries of backups for which host memory had no room, and of failed writes to the store."""

from collections.abc import Callable

from ...protocol.config import WritePolicy
from ..core.replica_parts import ReplicaParts
from ..tree.backlog import Backlog, Undone
from ..tree.node import DEVICE, HOST, Node
from ..tree.prefixes import Prefixes
from .backing_up import BackingUp
from .operation_table import OperationTable
from .persisting import Persisting

_TRIES = 4
"""Maximum number of backlog paths retried after one verdict, to bound the cost of a step."""


class Retrying:
    """Retries entries of the two backlogs of `PageAllocator` after each verdict.

    Host memory gets room only when an operation ends, so each path that waits for room is retried once
    after an operation has ended. An engine that lends device pages repeats its backups itself.
    """

    def __init__(
        self,
        basis: ReplicaParts,
        prefixes: Prefixes,
        operation_table: OperationTable,
        backing_up: BackingUp,
        persisting: Persisting,
    ) -> None:
        self._copies_again = (
            basis.config.device_pages > 0
            and basis.config.write_policy is not WritePolicy.WRITE_BACK
        )
        self._host_pages = basis.config.host_pages
        self._allocator = prefixes.allocator
        self._operation_table = operation_table
        self._backing_up = backing_up
        self._persisting = persisting
        self._ended = 0
        self._to_try = 0
        """Number of paths in `not_on_host` not yet retried since the last operation ended."""

    @property
    def is_due(self) -> bool:
        """Whether a backlog path is to be retried in the next step."""
        not_on_host, not_stored = self._allocator.backlogs
        if not_stored and self._store_takes_more():
            return True
        has_changed = self._to_try > 0 or self._ended != self._operation_table.ended
        return bool(not_on_host) and has_changed and not self._backing_up.pauses.blocks

    def after_verdict(self) -> None:
        """Retry backlog paths that may succeed now, a bounded number per verdict."""
        not_on_host, not_stored = self._allocator.backlogs
        if not_on_host:
            if self._ended != self._operation_table.ended:
                self._ended, self._to_try = self._operation_table.ended, len(not_on_host)
            most = min(_TRIES, self._to_try)
            self._to_try -= self._try(not_on_host, self._backing_up.pauses.allow, most)
        if not_stored:
            most = 1 if self._persisting.pauses.are_on else _TRIES
            self._try(not_stored, self._store_takes_more, most)

    def now(self) -> None:
        """Retry every backlog path at once, even during a backoff pause."""
        self._persisting.postpone_older()
        for pauses in (self._backing_up.pauses, self._persisting.pauses):
            pauses.succeeded()
        not_on_host, not_stored = self._allocator.backlogs
        self._try(not_on_host, self._backing_up.pauses.allow, len(not_on_host))
        self._try(not_stored, self._store_takes_more, len(not_stored))

    def _store_takes_more(self) -> bool:
        return self._persisting.has_turn and not self._persisting.pauses.blocks

    def _try(self, backlog: Backlog, may_try: Callable[[], bool], most: int) -> int:
        for count in range(most):
            entry = backlog.take() if backlog and may_try() else None
            if entry is None:
                return count
            self._try_path(entry[0], entry[1])
        return most

    def _try_path(self, node: Node, cause: Undone) -> None:
        on_device = node
        while on_device.parent is not None and on_device.values[DEVICE][0] is None:
            on_device = on_device.parent
        below = [each for each in node.path() if each.end > on_device.end]
        # Nodes below `on_device` cannot be copied from the device, so back up only the path to
        # `on_device`. If the host has all nodes below, back up the path to `node` itself: a match at
        # `node` may need window pages further up that only the device has.
        last = node if all(each.values[HOST][0] is not None for each in below) else on_device
        if self._copies_again and on_device.parent is not None:
            # Pin the path's host pages, because the backup of its upper part could evict them. If the
            # path is longer than host memory, do not pin them, because the backup needs their room.
            fits = node.end <= self._host_pages
            pins = self._backing_up.pin(node) if fits else []
            self._backing_up.write_through_again(last)
            self._allocator.release(pins)
        self._persisting.offer_again(node, cause)
