"""Simulates control requests that reach each rank at a different moment.

Each control request has a number and is delivered to every rank: late to some ranks, twice to others,
or after the next request. All ranks must execute it in the same step, unchanged and in number order.
The step must come after every rank has received the request, but only a few steps later.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..ranks.group.member.rank_cache import RankCache
from ..ranks.group.member.request_log import RequestLog
from .rank.cluster import ask
from .world.violated import Violated
from .world.world import World

_STEPS_TO_HEAR = 2
"""Maximum number of steps from the last rank's receipt of a control request until its execution."""


@dataclass(frozen=True, slots=True)
class _Delivery:
    """A control request on its way to one rank, which it reaches in a given step."""

    step: int
    rank: int
    number: int
    between: bool
    """Whether the request arrives between the two halves of the step, instead of before the step."""


class Requesting:
    """Draws a schedule's control requests, delivers them, and checks their execution."""

    def __init__(
        self, world: World, *, coverage: Counter[str], trace: Callable[[str], None]
    ) -> None:
        self._random = world.stream("messages")
        self._rate = self._random.choice((0.0, 0.02, 0.1, 0.4))
        """The chance that a control request is sent in a step."""
        calm = world.faults.calm
        self._delays = (0,) if calm else self._random.choice(((0,), (0, 1, 2), (0, 3, 12)))
        """Possible delays, in steps, until a control request reaches a rank."""
        self._repeats = 0.0 if calm else self._random.choice((0.0, 0.3))
        self._coverage = coverage
        self._trace = trace
        self._caches: Sequence[RankCache] = ()
        self._logs: Sequence[RequestLog] = ()
        self._steps = 0
        self._sent: list[bytes] = []
        self._on_their_way: list[_Delivery] = []
        self._had: list[set[int]] = []
        """By rank: the numbers of the control requests that the rank has received."""
        self._executed = 0
        """The number of control requests that all ranks have executed."""
        self._carried_out: list[list[bytes]] = []
        """By rank: the control requests that the rank has executed since the last check."""
        self._common: deque[int] = deque(maxlen=_STEPS_TO_HEAR + 1)
        """For each of the last steps: the largest number n for which every rank had received the
        control requests 1 to n."""

    def begin_epoch(self, caches: Sequence[RankCache], logs: Sequence[RequestLog]) -> None:
        """Continue with the caches of a new group, whose control requests have numbers from 1."""
        self._caches, self._logs = caches, logs
        self._sent.clear()
        self._on_their_way.clear()
        self._common.clear()
        self._had = [set() for _ in caches]
        self._executed = 0
        self._carried_out = [[] for _ in caches]
        for cache, did in zip(caches, self._carried_out, strict=True):
            cache.set_control_handler(did.append)

    def step(self) -> None:
        """Before a step: draw whether to send a request, and deliver the requests that arrive now."""
        self._steps += 1
        if self._random.random() < self._rate:
            self._send()
        self.deliver(between=False)

    def deliver(self, *, between: bool) -> None:
        """Deliver to each rank the control requests that reach it in this step."""
        due = [d for d in self._on_their_way if d.step <= self._steps and d.between == between]
        self._on_their_way = [each for each in self._on_their_way if each not in due]
        for each in due:
            had, number = self._had[each.rank], each.number
            self._coverage["requests repeated"] += number in had
            self._coverage["requests out of order"] += number - 1 not in {0, *had}
            had.add(number)
            self._trace(f"request {number} reaches rank {each.rank}")
            self._logs[each.rank].note(number, self._sent[number - 1])

    def check(self) -> None:
        """After a step: raise if ranks executed a request too early, too late or differently."""
        for request in ask("requests", self._caches, lambda cache: self._taken(cache.rank)):
            self._executed += 1
            sent = self._sent[self._executed - 1] if self._executed <= len(self._sent) else b""
            if request != sent:
                was = f"was sent as {sent!r} but executed as {request!r}"
                raise Violated(f"request {self._executed} {was}")
            for rank, had in enumerate(self._had):
                if self._executed not in had:
                    early = f"became a command before rank {rank} had it"
                    raise Violated(f"request {self._executed} {early}")
            self._coverage["requests heard"] += 1
        common = self._executed
        while all(common + 1 in had for had in self._had):
            common += 1
        self._common.append(common)
        if len(self._common) > _STEPS_TO_HEAR and self._executed < self._common[0]:
            late = f"every rank has request {self._executed + 1}"
            raise Violated(f"{late}, but it does not become a command")

    def _taken(self, rank: int) -> tuple[bytes, ...]:
        taken = tuple(self._carried_out[rank])
        self._carried_out[rank].clear()
        return taken

    def _send(self) -> None:
        random = self._random
        self._sent.append(random.randbytes(random.choice((0, 1, 40))))
        for rank in range(len(self._caches)):
            for _ in range(2 if random.random() < self._repeats else 1):
                step = self._steps + random.choice(self._delays)
                between = random.random() < 0.5
                self._on_their_way.append(_Delivery(step, rank, len(self._sent), between))
