"""The interface to device pages, owned by the replica or lent by an engine.

The implementations are `owned.OwnedDevice` and `lent_device.LentDevice`. Both support every component
of a model. An engine with a page allocator names device pages in its commands (lent). For other engines
the replica allocates device pages (owned).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ....coordinator.operation import OperationKind
from ....errors import InternalError
from ..operations.kinds import Copy, Operation
from ..operations.requests import LoadState, Request


def _never(operation: Operation) -> None:
    raise InternalError(f"{operation.kind.name} {operation.id} is in a queue of other kinds")


class Follows(NamedTuple):
    """Functions that apply the outcomes of one kind of operation, as agreed on by all ranks."""

    quiet: Callable[[Any], None]
    """Called for a stopped operation when no rank's I/O touches its pages any more."""
    ended: Callable[[Any], None] = _never
    """Called when the operation has succeeded on every rank."""
    failed: Callable[[Any], None] = _never
    """Called when the operation has failed on some rank. When the operation's I/O has ended, `quiet` is
    called, too."""


class Device(Protocol):
    """The interface of owned and lent device pages to the rest of the replica."""

    def follows(self) -> dict[OperationKind, Follows]:
        """Return the functions that apply the outcomes of copies, by kind of copy."""
        ...

    def load_state(self, request: Request) -> LoadState:
        """Return the state of the copies of a request's pages."""
        ...

    def release(self, request: Request) -> bool:
        """Forget a request; return False if a copy in flight touches pages that the request lent."""
        ...

    def quarantined(self, operation: Copy) -> None:
        """Let a request stop waiting for its quarantined copy, unless the copy writes lent pages."""
        ...

    def after_verdict(self) -> None:
        """Report released requests in the effects once no copy touches their lent pages any more."""
        ...
