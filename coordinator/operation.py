"""Operations: their kinds, phases, outcomes, and the allowed phase transitions.

An operation is work that outlives the step that began it. Its phase is replicated state: it changes
only by a command that every rank issues or a verdict that every rank receives.

    prefetch             WAITING -> (QUERY -> (RESTORABLE ->)) TRANSFER -> (QUIESCE ->) DONE
    backup, retract      ISSUED -> (QUIESCE ->) DONE
    load back, resume    ISSUED -> (QUIESCE ->) DONE
    persist              WAITING -> ISSUED -> (QUIESCE ->) DONE
    serve                SERVING -> QUIESCE -> DONE

An operation enters QUIESCE if it stops while some rank's I/O may still touch its pages. It moves to
DONE when no rank has I/O in flight, or to QUARANTINED at its deadline, and from there to DONE once no
I/O is in flight.

In Python 3.11, reaching an enum member through its class costs a lookup each time. Modules that use
members for every operation in a step therefore bind them to module-level names.
"""

from enum import IntEnum

from ..errors import InternalError


class _Numbered(IntEnum):
    """Enum whose members hash as ints. Members are dict keys, and hashing by name would be slower."""

    __hash__ = int.__hash__

    word: str
    """The member's name, cached because the property `name` repeats a lookup on each access."""

    def __init__(self, number: int) -> None:
        del number
        self.word = self.name


class OperationKind(_Numbered):
    """The kind of an operation: the data that it moves, with source and destination tiers."""

    PREFETCH = 0
    """Prefetch: pages move from storage (L3) to host memory (L2)."""
    BACKUP = 1
    """Backup: pages move from the device (L1) to host memory (L2)."""
    LOAD_BACK = 2
    """Load back: pages move from host memory (L2) to the device (L1)."""
    PERSIST = 3
    """Persist: pages move from host memory (L2) to storage (L3)."""
    RETRACT = 4
    """Retract: a request's pages and private state move from the device to host memory."""
    RESUME = 5
    """Resume: a request's pages and private state move from host memory to the device."""
    SERVE = 6
    """Serve: other groups may read pages from host memory (L2) until the lease expires."""


class Phase(_Numbered):
    """The phase of an operation, equal on every rank."""

    WAITING = 0
    """The operation has not started: it waits for capacity, in order of operation ids."""
    QUERY = 1
    """The ranks look up their stores and report how many pages they can restore."""
    RESTORABLE = 2
    """The ranks' answers differ, so the ranks search for a length that all of them can restore."""
    TRANSFER = 3
    """The ranks read the operation's pages into host memory."""
    ISSUED = 4
    """The ranks copy or write the operation's pages. They agree on completion by the watermark of the
    operation's queue."""
    QUIESCE = 5
    """The operation has stopped; pages with I/O in flight on any rank are not freed yet."""
    QUARANTINED = 6
    """I/O was still in flight at the quiesce deadline. The operation's pages stay unusable until the
    I/O finishes."""
    DONE = 7
    """The operation has finished; only its outcome remains."""
    SERVING = 8
    """Other groups may read the operation's pages until the operation is stopped."""


class Outcome(_Numbered):
    """The result of an operation."""

    COMPLETE = 0
    """All requested pages were moved on every rank."""
    PARTIAL = 1
    """Only a prefix of the requested pages was moved, of the same length on every rank."""
    MISS = 2
    """The store of at least one rank had none of the requested pages."""
    NO_ROOM = 3
    """No host page was free to receive the data."""
    FAILED = 4
    """A copy or write failed or timed out on at least one rank."""
    ABORTED = 5
    """A command stopped the operation before anything was moved."""
    EXPIRED = 6
    """The operation timed out while it waited for capacity."""


class Queue(_Numbered):
    """The watermark queues of operations.

    For each queue, the ranks vote on the index up to which all operations have finished.
    """

    BACKUP = 0
    LOAD_BACK = 1
    PERSIST = 2
    QUIESCE = 3
    """The queue of operations in QUIESCE. Finished means no I/O in flight; failed means that I/O was
    still in flight at the quiesce deadline."""
    QUARANTINE = 4
    """The queue of operations in QUARANTINED. Finished means that no I/O is in flight any more."""


_STOPPED: dict[Phase, frozenset[Phase]] = {
    Phase.QUIESCE: frozenset({Phase.DONE, Phase.QUARANTINED}),
    Phase.QUARANTINED: frozenset({Phase.DONE}),
}
_COPY: dict[Phase, frozenset[Phase]] = {
    Phase.ISSUED: frozenset({Phase.DONE, Phase.QUIESCE}),
    **_STOPPED,
}

TRANSITIONS: dict[OperationKind, dict[Phase, frozenset[Phase]]] = {
    OperationKind.PREFETCH: {
        Phase.WAITING: frozenset({Phase.QUERY, Phase.TRANSFER, Phase.DONE}),
        Phase.QUERY: frozenset({Phase.RESTORABLE, Phase.TRANSFER, Phase.DONE}),
        Phase.RESTORABLE: frozenset({Phase.TRANSFER, Phase.DONE}),
        Phase.TRANSFER: frozenset({Phase.QUIESCE, Phase.DONE}),
        **_STOPPED,
    },
    OperationKind.BACKUP: _COPY,
    OperationKind.RETRACT: _COPY,
    OperationKind.LOAD_BACK: _COPY,
    OperationKind.RESUME: _COPY,
    OperationKind.PERSIST: {
        Phase.WAITING: frozenset({Phase.ISSUED, Phase.DONE}),
        **_COPY,
    },
    OperationKind.SERVE: {Phase.SERVING: frozenset({Phase.QUIESCE}), **_STOPPED},
}
"""The phases that may follow each phase, by kind of operation. Any other transition is an error."""

FIRST_PHASE: dict[OperationKind, Phase] = {
    kind: next(iter(phases)) for kind, phases in TRANSITIONS.items()
}

_NOWHERE: frozenset[Phase] = frozenset()


def require_step(operation: int, kind: OperationKind, before: Phase, after: Phase) -> None:
    """Raise `InternalError` unless an operation of a kind may move from phase `before` to `after`."""
    if after not in TRANSITIONS[kind].get(before, _NOWHERE):
        raise InternalError(f"{kind.word} {operation} cannot go from {before.word} to {after.word}")
