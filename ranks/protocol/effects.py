"""Effects: all that leaves the replica, as one value for each command and each verdict.

    answer, effects = replica.load_back(...)
    effects = replica.apply(verdict)

`Effects` are plain data. Whoever drives a replica follows its fields in the order in which they stand;
nothing else of it ever has to be asked for, and nothing is left behind in the replica.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ...coordinator.expectations import Expectation
from .notices import Notice
from .orders import Order


@dataclass(frozen=True, slots=True)
class Decision:
    """How a proposal has ended, on every rank."""

    proposal: int | None
    """Its digest; None stands for whatever a rank has staged."""
    withdrawn: str | None = None
    """Why nothing came of it; None if it was done."""
    refused_rank: int | None = None
    """The rank that `withdrawn` speaks of, which knows more of it; None if it is not of one rank."""


class Effects(NamedTuple):
    """The effects of a command or a verdict, in the order in which a driver must follow them."""

    lost: str | None = None
    """Why no rank can go on, in the same words on all of them. The epoch is over, and nothing of what
    follows here matters any more."""
    expectations: tuple[Expectation, ...] = ()
    """For this rank's ballot. They come before the orders, since reports about operations that are not
    expected are ignored."""
    orders: tuple[Order, ...] = ()
    """For this rank's executor. They come before the decisions, since a store that is attached must not
    seem to be one that was staged in vain."""
    decisions: tuple[Decision, ...] = ()
    """How proposals have ended."""
    freed: tuple[str, ...] = ()
    """Requests that have left, and whose lent device pages are free from now on."""
    notices: tuple[Notice, ...] = ()
    """What has happened, for whoever wants to know."""
    notices_before: int = 0
    """How many notices had left before these: the number of the first of them."""
    requests: int = 0
    """Every rank has the requests up to this number, and the driver reads each that it has not given
    back yet as a command (`Replica.hear`). 0 where there is nothing new."""


NOTHING = Effects()


class Outbox:
    """Holds what the parts of a replica put out, until it is collected as effects.

    What a command has caused before it was refused is collected with the effects of the next one: it
    has happened, on every rank alike.
    """

    __slots__ = (
        *("_noticed", "decisions", "expectations", "freed", "lost", "notices", "requests"),
        "orders",
    )

    def __init__(self) -> None:
        self.lost: str | None = None
        self.expectations: list[Expectation] = []
        self.orders: list[Order] = []
        self.decisions: list[Decision] = []
        self.freed: list[str] = []
        self.notices: list[Notice] = []
        self.requests = 0
        self._noticed = 0

    def collect(self) -> Effects:
        """Return all that was put in since the last time."""
        notices, expectations, orders = self.notices, self.expectations, self.orders
        rare = self.decisions or self.freed or self.lost or self.requests
        if not (notices or expectations or orders or rare):
            return NOTHING
        before = self._noticed
        if notices:
            self._noticed += len(notices)
            self.notices = []
        if expectations:
            self.expectations = []
        if orders:
            self.orders = []
        told = tuple(expectations), tuple(orders), tuple(notices)
        if not rare:
            return Effects(None, told[0], told[1], (), (), told[2], before)
        lost, decisions, freed = self.lost, tuple(self.decisions), tuple(self.freed)
        self.lost, self.decisions, self.freed = None, [], []
        requests, self.requests = self.requests, 0
        return Effects(lost, told[0], told[1], decisions, freed, told[2], before, requests)
