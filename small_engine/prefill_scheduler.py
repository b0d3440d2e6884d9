"""The scheduler of a group that computes prompts, with which other groups go on.

Requests come as messages, in the same step on every rank. One that has computed its prompt leaves the
device for host memory with all that it has, and from there for the other group; it is let go of when
that has it, or does not want it.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..ranks.disaggregation.control import Arrival, Control
from ..ranks.disaggregation.departures import Departures, GoesOn
from ..ranks.disaggregation.teller import Teller
from ..ranks.disaggregation.telling import Milestone
from ..ranks.replica.requests import LoadState
from .active_request import ActiveRequest
from .forward_pass import Forward
from .group_scheduler import GroupScheduler
from .handed_requests import request_of
from .limits import EngineLimits
from .request import output_tokens

if TYPE_CHECKING:
    from ..ranks.cache import Cache


class PrefillScheduler(GroupScheduler):
    """Drives one rank of a group that prefills."""

    retracts = False
    """What it has computed is cached, but for the end of a chunk; and what is saved may be served."""

    def __init__(
        self,
        cache: "Cache",
        departures: Departures,
        limits: EngineLimits,
        *,
        teller: Teller | None = None,
        on_done: Callable[[int], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
        forward: Forward | None = None,
    ) -> None:
        super().__init__(
            cache,
            limits,
            departures.refusals,
            departures.refuse,
            teller=teller,
            on_done=on_done,
            stopped=stopped,
            forward=forward,
        )
        self._leaving: list[ActiveRequest] = []
        """Those that have computed their prompts and still hold device pages, or are being saved."""
        self._offered: dict[str, ActiveRequest] = {}
        """Those that are saved, and which other groups may fetch."""
        self._handovers = departures

    @property
    def _queues(self) -> dict[str, Sequence[ActiveRequest]]:
        offered = list(self._offered.values())
        return super()._queues | {"leaving": self._leaving, "offered": offered}

    def _hear(self, message: Control) -> None:
        for gone in self._handovers.hear(message):
            self.abort(gone)

    def _enter(self, arrival: Arrival) -> None:
        active = self._active(request_of(arrival, decodes=False))
        self._handovers.begin(
            arrival.request,
            arrival.partner,
            arrival.namespace,
            patience_ms=arrival.patience_ms,
        )
        if active is None:
            self._handovers.withdraw(arrival.request)
            return
        self._cache.prefetch(active.name, active.matchable, active.namespace)
        self._waiting.append(active)

    def _publish(self, active: ActiveRequest) -> None:
        super()._publish(active)
        self._handovers.computed(active.name, active.computed_ids)

    def _prompt_is_computed(self, active: ActiveRequest) -> None:
        self._tell(active, Milestone.COMPUTED)
        self._publish(active)
        self._leaving.append(active)

    def _departures(self) -> bool:
        moved = False
        for active in list(self._leaving):
            moved |= self._leave(active)
        for gone in self._handovers.step():
            self.abort(gone)
            moved = True
        return moved

    def _leave(self, active: ActiveRequest) -> bool:
        """Take the next step of leaving the device; say whether there was one."""
        state = self._cache.load_state(active.name)
        if state is LoadState.READY:
            self._forward.begin_page(active.name, active.tokens, active.computed)
            return self._cache.retract(active.name, active.computed_ids)
        if state is LoadState.SAVING:
            return False
        self._leaving.remove(active)
        if state is LoadState.FAILED:
            self.counts.loads_failed += 1
            self._begin_again(active)
            return True
        (first,) = output_tokens(active.index, 1).tolist()
        self._offered[active.name] = active
        self._handovers.saved(active.name, active.computed_ids, GoesOn(first_token=first))
        self._count(active)
        return True

    def abort(self, name: str) -> None:
        """See `Scheduler`; the other group is told, and computes the request itself."""
        self._handovers.withdraw(name)
        self._offered.pop(name, None)
        self._leaving = [each for each in self._leaving if each.name != name]
        super().abort(name)
