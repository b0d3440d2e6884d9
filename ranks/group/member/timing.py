"""What commands and verdicts mean for a timeline: operations that begin, move on and end; requests.

Derived from what leaves the replica anyway, on the engine's thread. Nobody pays for it where there is
no timeline.
"""

import time

from ....coordinator.expectations import Seated
from ....coordinator.operation import Phase
from ...protocol.effects import Effects
from ...protocol.notices import Finished, Hit, Quarantined
from ...protocol.orders import Cancel, Put
from ...protocol.timed_events import (
    OperationBegan,
    OperationEnded,
    OperationMoved,
    RequestAdmitted,
    RequestReleased,
    Timeline,
)
from ...replica.operations.agenda import Agenda


class EffectTimes:
    """Tells a timeline what follows from commands and verdicts, as they are followed."""

    def __init__(self, agenda: Agenda, timeline: Timeline) -> None:
        self._agenda = agenda
        self._tell = timeline
        self._next_id = agenda.next_id
        self._phases: dict[int, str] = {}
        """The phase of each operation that has begun and not ended."""

    def follow(self, effects: Effects) -> None:
        """Tell what has changed by a command or a verdict."""
        now = time.monotonic()
        if self._next_id < self._agenda.next_id:
            self._tell_of_new(now)
        for expected in effects.expectations:
            if isinstance(expected, Seated):
                self._move(expected.operation, expected.phase, now)
        for order in effects.orders:
            if isinstance(order, Put):
                self._move(order.operation, Phase.ISSUED, now)
            elif isinstance(order, Cancel):
                self._move(order.operation, Phase.QUIESCE, now)
        for notice in effects.notices:
            if isinstance(notice, Finished):
                self._phases.pop(notice.operation, None)
                kind, outcome = _word(notice.kind.word), _word(notice.outcome.word)
                self._tell(OperationEnded(notice.operation, kind, outcome, now))
            elif isinstance(notice, Quarantined):
                self._move(notice.operation, Phase.QUARANTINED, now)
            elif isinstance(notice, Hit):
                self._tell(RequestAdmitted(*notice, now))

    def released(self, request: str) -> None:
        """Tell that the engine has let go of a request."""
        self._tell(RequestReleased(request, time.monotonic()))

    def _tell_of_new(self, now: float) -> None:
        for number in range(self._next_id, self._agenda.next_id):
            operation = self._agenda.in_flight.get(number)
            # One that has ended in the same command never took any time.
            if operation is not None:
                phase = self._phases[number] = _word(operation.phase.word)
                request = str(getattr(operation, "request", ""))
                kind = _word(operation.kind.word)
                self._tell(OperationBegan(number, kind, request, phase, now))
        self._next_id = self._agenda.next_id

    def _move(self, operation: int, phase: Phase, now: float) -> None:
        word = _word(phase.word)
        if self._phases.get(operation, word) != word:
            self._phases[operation] = word
            self._tell(OperationMoved(operation, word, now))


def _word(name: str) -> str:
    return name.lower()
