"""A request of the engine, as every replica knows it."""

from dataclasses import InitVar, dataclass, field

from .holds import Receipt
from .pages import PageRun, page_run
from .tree import Node, Place


@dataclass(slots=True, eq=False)
class Request:
    """What a request holds and what is on its way for it.

    `prefix`, `locks` and `own` are used where the replica owns the device pages, and `copies` where
    the engine does.
    """

    id: str
    place: Place
    components: InitVar[int] = 1
    """How many components the model has."""
    admitted: bool = False
    """It has device pages, or lends some: what it computes from now on goes to the same place."""
    prefix: int = 0
    """Pages of its prefix that are in the tree, on the device, and locked for it."""
    node: Node | None = None
    """Where that prefix ends."""
    locks: list[Receipt] = field(default_factory=list[Receipt])
    own: list[PageRun] = field(init=False)
    """By component: device pages of its own, which continue the prefix; or the one slot in which a
    recurrent state is computed."""
    priority: int = 0
    """What it shares is evicted after what only requests of lower priority used."""
    checkpoints: frozenset[int] = frozenset()
    """Positions, in pages, at which a recurrent state is kept beside the regular ones."""
    retract: int | None = None
    """The operation that copies it to the host."""
    saved: list[PageRun] | None = None
    """By component, once it is retracted: host pages that hold what was its own."""
    computed: int = 0
    """How many tokens it had computed when it was retracted."""
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

    def __post_init__(self, components: int) -> None:
        self.own = [page_run() for _ in range(components)]


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
