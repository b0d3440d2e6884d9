"""The scheduler of a group that goes on with requests that other groups have computed.

It hears of a request when the other group does, fetches what that announces, and admits it when all of
it is here, or when it is clear that not all of it will be: then it computes the rest.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..ranks.disaggregation.arrivals import Arrivals
from ..ranks.disaggregation.control import Arrival
from .active_request import ActiveRequest
from .forward_pass import Forward
from .handed_requests import control_messages, request_of
from .scheduler import EngineLimits, Scheduler

if TYPE_CHECKING:
    from ..ranks.cache import Cache


class DecodeScheduler(Scheduler):
    """Drives one rank of a group that decodes, until it is `stopped`."""

    def __init__(
        self,
        cache: "Cache",
        arrivals: Arrivals,
        limits: EngineLimits,
        *,
        on_done: Callable[[int], None] = lambda _: None,
        stopped: Callable[[], bool] = lambda: False,
        forward: Forward | None = None,
    ) -> None:
        super().__init__(cache, iter(()), limits, on_done=on_done, stopped=stopped, forward=forward)
        self._handovers = arrivals
        self._expected: dict[str, ActiveRequest] = {}
        """Those that another group computes."""

    @property
    def _queues(self) -> dict[str, Sequence[ActiveRequest]]:
        return super()._queues | {"expected": list(self._expected.values())}

    def _arrivals(self) -> bool:
        messages = control_messages(self._cache, self._handovers.refusals)
        for message in messages:
            if isinstance(message, Arrival):
                self._expect(message)
            else:
                self._handovers.hear(message)
        arrived = self._handovers.step()
        for each in arrived:
            active = self._expected.pop(each.request)
            active.is_handed_over = each.manifest is not None
            self._waiting.append(active)
        return bool(messages or arrived)

    def _expect(self, arrival: Arrival) -> None:
        active = self._active(request_of(arrival, decodes=True))
        if active is not None:
            self._expected[active.name] = active
            prompt = active.tokens.ids[: active.prompt]
            self._handovers.expect(active.name, prompt, arrival.partner, arrival.namespace)

    def abort(self, name: str) -> None:
        """See `Scheduler`; the other group is told that it is not waited for."""
        self._handovers.forget(name)
        self._expected.pop(name, None)
        super().abort(name)

    def _begin_prefill(self, active: ActiveRequest) -> None:
        if active.hit_tokens < active.prompt:
            super()._begin_prefill(active)
            return
        active.computed = active.prompt
        self._verify(active, finished=False, moved=True)
        self._prompt_is_computed(active)
