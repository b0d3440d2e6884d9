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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from ..ranks.replica.answers import Admission, Wait
from ..ranks.replica.attaching import StoreState
from ..ranks.replica.extent import Extent
from ..ranks.replica.requests import LoadState
from ..ranks.replica.tree.components.base import Component
from ..ranks.replica.tree.node import DEVICE, HOST
from .active_request import ActiveRequest, turn_of
from .counts import ReplayCounts
from .forward_pass import ForwardPass

if TYPE_CHECKING:
    from ..ranks.cache import Cache

SHORT_STEPS_MAX = 2
"""Steps that a request waits for room that others are about to give back: a verdict comes so late."""
FETCHED_MAX = 4
"""How many requests storage brings at a time."""
SHORT_MAX = 8
"""How often storage is asked for what it has not brought of a request, before that is computed again:
host memory may have had no room for it just then."""
PARKING_S = 5.0
"""How long storage has to take a request, in agreed time; it is asked again after as long a pause."""


RoomFor = Callable[[ActiveRequest, int], int]
"""Says for how many tokens a request is to have device pages of which so many are there."""


class Place(Enum):
    """Where a request is that is aside."""

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
    RETURNING = auto()
    """On its way to the device."""


_ON_HOST = (Place.SAVING, Place.SAVED, Place.PARKING, Place.FETCHING, Place.FETCHED)
"""Where requests pin what they have in host memory, which they will give back."""


@dataclass(slots=True, eq=False)
class _Retracted:
    """A request that is aside."""

    active: ActiveRequest
    place: Place = Place.SAVING
    until_ms: int = 0
    """When storage has had long enough to take it, in agreed time."""
    from_storage: bool = False
    """Whether storage has brought it back."""
    is_whole: bool = False
    """Whether it comes back with all that it had."""
    short: int = 0
    """How often storage has not brought all of it."""


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
        self._parks_from_ms = 0
        """When storage may be asked again to take a request, after it has not taken one in time."""

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
        leaving = len(self._at(Place.SAVING))
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
        if self._at(Place.PARKING):
            return True
        saved, now_ms = self._at(Place.SAVED), self._cache.inspection.agreed_ms
        attached = self._cache.store_state() is StoreState.ATTACHED
        if not saved or not attached or now_ms < self._parks_from_ms:
            return False
        saved[-1].place, saved[-1].until_ms = Place.PARKING, now_ms + int(1000 * PARKING_S)
        return True

    def step(self) -> list[ActiveRequest] | None:
        """Go on with those that are aside; return those that have lost what they had.

        Once in each step, after its verdict. None if nothing has changed.
        """
        lost: list[ActiveRequest] = []
        moved = False
        for each in list(self._aside):
            match each.place:
                case Place.SAVING:
                    moved |= self._look_at_save(each, lost)
                case Place.PARKING:
                    moved |= self._park(each)
                case Place.FETCHING if self._cache.prefetch_done(each.active.name):
                    self._look_at_fetch(each)
                    moved = True
                case _:
                    pass
        return lost if moved else None

    def bring_back(self, room_for: RoomFor) -> Iterator[tuple[ActiveRequest, bool]]:
        """Bring back who can come, as long as there is room; yield each, and whether it is admitted.

        It is not where what it had is lost. Those that storage has are asked for on the way.
        """
        may_pass = True
        for each in list(self._aside):
            there = self._there(each)
            if each.place is Place.FETCHED and there < each.active.whole and each.short < SHORT_MAX:
                # Storage may still have it; or it has left host memory before there was room for it.
                each.place = Place.PARKED
            if each.place is Place.PARKED and self._has_room(HOST, each):
                if not self._has_room(DEVICE, each):
                    return
                self._cache.prefetch(
                    each.active.name, each.active.wanted, each.active.namespace, extent=Extent.ALL
                )
                each.place = Place.FETCHING
            may_pass &= each.place is not Place.FETCHING
            if each.place not in (Place.SAVED, Place.FETCHED) or not may_pass:
                continue
            answer = self._admit(each, room_for(each.active, there))
            if answer is Wait.NO_ROOM:
                return
            if answer is Wait.LOADING:
                continue
            yield each.active, answer is not Wait.LOST

    def came_back(self, name: str) -> None:
        """Note that a request is ready again, if it was aside."""
        for each in [each for each in self._aside if each.active.name == name]:
            self._aside.remove(each)
            # Of what storage has not brought whole the rest is computed again.
            self._counts.resumes += each.is_whole
            self._counts.resumes_from_storage += each.is_whole and each.from_storage

    def forget(self, name: str) -> None:
        """Let go of a request, which the engine aborts in the cache."""
        self._aside = [each for each in self._aside if each.active.name != name]

    def _at(self, *places: Place) -> list[_Retracted]:
        return [each for each in self._aside if each.place in places]

    def _there(self, each: _Retracted) -> int:
        """Return how much of what a request had could be admitted."""
        if each.place is Place.FETCHED or each.place is Place.FETCHING:
            return self._cache.received(each.active.name, each.active.wanted, each.active.namespace)
        return each.active.computed

    def _has_room(self, tier: int, parked: _Retracted) -> bool:
        """Say whether a tier could take a request, beside those that storage brings already.

        Of host memory it is said too where nobody else will give any back; and on the device those
        that come later count for nothing.
        """
        coming = [e for e in self._at(Place.FETCHING, Place.FETCHED) if e is not parked]
        if tier == DEVICE:
            coming = [each for each in coming if each.active.turn < parked.active.turn]
        elif not self._at(*_ON_HOST):
            return True
        elif len(coming) >= FETCHED_MAX:
            return False
        lengths = [each.active.whole for each in (parked, *coming)]
        residence = self._cache.inspection.prefixes.residence
        return all(
            residence.available(tier, each.index) >= sum(self._pages(each, e) for e in lengths)
            for each in self._cache.inspection.prefixes.components
        )

    def _pages(self, component: Component, tokens: int) -> int:
        """Return how many pages of a component a request of a length has, with its tail."""
        whole, rest = divmod(tokens, self._cache.config.layout.page_tokens)
        return whole + bool(rest) - component.needed_from(whole) if component.per_page else 1

    def _look_at_save(self, each: _Retracted, lost: list[ActiveRequest]) -> bool:
        state = self._cache.load_state(each.active.name)
        if state is LoadState.SAVED:
            each.place = Place.SAVED
        elif state is LoadState.FAILED:
            self._aside.remove(each)
            lost.append(each.active)
        return state is not LoadState.SAVING

    def _look_at_fetch(self, each: _Retracted) -> None:
        """See what storage has brought; it is asked again as long as it may still have the rest."""
        each.place = Place.FETCHED
        if self._there(each) < each.active.whole and each.short < SHORT_MAX:
            each.place = Place.PARKED
            # Where host memory still has none, storage is not to blame.
            each.short += self._has_room(HOST, each)

    def _park(self, each: _Retracted) -> bool:
        """Go on with writing a request to storage, and let it go once that has all of it."""
        active, now_ms = each.active, self._cache.inspection.agreed_ms
        if self._cache.offer(active.name, active.computed_ids) == active.computed:
            self._cache.release(active.name)
            active.whole = active.computed
            each.place = Place.PARKED
            return True
        attached = self._cache.store_state() is StoreState.ATTACHED
        if attached and now_ms <= each.until_ms:
            return False
        each.place = Place.SAVED
        self._parks_from_ms = now_ms + int(1000 * PARKING_S)
        return True

    def _admit(self, each: _Retracted, reserve: int) -> Admission | Wait:
        active = each.active
        if each.place is Place.SAVED:
            answer = self._cache.resume(active.name, reserve_tokens=reserve)
        else:
            answer = self._cache.load_back(
                active.name, active.wanted, active.namespace, reserve_tokens=reserve
            )
        if isinstance(answer, Wait):
            return answer
        each.from_storage = each.place is Place.FETCHED
        each.place, each.is_whole = Place.RETURNING, answer.cached_tokens == active.computed
        if active.admission is not None and not answer.checkpoints:
            # To resume is to go on with the admission of before.
            answer = answer._replace(checkpoints=active.admission.checkpoints)
        active.admit(answer, reserve)
        return answer
