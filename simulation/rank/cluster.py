"""N real caches in one thread: all caches get every command and take every step.

All ranks must give equal answers, and launch equally many rounds of the same shape. A difference is a
violation.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from ...coordinator.collective import Collective, CommonStore, PendingRound, Vector
from ...coordinator.collectives.in_process import InProcessGroup
from ...coordinator.divergence import first_difference
from ...errors import CollectiveTimeout, GroupError
from ...ranks.group.member.rank_cache import RankCache
from ..world.clock import VirtualClock
from ..world.violated import Violated

Answer = TypeVar("Answer")
AnyCache = TypeVar("AnyCache", bound=RankCache)


def ask(what: str, caches: Sequence[AnyCache], command: Callable[[AnyCache], Answer]) -> Answer:
    """Give one command to every rank and return their answer; raise if the answers differ."""
    answers = [command(cache) for cache in caches]
    first = answers[0]
    for rank, answer in enumerate(answers):
        if answer != first:
            raise Violated(f"{what}: rank 0 answers {first}, rank {rank} answers {answer}")
    return first


class WatchedCollective:
    """A transport that records every collective that its rank launches."""

    def __init__(self, inner: Collective) -> None:
        self._inner = inner
        self.transport = inner.transport
        self.reached: list[tuple[str, int]] = []
        """Dtype and length of the vector of each collective; a gather is recorded with length 0."""

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def world_size(self) -> int:
        return self._inner.world_size

    @property
    def launches(self) -> int:
        return self._inner.launches

    def launch(self, lanes: Vector) -> PendingRound:
        self.reached.append((lanes.dtype.str, lanes.size))
        return self._inner.launch(lanes)

    def gather(self, payload: bytes, timeout_s: float) -> list[bytes]:
        """Raise, because no step may gather, and a single thread cannot wait for other ranks."""
        del payload, timeout_s
        self.reached.append(("gather", 0))
        raise CollectiveTimeout("the simulator compares the flight recorders itself")

    def common_store(self, name: str) -> CommonStore:
        return self._inner.common_store(name)

    def close(self) -> None:
        self._inner.close()


MakeCache = Callable[[int, Collective], RankCache]
"""Creates the cache of one rank; the arguments are the rank and its transport."""


class Cluster:
    """The caches of all ranks in one epoch.

    A step has two halves. Every rank completes the first half before any rank starts the second, so
    that no rank waits for another.
    """

    def __init__(self, ranks: int, *, depth: int, clock: VirtualClock, make: MakeCache) -> None:
        group = InProcessGroup(ranks)
        self.steps = 0
        self.collectives_per_step_max = 0
        self.collectives = [WatchedCollective(group.member(rank)) for rank in range(ranks)]
        self.caches = [make(rank, collective) for rank, collective in enumerate(self.collectives)]
        self._depth = depth
        self._clock = clock
        self._shape: tuple[str, int] | None = None
        self._open = False
        self._errors: list[GroupError | None] = []
        self._reached: list[int] = []

    def step(self, middle_us: int, missing: int | None = None) -> list[GroupError | None]:
        """Take a step without commands on all ranks but `missing`; return each rank's error or None."""
        self.begin_step(middle_us, missing)
        return self.end_step(missing=missing)

    def begin_step(self, middle_us: int, missing: int | None = None) -> list[GroupError | None]:
        """Do the first half of a step on all ranks except `missing`; return each rank's error or None.

        This half applies the verdict of a round. `middle_us` of virtual time pass during this half.
        """
        self._errors = [None] * len(self.caches)
        self._reached = [len(each.reached) for each in self.collectives]
        if self._depth:
            if self._open:
                self._half(missing, lambda cache: cache.close_round())
            self._clock.advance(middle_us)
        else:
            self._half(missing, lambda cache: cache.open_round())
            self._clock.advance(middle_us)
            self._half(missing, lambda cache: cache.close_round())
        return self._errors

    def end_step(
        self, *, idle_s: float = 0.0, missing: int | None = None
    ) -> list[GroupError | None]:
        """Do the second half of a step; return, by rank, the error in either half or None.

        At pipeline depth 1 this launches a round. An engine without work waits `idle_s` seconds for
        I/O; see `RankCache.end_step`.
        """
        if idle_s:
            self._half(missing, lambda cache: cache.inspection.executor.wait(idle_s))
        if self._depth:
            self._half(missing, lambda cache: cache.open_round())
            self._open = not idle_s
            if idle_s:
                self._half(missing, lambda cache: cache.close_round())
        self.steps += 1
        if not any(self._errors) and missing is None:
            self._check_collectives()
        return self._errors

    def _half(self, missing: int | None, half: Callable[[RankCache], object]) -> None:
        for rank, cache in enumerate(self.caches):
            if rank == missing or self._errors[rank] is not None:
                continue
            try:
                half(cache)
            except GroupError as error:
                self._errors[rank] = error

    def _check_collectives(self) -> None:
        before = self._reached
        for rank, (collective, count) in enumerate(zip(self.collectives, before, strict=True)):
            reached = collective.reached[count:]
            self.collectives_per_step_max = max(self.collectives_per_step_max, len(reached))
            if len(reached) != 1:
                raise Violated(f"rank {rank} reached {len(reached)} collectives in one step")
            if self._shape is None:
                self._shape = reached[0]
            if reached[0] != self._shape:
                launched = f"rank {rank} launched a round of {reached[0]}"
                raise Violated(f"{launched}, others were {self._shape}")

    def absent(self) -> int | None:
        """Return the first rank that has launched fewer rounds than others; None if there is none."""
        launched = [each.launches for each in self.collectives]
        fewest = min(launched)
        return launched.index(fewest) if fewest < max(launched) else None

    def first_difference(self) -> str:
        """Return the first recorded change of replica state that differs between ranks."""
        recorders = [cache.inspection.journal.last(4096) for cache in self.caches]
        return first_difference(recorders) or "the recorders do not reach back to it"
