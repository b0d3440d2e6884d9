"""A request of the engine, as every replica knows it."""

from dataclasses import dataclass, field

from .holds import Receipt
from .pages import PageRun, page_run
from .tree import Place


@dataclass(slots=True, eq=False)
class Request:
    """What a request holds and what is on its way for it.

    `prefix`, `lock` and `own` are used where the replica owns the device pages, and `copies` where
    the engine does.
    """

    id: str
    place: Place
    admitted: bool = False
    """It has device pages, or lends some: what it computes from now on goes to the same place."""
    prefix: int = 0
    """Pages of its prefix that are in the tree, on the device, and locked for it."""
    lock: Receipt | None = None
    own: PageRun = field(default_factory=page_run)
    """Device pages of its own, which continue the prefix."""
    load: int | None = None
    """Its load back in flight."""
    load_failed: bool = False
    """Its last load back failed; where the engine owns the device pages, none is begun again."""
    prefetch: int | None = None
    """Its prefetch in flight."""
    fetched: tuple[int, int] = (0, 0)
    """Positions, in pages, that its prefetch brought from storage."""
    copies: set[int] = field(default_factory=set[int])
    """Copies to and from the device pages that the engine lends for it; some may have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """A notice: one rank could not do what the others could have done."""

    operation: int
    request: str
    rank: int | None
    page: int
    """The first page of the operation's that was not to be had."""
    key: bytes
    reason: str
