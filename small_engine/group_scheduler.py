"""The scheduler of a group that is told of its requests by messages, in the same step on every rank."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..ranks.disaggregation.control import Arrival, Control
from ..ranks.disaggregation.refusal import Refusal, Refused
from ..ranks.disaggregation.teller import Teller
from ..ranks.disaggregation.telling import Drain, EventsWanted, Milestone, RequestsWanted
from .active_request import ActiveRequest
from .forward_pass import Forward
from .handed_requests import control_messages
from .limits import EngineLimits
from .scheduler import Scheduler

if TYPE_CHECKING:
    from ..ranks.cache import Cache


class GroupScheduler(Scheduler):
    """Drives one rank of a group until it is `stopped`, or told that no more requests come."""

    def __init__(
        self,
        cache: "Cache",
        limits: EngineLimits,
        refusals: Counter[Refusal],
        turn_away: Callable[[str, str], None],
        *,
        teller: Teller | None = None,
        on_done: Callable[[int], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
        forward: Forward | None = None,
    ) -> None:
        """`teller` is rank 0's, where anybody wants to know how requests go.

        Messages that cannot be read are counted in `refusals`. `turn_away` tells the group at an inbox
        that a request is not taken here.
        """
        super().__init__(cache, iter(()), limits, on_done=on_done, stopped=stopped, forward=forward)
        self._teller = teller
        self._refusals = refusals
        self._turn_away = turn_away

    @abstractmethod
    def _enter(self, arrival: Arrival) -> None:
        """Take a request that is not here yet; raises `Refused` first for what is none."""

    @abstractmethod
    def _hear(self, message: Control) -> None:
        """Take what another group says of a request."""

    def _arrivals(self) -> bool:
        messages = control_messages(self._cache, self._refusals)
        for message in messages:
            match message:
                case Arrival():
                    self._take(message)
                case Drain():
                    self._exhausted = True
                case EventsWanted():
                    if self._teller is not None:
                        self._teller.wanted(message)
                case RequestsWanted():
                    if self._teller is not None:
                        self._teller.asked(message, self._here)
                case _:
                    self._hear(message)
        return bool(messages)

    @property
    def _here(self) -> dict[str, ActiveRequest]:
        """All requests in the system, by name."""
        return {each.name: each for queue in self._queues.values() for each in queue}

    def _take(self, arrival: Arrival) -> None:
        """Take a request that has come, unless it is here already, is none, or is one too many."""
        here, limits = self._here, self._limits
        if arrival.request in here:
            return
        prompt_tokens = sum(each.prompt for each in here.values())
        if len(here) >= limits.requests_max or prompt_tokens >= limits.prompt_tokens_max:
            self._refusals[Refusal.FULL] += 1
            self._turn_away(arrival.request, arrival.partner)
            return
        try:
            self._enter(arrival)
        except Refused as refused:
            self._refusals[refused.refusal] += 1

    def _tell(self, active: ActiveRequest, stage: Milestone) -> None:
        if self._teller is not None:
            hits = active.hits or active.admission
            hit = 0 if hits is None else hits.cached_tokens
            computed = 0 if hits is None else active.prompt - hit
            self._teller.progress(active.name, stage, hit_tokens=hit, computed_tokens=computed)

    def _refuse(self, active: ActiveRequest, pages: int) -> None:
        super()._refuse(active, pages)
        self._tell(active, Milestone.REFUSED)
