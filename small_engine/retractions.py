"""Retracted requests: choose a request to retract so that an older one can continue; resume it later.

    retract -> SAVING -> SAVED -> resume -> RETURNING

Requests are resumed in order of first admission. All decisions depend on the cache's answers, which are
equal on every rank in the same step.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from ..ranks.protocol.answers import Admission, Wait
from ..ranks.replica.operations.requests import LoadState
from .active_request import ActiveRequest, turn_of
from .counts import ReplayCounts
from .forward_pass import ForwardPass

if TYPE_CHECKING:
    from ..ranks.group.cache import Cache

SHORT_STEPS_MAX = 2
"""Number of consecutive steps that requests without room wait before another request is retracted. In
these steps, verdicts may free enough pages."""


RoomFor = Callable[[ActiveRequest], int]
"""Function that returns the number of tokens for which a request reserves device pages when it starts
or resumes."""


class RetractStage(Enum):
    """The state of a retracted request."""

    SAVING = auto()
    """The request's pages are being copied to host memory."""
    SAVED = auto()
    """The request's pages are in host memory."""
    RETURNING = auto()
    """The request's pages are being loaded back to the device."""


@dataclass(slots=True, eq=False)
class _Retracted:
    """A retracted request, and whether it is being saved, saved, or being loaded back."""

    active: ActiveRequest
    place: RetractStage = RetractStage.SAVING


class Retractions:
    """The retracted requests of one rank's engine."""

    def __init__(self, cache: "Cache", forward: ForwardPass, counts: ReplayCounts) -> None:
        self._cache = cache
        self._forward = forward
        self._counts = counts
        self._aside: list[_Retracted] = []
        """Retracted requests, in order of first admission, oldest first."""
        self._short_steps = 0
        """Number of consecutive steps in which some request found no room."""

    @property
    def requests(self) -> Sequence[ActiveRequest]:
        """The retracted requests whose pages are not being loaded back yet."""
        return [each.active for each in self._aside if each.place is not RetractStage.RETURNING]

    @property
    def places(self) -> Mapping[str, RetractStage]:
        """The `RetractStage` of each retracted request, by the request's name."""
        return {each.active.name: each.place for each in self._aside}

    def next_to_retract(
        self, short: Sequence[ActiveRequest], running: Iterable[ActiveRequest]
    ) -> ActiveRequest | None:
        """Choose a request to retract, so that the requests in `short` get device pages.

        The requests in `short` found no room in this step. Returns the youngest running request that is
        younger than the oldest one in `short`, or None if no retraction is needed or possible. Call
        once per step.
        """
        self._short_steps = self._short_steps + 1 if short else 0
        leaving = sum(each.place is RetractStage.SAVING for each in self._aside)
        if self._short_steps <= SHORT_STEPS_MAX or leaving >= len(short):
            return None
        oldest = min(each.turn for each in short)
        younger = [
            each
            for each in running
            if each.turn > oldest and (each.has_moved or not each.was_aside)
        ]
        return max(younger, key=turn_of, default=None)

    def retract(self, active: ActiveRequest) -> bool:
        """Retract a request; return False, and let it continue, if host memory has no room."""
        # Write the partial last page, because the simulated model has written whole pages only.
        self._forward.begin_page(active.name, active.tokens, active.computed)
        if not self._cache.retract(active.name, active.computed_ids):
            return False
        active.leave_device()
        active.was_aside = True
        self._counts.retractions += 1
        insort(self._aside, _Retracted(active), key=lambda each: each.active.turn)
        return True

    def step(self) -> list[ActiveRequest] | None:
        """Check the requests being saved; return those whose retraction failed.

        Call once per step, after its verdict. Returns None if nothing has changed.
        """
        lost: list[ActiveRequest] = []
        moved = False
        for each in [each for each in self._aside if each.place is RetractStage.SAVING]:
            state = self._cache.load_state(each.active.name)
            moved |= state is not LoadState.SAVING
            if state is LoadState.SAVED:
                each.place = RetractStage.SAVED
            elif state is LoadState.FAILED:
                self._aside.remove(each)
                lost.append(each.active)
        return lost if moved else None

    def bring_back(self, room_for: RoomFor) -> Iterator[tuple[ActiveRequest, bool]]:
        """Resume saved requests while there is room; yield a pair for each.

        The pair is (request, True), or (request, False) if the request's saved pages were lost.
        """
        for each in [each for each in self._aside if each.place is RetractStage.SAVED]:
            answer = self._resume(each, room_for(each.active))
            if answer is Wait.NO_ROOM:
                return
            if answer is not Wait.LOADING:
                yield each.active, answer is not Wait.LOST

    def came_back(self, name: str) -> None:
        """Count a retracted request as resumed once it is ready; do nothing for other requests."""
        for each in [each for each in self._aside if each.active.name == name]:
            self._aside.remove(each)
            self._counts.resumes += 1

    def forget(self, name: str) -> None:
        """Remove a request from the retracted ones because the engine aborts it."""
        self._aside = [each for each in self._aside if each.active.name != name]

    def _resume(self, each: _Retracted, reserve: int) -> Admission | Wait:
        active = each.active
        answer = self._cache.resume(active.name, reserve_tokens=reserve)
        if isinstance(answer, Wait):
            return answer
        each.place = RetractStage.RETURNING
        if active.admission is not None:
            # Keep the checkpoints of the first admission, because a resume returns none.
            answer = answer._replace(checkpoints=active.admission.checkpoints)
        active.admit(answer, reserve)
        return answer
