"""Operations: their kinds, phases and outcomes, and which phase may follow which.

An operation is work that outlives the step that began it. Its phase is replicated state: it changes
by a command that every rank issues or by a verdict that every rank received, and in no other way.

    prefetch             WAITING -> (QUERY -> (RESTORABLE ->)) TRANSFER -> (QUIESCE ->) DONE
    backup, retract      ISSUED -> (QUIESCE ->) DONE
    load back, resume    ISSUED -> (QUIESCE ->) DONE
    persist              WAITING -> ISSUED -> (QUIESCE ->) DONE
    serve                SERVING -> QUIESCE -> DONE

QUIESCE is entered when an operation stops while some rank's I/O may still touch its pages. It ends
in DONE when every rank says that its I/O is quiet, or in QUARANTINED at its deadline, from where it
still ends in DONE if quiet ever comes.

Python 3.11 looks a member up anew each time that it is reached through its class. Modules that do so
for every operation in a step keep the members under names of their own.
"""

from enum import IntEnum

from ..errors import InternalError


class _Numbered(IntEnum):
    """Members are keys in every step: they hash as the numbers that they equal, not by name."""

    __hash__ = int.__hash__

    word: str
    """The name, kept because the property `name` looks it up anew each time."""

    def __init__(self, number: int) -> None:
        del number
        self.word = self.name


class Kind(_Numbered):
    """What an operation moves, and where to."""

    PREFETCH = 0
    """From storage (L3) to host memory (L2)."""
    BACKUP = 1
    """From the device (L1) to host memory (L2)."""
    LOAD_BACK = 2
    """From host memory (L2) to the device (L1)."""
    PERSIST = 3
    """From host memory (L2) to storage (L3)."""
    RETRACT = 4
    """From the device to host memory, with all that a request has of its own."""
    RESUME = 5
    """From host memory to the device, with all that a request had of its own."""
    SERVE = 6
    """From host memory to readers of other groups, for as long as they may read."""


class Phase(_Numbered):
    """Where an operation stands, on every rank alike."""

    WAITING = 0
    """It has not begun: it waits for its turn within a bound, in the order of ids."""
    QUERY = 1
    """The ranks look up what their stores have, and say how far it could be restored."""
    RESTORABLE = 2
    """The ranks differ in that, and look for a length that each of them can restore."""
    TRANSFER = 3
    """The ranks read its pages into host memory."""
    ISSUED = 4
    """The ranks copy or write; it ends by watermark."""
    QUIESCE = 5
    """It has stopped; some pages wait until no rank's I/O touches them."""
    QUARANTINED = 6
    """Quiet did not come in time; the pages stay out of use until it does."""
    DONE = 7
    """Nothing of it is left but its outcome."""
    SERVING = 8
    """Others may read its pages, now and then, until it is stopped."""


class Outcome(_Numbered):
    """How an operation ended."""

    COMPLETE = 0
    """Everything that was asked for was moved, on every rank."""
    PARTIAL = 1
    """A prefix was moved, on every rank alike."""
    MISS = 2
    """Some rank's store had nothing of it."""
    NO_ROOM = 3
    """There was no host page to receive it."""
    FAILED = 4
    """Some rank's copy or write failed or ran out of time."""
    ABORTED = 5
    """A command ended it before anything was moved."""
    EXPIRED = 6
    """Its turn did not come in time."""


class Queue(_Numbered):
    """The watermark lanes: operations that end in order, one ticket each."""

    BACKUP = 0
    LOAD_BACK = 1
    PERSIST = 2
    QUIESCE = 3
    """Operations in QUIESCE: ended means quiet, failed means that the deadline passed."""
    QUARANTINE = 4
    """Operations in QUARANTINED: ended means quiet at last."""


_STOPPED: dict[Phase, frozenset[Phase]] = {
    Phase.QUIESCE: frozenset({Phase.DONE, Phase.QUARANTINED}),
    Phase.QUARANTINED: frozenset({Phase.DONE}),
}
_COPY: dict[Phase, frozenset[Phase]] = {
    Phase.ISSUED: frozenset({Phase.DONE, Phase.QUIESCE}),
    **_STOPPED,
}

TRANSITIONS: dict[Kind, dict[Phase, frozenset[Phase]]] = {
    Kind.PREFETCH: {
        Phase.WAITING: frozenset({Phase.QUERY, Phase.TRANSFER, Phase.DONE}),
        Phase.QUERY: frozenset({Phase.RESTORABLE, Phase.TRANSFER, Phase.DONE}),
        Phase.RESTORABLE: frozenset({Phase.TRANSFER, Phase.DONE}),
        Phase.TRANSFER: frozenset({Phase.QUIESCE, Phase.DONE}),
        **_STOPPED,
    },
    Kind.BACKUP: _COPY,
    Kind.RETRACT: _COPY,
    Kind.LOAD_BACK: _COPY,
    Kind.RESUME: _COPY,
    Kind.PERSIST: {
        Phase.WAITING: frozenset({Phase.ISSUED, Phase.DONE}),
        **_COPY,
    },
    Kind.SERVE: {Phase.SERVING: frozenset({Phase.QUIESCE}), **_STOPPED},
}
"""The phases that may follow a phase. What is not listed cannot happen."""

FIRST_PHASE: dict[Kind, Phase] = {kind: next(iter(phases)) for kind, phases in TRANSITIONS.items()}
"""The phase in which an operation of each kind begins."""

_NOWHERE: frozenset[Phase] = frozenset()


def require_step(operation: int, kind: Kind, before: Phase, after: Phase) -> None:
    """Raise `InternalError` unless an operation of a kind may go from one phase to another."""
    if after not in TRANSITIONS[kind].get(before, _NOWHERE):
        raise InternalError(f"{kind.word} {operation} cannot go from {before.word} to {after.word}")
