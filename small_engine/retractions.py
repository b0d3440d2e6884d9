"""Requests that are put aside so that older ones can go on, and how they come back.

    retract -> SAVING -> SAVED ------------------------------------------> resume
                           |  host memory is full, and it is the youngest
                           v
                        PARKING -> PARKED -> FETCHING -> FETCHED --------> load back

Who was admitted first comes back first. One that storage has to bring lets younger ones pass that host
memory still has: these give the room up that it needs there. All of it follows from the answers of the
cache, which are the same on every rank in the same step.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from ..ranks.replica.answers import Admission, Wait
from ..ranks.replica.attaching import StoreState
from ..ranks.replica.extent import Extent
from ..ranks.replica.requests import LoadState
from ..ranks.replica.tree.node import HOST
from .active_request import ActiveRequest, turn_of
from .counts import ReplayCounts
from .forward_pass import ForwardPass

if TYPE_CHECKING:
    from ..ranks.cache import Cache

SHORT_STEPS_MAX = 2
"""Steps that a request waits for room that others are about to give back: a verdict comes so late."""
IN_STORAGE_MAX = 4
"""How many requests are on their way to storage at a time, and how many on their way from there."""
FETCHES_MAX = 3
"""How often a parked request is asked for before what has not come of it is computed again."""
PARKING_S = 5.0
"""How long storage has to take a request, in agreed time; it is asked again after as long a pause."""


RoomFor = Callable[[ActiveRequest, int], int]
"""Says for how many tokens a request is to have device pages of which so many are there."""


class _Place(Enum):
    SAVING = auto()
    """On its way to host memory."""
    SAVED = auto()
    """In host memory."""
    PARKING = auto()
    """In host memory, and on its way to storage."""
    PARKED = auto()
    """In storage alone; the cache does not know it any more."""
    FETCHING = auto()
    """On its way from storage to host memory."""
    FETCHED = auto()
    """In host memory, as far as storage has given it back."""


@dataclass(slots=True, eq=False)
class _Retracted:
    """A request that is aside."""

    active: ActiveRequest
    place: _Place = _Place.SAVING
    until_ms: int = 0
    """When storage has had long enough to take it, in agreed time."""
    fetches: int = 0


class Retractions:
    """The requests of one rank's engine that are off the device for others."""

    def __init__(self, cache: "Cache", forward: ForwardPass, counts: ReplayCounts) -> None:
        self._cache = cache
        self._forward = forward
        self._counts = counts
        self._aside: list[_Retracted] = []
        """Those that were admitted first come first."""
        self._returning: dict[str, bool] = {}
        """Those that are being brought back with all that they had, and whether out of storage."""
        self._short_steps = 0
        """For how many steps in a row somebody has found no room."""
        self._parks_from_ms = 0
        """When storage may be asked again to take a request, after it has not taken one in time."""

    @property
    def requests(self) -> Sequence[ActiveRequest]:
        """All that are aside, and have not begun to come back."""
        return [each.active for each in self._aside]

    def who_leaves(
        self, short: Sequence[ActiveRequest], running: Iterable[ActiveRequest]
    ) -> ActiveRequest | None:
        """Return who is to make room for those that have found none in this step, or None.

        It is the youngest of those that came after the oldest of them. Once in each step.
        """
        self._short_steps = self._short_steps + 1 if short else 0
        leaving = len(self._at(_Place.SAVING))
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

    def make_room(self) -> bool:
        """Let the youngest go on to storage, since host memory is full; False if none can."""
        if self._at(_Place.PARKING):
            return True
        saved, now_ms = self._at(_Place.SAVED), self._cache.inspection.agreed_ms
        attached = self._cache.store_state() is StoreState.ATTACHED
        if not saved or not attached or now_ms < self._parks_from_ms:
            return False
        for each in saved[-min(IN_STORAGE_MAX, -(-len(saved) // 2)) :]:
            each.place, each.until_ms = _Place.PARKING, now_ms + int(1000 * PARKING_S)
        return True

    def step(self) -> list[ActiveRequest] | None:
        """Go on with those that are aside; return those that have lost what they had.

        Once in each step, after its verdict. None if nothing has changed.
        """
        lost: list[ActiveRequest] = []
        moved = False
        for each in list(self._aside):
            match each.place:
                case _Place.SAVING:
                    moved |= self._look_at_save(each, lost)
                case _Place.PARKING:
                    moved |= self._park(each)
                case _Place.FETCHING if self._cache.prefetch_done(each.active.name):
                    each.place, moved = _Place.FETCHED, True
                case _:
                    pass
        return lost if moved else None

    def bring_back(self, room_for: RoomFor) -> Iterator[tuple[ActiveRequest, bool]]:
        """Bring back who can come, as long as there is room; yield each, and whether it is admitted.

        It is not where what it had is lost. Those that storage has are asked for on the way.
        """
        for each in list(self._aside):
            active, there = each.active, each.active.computed
            if each.place is _Place.FETCHED:
                there = self._cache.received(active.name, active.wanted)
            falls_short = each.place is _Place.FETCHED and there < active.whole
            if each.place is _Place.PARKED or (falls_short and each.fetches < FETCHES_MAX):
                self._fetch(each)
                continue
            if each.place not in (_Place.SAVED, _Place.FETCHED):
                continue
            answer = self._admit(each, room_for(active, there))
            if answer is Wait.NO_ROOM:
                return
            if answer is Wait.LOADING:
                continue
            self._aside.remove(each)
            yield active, answer is not Wait.LOST

    def came_back(self, name: str) -> None:
        """Note that a request is ready again, if it was aside."""
        from_storage = self._returning.pop(name, None)
        if from_storage is not None:
            self._counts.resumes += 1
            self._counts.resumes_from_storage += from_storage

    def forget(self, name: str) -> None:
        """Let go of a request, which the engine aborts in the cache."""
        self._aside = [each for each in self._aside if each.active.name != name]
        self._returning.pop(name, None)

    def _at(self, place: _Place) -> list[_Retracted]:
        return [each for each in self._aside if each.place is place]

    def _look_at_save(self, each: _Retracted, lost: list[ActiveRequest]) -> bool:
        state = self._cache.load_state(each.active.name)
        if state is LoadState.SAVED:
            each.place = _Place.SAVED
        elif state is LoadState.FAILED:
            self._aside.remove(each)
            lost.append(each.active)
        return state is not LoadState.SAVING

    def _park(self, each: _Retracted) -> bool:
        """Go on with writing a request to storage, and let it go once that has all of it."""
        active, now_ms = each.active, self._cache.inspection.agreed_ms
        if self._cache.offer(active.name, active.computed_ids) == active.computed:
            self._cache.release(active.name)
            active.whole = active.computed
            each.place = _Place.PARKED
            return True
        attached = self._cache.store_state() is StoreState.ATTACHED
        if attached and now_ms <= each.until_ms:
            return False
        each.place = _Place.SAVED
        self._parks_from_ms = now_ms + int(1000 * PARKING_S)
        return True

    def _fetch(self, each: _Retracted) -> None:
        """Ask storage for a request, unless host memory gets room for it when another comes back."""
        active, residence = each.active, self._cache.inspection.prefixes.residence
        pages = -(-active.whole // self._cache.config.layout.page_tokens)
        if self._at(_Place.SAVED) and residence.available(HOST, 0) < pages:
            return
        if len(self._at(_Place.FETCHING)) >= IN_STORAGE_MAX:
            return
        self._cache.prefetch(active.name, active.wanted, extent=Extent.ALL)
        each.place, each.fetches = _Place.FETCHING, each.fetches + 1

    def _admit(self, each: _Retracted, reserve: int) -> Admission | Wait:
        active = each.active
        if each.place is _Place.SAVED:
            answer = self._cache.resume(active.name, reserve_tokens=reserve)
        else:
            answer = self._cache.load_back(active.name, active.wanted, reserve_tokens=reserve)
        if isinstance(answer, Wait):
            return answer
        if answer.cached_tokens == active.computed:
            self._returning[active.name] = each.place is _Place.FETCHED
        if active.admission is not None and not answer.checkpoints:
            # To resume is to go on with the admission of before.
            answer = answer._replace(checkpoints=active.admission.checkpoints)
        active.admit(answer, reserve)
        return answer
