"""Effects: everything a command or a verdict makes the replica emit, as one value.

    answer, effects = replica.load_back(...)
    effects = replica.apply(verdict)

`Effects` is plain data. A driver processes the fields in the order of their definition. The replica has
no other output, so a driver never has to query the replica.
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
    """The digest of the decided proposal. None means that the decision applies on each rank to the
    proposal staged there, if any."""
    withdrawn: str | None = None
    """Why the proposal was rejected; None if it was applied."""
    refused_rank: int | None = None
    """The rank whose log has the details of a rejected proposal; None if no single rank caused it."""


class Effects(NamedTuple):
    """Effects of one command or verdict, in the order in which a driver must process them."""

    lost: str | None = None
    """The reason why the epoch is over, equal on all ranks; None while the epoch goes on. If set, the
    driver ignores the fields after this one."""
    expectations: tuple[Expectation, ...] = ()
    """Operations that this rank's ballot must expect. Processed before the orders, because the ballot
    ignores progress of operations that it does not expect."""
    orders: tuple[Order, ...] = ()
    """Orders for this rank's executor. Processed before the decisions, because the executor must attach
    the staged store before the decision clears it."""
    decisions: tuple[Decision, ...] = ()
    freed: tuple[str, ...] = ()
    """Names of released requests whose engine-owned device pages are free from now on."""
    events: tuple[Event, ...] = ()
    """Events for statistics and subscribers."""
    events_before: int = 0
    """Number of events emitted before `events`, which is also the number of the first event in
    `events`."""
    requests: int = 0
    """The highest number up to which every rank has received all control requests; 0 if unchanged. The
    driver executes, as commands, the control requests up to this number that are not executed yet
    (`Replica.commit_message`)."""


NOTHING = Effects()


class Outbox:
    """Buffers the output of the replica's parts until `collect` returns the output as effects.

    If a command is refused after it has produced output, that output is collected with the next
    command's effects. All ranks stay equal, because they refuse the same command at the same point.
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
        batch = tuple(expectations), tuple(orders), tuple(events)
        if not rare:
            return Effects(None, batch[0], batch[1], (), (), batch[2], before)
        lost, decisions, freed = self.lost, tuple(self.decisions), tuple(self.freed)
        self.lost, self.decisions, self.freed = None, [], []
        requests, self.requests = self.requests, 0
        return Effects(lost, batch[0], batch[1], decisions, freed, batch[2], before, requests)
