"""Requests that are put aside so that older ones can go on, and how they come back.

    retract -> SAVING -> SAVED -> resume -> RETURNING

The request that was admitted first comes back first. All of it follows from the answers of the cache,
which are the same on every rank in the same step.
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
"""Steps that a request waits for room that others are about to give back: a verdict comes so late."""


RoomFor = Callable[[ActiveRequest], int]
"""Says for how many tokens a request is to have device pages, of which it has computed some."""


class Place(Enum):
    """Where a request is that is aside."""

    SAVING = auto()
    """On its way to host memory."""
    SAVED = auto()
    """In host memory."""
    RETURNING = auto()
    """On its way to the device."""


@dataclass(slots=True, eq=False)
class _Retracted:
    """A request that is aside."""

    active: ActiveRequest
    place: Place = Place.SAVING


class Retractions:
    """The requests of one rank's engine that are off the device for others."""

    def __init__(self, cache: "Cache", forward: ForwardPass, counts: ReplayCounts) -> None:
        self._cache = cache
        self._forward = forward
        self._counts = counts
        self._aside: list[_Retracted] = []
        """Those that were admitted first come first."""
        self._short_steps = 0
        """For how many steps in a row somebody has found no room."""

    @property
    def requests(self) -> Sequence[ActiveRequest]:
        """All that are aside, and have not begun to come back."""
        return [each.active for each in self._aside if each.place is not Place.RETURNING]

    @property
    def places(self) -> Mapping[str, Place]:
        """Where those are that are aside, by name."""
        return {each.active.name: each.place for each in self._aside}

    def who_leaves(
        self, short: Sequence[ActiveRequest], running: Iterable[ActiveRequest]
    ) -> ActiveRequest | None:
        """Return who is to make room for those that have found none in this step, or None.

        It is the youngest of those that came after the oldest of them. Once in each step.
        """
        self._short_steps = self._short_steps + 1 if short else 0
        leaving = sum(each.place is Place.SAVING for each in self._aside)
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
        """Put a request aside; False, and it goes on, if host memory has no room for it."""
        # A real model has written the page that is not full yet; this one fills whole pages.
        self._forward.begin_page(active.name, active.tokens, active.computed)
        if not self._cache.retract(active.name, active.computed_ids):
            return False
        active.leave_device()
        active.was_aside = True
        self._counts.retractions += 1
        insort(self._aside, _Retracted(active), key=lambda each: each.active.turn)
        return True

    def step(self) -> list[ActiveRequest] | None:
        """Look at those that are being saved; return those that have lost what they had.

        Once in each step, after its verdict. None if nothing has changed.
        """
        lost: list[ActiveRequest] = []
        moved = False
        for each in [each for each in self._aside if each.place is Place.SAVING]:
            state = self._cache.load_state(each.active.name)
            moved |= state is not LoadState.SAVING
            if state is LoadState.SAVED:
                each.place = Place.SAVED
            elif state is LoadState.FAILED:
                self._aside.remove(each)
                lost.append(each.active)
        return lost if moved else None

    def bring_back(self, room_for: RoomFor) -> Iterator[tuple[ActiveRequest, bool]]:
        """Bring back who can come, as long as there is room; yield each, and whether it is admitted.

        It is not if it has lost what it had.
        """
        for each in [each for each in self._aside if each.place is Place.SAVED]:
            answer = self._resume(each, room_for(each.active))
            if answer is Wait.NO_ROOM:
                return
            if answer is not Wait.LOADING:
                yield each.active, answer is not Wait.LOST

    def came_back(self, name: str) -> None:
        """Note that a request is ready again, if it was aside."""
        for each in [each for each in self._aside if each.active.name == name]:
            self._aside.remove(each)
            self._counts.resumes += 1

    def forget(self, name: str) -> None:
        """Let go of a request, which the engine aborts in the cache."""
        self._aside = [each for each in self._aside if each.active.name != name]

    def _resume(self, each: _Retracted, reserve: int) -> Admission | Wait:
        active = each.active
        answer = self._cache.resume(active.name, reserve_tokens=reserve)
        if isinstance(answer, Wait):
            return answer
        each.place = Place.RETURNING
        if active.admission is not None:
            # To resume is to go on with the admission of before.
            answer = answer._replace(checkpoints=active.admission.checkpoints)
        active.admit(answer, reserve)
        return answer
