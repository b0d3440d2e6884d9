"""A scenario's rank: a real ballot, and an executor whose reports the scenario scripts."""

from collections.abc import Sequence
from typing import Protocol

from lockstep.coordinator.ballot import (
    Answered,
    Ballot,
    Capped,
    Expired,
    Landed,
    Progress,
    Quiesced,
    QuiesceExpired,
    TransferEnded,
)
from lockstep.coordinator.collective import Vector
from lockstep.coordinator.expectations import Expectation, Forgotten
from lockstep.coordinator.lanes import BallotShape, LaneLayout, Voter
from lockstep.coordinator.proposal import NOTHING_STAGED, Readiness, StagedLanes
from lockstep.ranks.executor.restorable import restorable
from lockstep.ranks.group.member.request_log import RequestLog
from lockstep.ranks.protocol.orders import (
    Cancel,
    CopyToDevice,
    CopyToHost,
    Fetch,
    LookUp,
    Order,
    Put,
)
from tests.kit.scenarios.language import proposal_of

CLOCK_MS = 1000
"""Initial time of each rank's clock, in milliseconds."""

Reported = LookUp | Fetch | Put | CopyToHost | CopyToDevice | Cancel
"""Types of orders whose progress an executor reports."""

_MOVES = (CopyToHost, CopyToDevice, Put)
_ANSWERS: dict[str, tuple[type[Reported], ...]] = {
    "answered": (LookUp,),
    "landed": (Fetch,),
    "corrupt": (Fetch,),
    "missing": (Fetch,),
    "ended": _MOVES,
    "failed": _MOVES,
    "quiesced": (Cancel,),
    "deadline": (LookUp, Fetch, Cancel, *_MOVES),
}
"""For each word that a report may contain: the types of orders whose progress the word can report."""


class Rank(Protocol):
    """Interface of a scenario's rank, which takes orders and casts ballots.

    The rank runs in this process or in another process.
    """

    def follow(self, expectations: Sequence[Expectation], orders: Sequence[Order]) -> None:
        """Process the expectations and orders that the replica has produced."""
        ...

    def hear(self, report: str) -> None:
        """Make the rank's executor report progress."""
        ...

    def vote(self, layout: LaneLayout) -> Vector: ...

    def read(self, number: int) -> bytes: ...


class InProcessRank:
    """A scenario's rank in this process."""

    def __init__(self, rank: int, shape: BallotShape) -> None:
        self._ballot = Ballot(shape, rank)
        self._orders: dict[int, Reported] = {}
        """The most recent order of each operation."""
        self._clock_ms = CLOCK_MS
        self._healthy = True
        self._staged = NOTHING_STAGED
        self._log: RequestLog | None = None

    def follow(self, expectations: Sequence[Expectation], orders: Sequence[Order]) -> None:
        self._ballot.follow(expectations)
        for order in orders:
            if isinstance(order, Reported):
                self._orders[order.operation] = order
        for each in expectations:
            if isinstance(each, Forgotten):
                self._orders.pop(each.operation, None)

    def hear(self, report: str) -> None:
        """Make the rank's executor report progress.

        In the report `op 3 landed 7`, 3 is the operation. The report `landed 7` is enough if `landed`
        fits only one order.
        """
        words = report.split()
        match words:
            case ["sick"]:
                self._healthy = False
            case ["clock", now]:
                self._clock_ms = int(now)
            case ["staged", *what]:
                self._staged = StagedLanes(proposal_of(" ".join(what)).digest, Readiness.STAGED)
            case ["ready" | "refused" as word]:
                self._staged = StagedLanes(self._staged.proposal, Readiness[word.upper()])
            case ["unstaged"]:
                self._staged = NOTHING_STAGED
            case ["inbox"]:
                self._log = RequestLog()
            case ["message", number, *content]:
                assert self._log is not None, "write 'all ranks: inbox' before the first message"
                self._log.note(int(number), " ".join(content).encode())
            case ["all", "well"]:
                for order in self._orders.values():
                    self._ballot.note(_best(order))
            case ["op", number, *rest]:
                self._ballot.note(self._progress(int(number), rest))
            case _:
                self._ballot.note(self._progress(self._meant(words[0]), words))

    def vote(self, layout: LaneLayout) -> Vector:
        voter = Voter(
            healthy=self._healthy,
            time_ms=self._clock_ms,
            staged=self._staged,
            requests=None if self._log is None else self._log.count,
        )
        return self._ballot.fill(layout, voter)

    def read(self, number: int) -> bytes:
        assert self._log is not None
        return self._log.read(number)

    def _meant(self, word: str) -> int:
        kinds = _ANSWERS[word]
        meant = [number for number, order in self._orders.items() if isinstance(order, kinds)]
        if len(meant) != 1:
            raise ValueError(f"{word!r} may be about the operations {meant}; write 'op 1 {word}'")
        return meant[0]

    def _progress(self, operation: int, words: Sequence[str]) -> Progress:
        match words:
            case ["answered", pages]:
                return Answered(operation, int(pages))
            case ["answered", "only", *lengths]:
                return Answered(operation, 0, tuple(map(int, lengths)))
            case ["landed", pages]:
                return Landed(operation, int(pages))
            case ["corrupt" | "missing", "page", page]:
                return Capped(operation, int(page))
            case ["ended" | "failed" as how]:
                return TransferEnded(operation, ok=how == "ended")
            case ["quiesced"]:
                return Quiesced(operation)
            case ["deadline"]:
                return self._late(operation)
            case _:
                raise ValueError(f"no executor reports {' '.join(words)!r}")

    def _late(self, operation: int) -> Progress:
        order = self._orders[operation]
        if isinstance(order, Cancel):
            return QuiesceExpired(operation)
        return (
            Expired(operation)
            if isinstance(order, LookUp | Fetch)
            else TransferEnded(operation, ok=False)
        )


def _best(order: Reported) -> Progress:
    """Return the progress of an order that succeeds completely, on a store that has every key."""
    operation = order.operation
    match order:
        case LookUp(needs=needs):
            present = [[True] * len(need.keys) for need in needs]
            return Answered(operation, *restorable(order, present))
        case Fetch(transfers=transfers):
            return Landed(operation, sum(len(each.keys) for each in transfers))
        case Cancel():
            return Quiesced(operation)
        case _:
            return TransferEnded(operation, ok=True)
