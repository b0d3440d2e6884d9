"""The owner of the device's pages: the replica itself, or an engine that lends them.

Two parts behind one interface, `owned.OwnedDevice` and `lent_device.LentDevice`. Both serve every
component of a model. What an engine may ask of them differs, since one that has an allocator of its
own names pages, and one that has none is given them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ....coordinator.operation import Kind
from ....errors import InternalError
from ..operations.kinds import Copy, Operation
from ..operations.requests import LoadState, Request


def _never(operation: Operation) -> None:
    raise InternalError(f"{operation.kind.name} {operation.id} stands in a queue of others")


class Follows(NamedTuple):
    """The methods that apply to the replica how operations of one kind have ended on every rank."""

    quiet: Callable[[Any], None]
    """Called when it was stopped, and no rank's I/O touches its pages any more."""
    ended: Callable[[Any], None] = _never
    """Called when it has ended well on every rank."""
    failed: Callable[[Any], None] = _never
    """Called when it has failed on some rank; it waits for quiet then."""


class Device(Protocol):
    """The interface of both parts to the rest of the replica."""

    def follows(self) -> dict[Kind, Follows]:
        """Return what follows from copies for requests, by their kind."""
        ...

    def load_state(self, request: Request) -> LoadState:
        """Say how far a request's pages have come."""
        ...

    def release(self, request: Request) -> bool:
        """Forget a request; say whether no copy touches device pages that it has lent."""
        ...

    def quarantined(self, operation: Copy) -> None:
        """Let nobody wait for a copy that hangs. One that writes lent pages never comes here."""
        ...

    def after_verdict(self) -> None:
        """Tell of the requests whose lent pages have become free."""
        ...
