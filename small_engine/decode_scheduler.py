"""The scheduler of a group that goes on with requests that other groups have computed.

It hears of a request when the other group does, fetches what that announces, and admits it when all of
it is here, or when it is clear that not all of it will be: then it computes the rest.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..ranks.disaggregation.arrivals import Arrivals
from ..ranks.disaggregation.control import Arrival, Control
from ..ranks.disaggregation.teller import Teller
from ..ranks.disaggregation.telling import Milestone
from .active_request import ActiveRequest
from .forward_pass import Forward
from .group_scheduler import GroupScheduler
from .handed_requests import request_of
from .limits import EngineLimits

if TYPE_CHECKING:
    from ..ranks.cache import Cache


class DecodeScheduler(GroupScheduler):
    """Drives one rank of a group that decodes."""

    def __init__(
        self,
        cache: "Cache",
        arrivals: Arrivals,
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
            arrivals.refusals,
            arrivals.refuse,
            teller=teller,
            on_done=on_done,
            stopped=stopped,
            forward=forward,
        )
        self._handovers = arrivals
        self._expected: dict[str, ActiveRequest] = {}
        """Those that another group computes."""

    def abort(self, name: str) -> None:
        """See `Scheduler`; the other group need not offer it any more."""
        self._expected.pop(name, None)
        self._handovers.forget(name)
        super().abort(name)

    @property
    def _queues(self) -> dict[str, Sequence[ActiveRequest]]:
        return super()._queues | {"expected": list(self._expected.values())}

    def _hear(self, message: Control) -> None:
        self._handovers.hear(message)

    def _arrivals(self) -> bool:
        heard = super()._arrivals()
        arrived = self._handovers.step()
        for each in arrived:
            active = self._expected.pop(each.request)
            active.whole = 0 if each.manifest is None else active.prompt
            self._waiting.append(active)
        return heard or bool(arrived)

    def _enter(self, arrival: Arrival) -> None:
        active = self._active(request_of(arrival, decodes=True))
        if active is None:
            self._handovers.refuse(arrival.request, arrival.partner)
            return
        if not arrival.partner:
            self._cache.prefetch(active.name, active.matchable, active.namespace)
            self._waiting.append(active)
            return
        self._expected[active.name] = active
        prompt = active.tokens.ids[: active.prompt]
        self._handovers.expect(
            active.name,
            prompt,
            arrival.partner,
            arrival.namespace,
            patience_ms=arrival.patience_ms,
        )

    def _ready(self, active: ActiveRequest) -> None:
        if active.hits is None and active.hit_tokens >= active.prompt:
            self._tell(active, Milestone.READY)
        super()._ready(active)

    def _prompt_is_computed(self, active: ActiveRequest) -> None:
        if active.hits is not None and active.hits.cached_tokens < active.prompt:
            self._tell(active, Milestone.COMPUTED)
        super()._prompt_is_computed(active)

    def _count(self, active: ActiveRequest) -> None:
        super()._count(active)
        self._tell(active, Milestone.DONE)
