"""Effects: everything a command or a verdict makes the replica emit, as one value.

    answer, effects = replica.load_back(...)
    effects = replica.apply(verdict)

`Effects` is plain data. A driver processes the fields in the order of their definition. The replica
keeps no other output, so a driver never has to query it.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ...coordinator.expectations import Expectation
from .events import Event
from .orders import Order


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of a proposal, equal on every rank."""

    proposal: int | None
    """The proposal's digest; None means whichever proposal a rank has staged."""
    withdrawn: str | None = None
    """Why the proposal was rejected; None if it was applied."""
    refused_rank: int | None = None
    """The rank that caused `withdrawn` and has the details; None if no single rank did."""


class Effects(NamedTuple):
    """Effects of one command or verdict, in the order in which a driver must process them."""

    lost: str | None = None
    """Why the epoch is over, with equal text on all ranks; None while it goes on. If set, the driver
    ignores the fields after this one."""
    expectations: tuple[Expectation, ...] = ()
    """For this rank's ballot. Processed before the orders, because the ballot ignores reports about
    operations that it does not expect."""
    orders: tuple[Order, ...] = ()
    """For this rank's executor. Processed before the decisions, so that an attached store is not
    mistaken for a staged store that was rejected."""
    decisions: tuple[Decision, ...] = ()
    freed: tuple[str, ...] = ()
    """Finished requests whose engine-owned device pages (lent) are free from now on."""
    events: tuple[Event, ...] = ()
    """Events for statistics and subscribers."""
    events_before: int = 0
    """The number of events emitted before these, so also the number of the first event here."""
    requests: int = 0
    """Every rank has received the requests up to this number. The driver issues each one not yet issued
    as a command (`Replica.hear`). 0 if there are no new requests."""


NOTHING = Effects()


class Outbox:
    """Buffers the output of the replica's parts until `collect` returns it as effects.

    Output of a command that was refused halfway is collected with the next command's effects, because
    the same happened on every rank.
    """

    __slots__ = (
        *("_events_sent", "decisions", "expectations", "freed", "lost", "events", "requests"),
        "orders",
    )

    def __init__(self) -> None:
        self.lost: str | None = None
        self.expectations: list[Expectation] = []
        self.orders: list[Order] = []
        self.decisions: list[Decision] = []
        self.freed: list[str] = []
        self.events: list[Event] = []
        self.requests = 0
        self._events_sent = 0

    def collect(self) -> Effects:
        """Return the effects buffered since the last call."""
        events, expectations, orders = self.events, self.expectations, self.orders
        rare = self.decisions or self.freed or self.lost or self.requests
        if not (events or expectations or orders or rare):
            return NOTHING
        before = self._events_sent
        if events:
            self._events_sent += len(events)
            self.events = []
        if expectations:
            self.expectations = []
        if orders:
            self.orders = []
        told = tuple(expectations), tuple(orders), tuple(events)
        if not rare:
            return Effects(None, told[0], told[1], (), (), told[2], before)
        lost, decisions, freed = self.lost, tuple(self.decisions), tuple(self.freed)
        self.lost, self.decisions, self.freed = None, [], []
        requests, self.requests = self.requests, 0
        return Effects(lost, told[0], told[1], decisions, freed, told[2], before, requests)
