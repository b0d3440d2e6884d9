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

Python 3.11 repeats the lookup each time an enum member is reached through its class. Modules that use
members for every operation in a step bind them to module-level names.
"""

from enum import IntEnum

from ..errors import InternalError


class _Numbered(IntEnum):
    """Enum whose members hash as ints instead of by name, because they are dict keys in every step."""

    __hash__ = int.__hash__

    word: str
    """The member's name, cached because the property `name` repeats a lookup on each access."""

    def __init__(self, number: int) -> None:
        del number
        self.word = self.name


class OperationKind(_Numbered):
    """The data that an operation moves, with its source and destination tiers."""

    PREFETCH = 0
    """From storage (L3) to host memory (L2)."""
    BACKUP = 1
    """From the device (L1) to host memory (L2)."""
    LOAD_BACK = 2
    """From host memory (L2) to the device (L1)."""
    PERSIST = 3
    """From host memory (L2) to storage (L3)."""
    RETRACT = 4
    """From the device to host memory, including all state private to a request."""
    RESUME = 5
    """From host memory to the device, including all state private to a request."""
    SERVE = 6
    """From host memory to readers of other groups, for as long as they are allowed to read."""


class Phase(_Numbered):
    """The phase of an operation, equal on every rank."""

    WAITING = 0
    """Not started: the operation waits for capacity, in order of ids."""
    QUERY = 1
    """The ranks look up their stores and report how many pages they can restore."""
    RESTORABLE = 2
    """The ranks' answers differ, and the ranks search for a length that all of them can restore."""
    TRANSFER = 3
    """The ranks read the operation's pages into host memory."""
    ISSUED = 4
    """The ranks copy or write; a watermark marks completion."""
    QUIESCE = 5
    """The operation has stopped; some pages wait until no rank has I/O in flight on them."""
    QUARANTINED = 6
    """I/O was still in flight at the quiesce deadline; the pages stay unusable until it finishes."""
    DONE = 7
    """The operation has finished; only its outcome remains."""
    SERVING = 8
    """Other groups may read the operation's pages until it is stopped."""


class Outcome(_Numbered):
    """The result of an operation."""

    COMPLETE = 0
    """All requested pages were moved on every rank."""
    PARTIAL = 1
    """A prefix was moved, of the same length on every rank."""
    MISS = 2
    """Some rank's store had none of the pages."""
    NO_ROOM = 3
    """No host page was free to receive the data."""
    FAILED = 4
    """Some rank's copy or write failed or timed out."""
    ABORTED = 5
    """A command stopped the operation before anything was moved."""
    EXPIRED = 6
    """The operation timed out while it waited for capacity."""


class Queue(_Numbered):
    """The watermark queues: operations that finish in order, with one ticket (queue position) each."""

    BACKUP = 0
    LOAD_BACK = 1
    PERSIST = 2
    QUIESCE = 3
    """Operations in QUIESCE: finished means no I/O in flight, failed means that the deadline passed."""
    QUARANTINE = 4
    """Operations in QUARANTINED: finished means that no I/O is in flight any more."""


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
