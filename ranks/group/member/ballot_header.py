"""A rank's votes that belong to no operation: health, time, staged proposal, control requests."""

import logging
import time
from collections.abc import Callable, Iterable

from ....coordinator.ballot import Ballot, Progress
from ....coordinator.lanes import Voter
from ...executor.base import Executor
from .proposals import StagedProposals
from .request_log import RequestLog

log = logging.getLogger("lockstep")


class BallotHeader:
    """Collects one rank's vote for each round. Owned by the thread that calls `step`."""

    def __init__(
        self,
        rank: int,
        executor: Executor,
        ballot: Ballot,
        clock_ms: Callable[[], int] | None = None,
    ) -> None:
        """`clock_ms` returns the time in milliseconds; by default from a clock that never jumps."""
        self.staging = StagedProposals(rank, executor)
        self._rank = rank
        self._executor = executor
        self._ballot = ballot
        self._clock_ms = clock_ms or _steady_clock_ms()

    def vote(
        self,
        progress: Iterable[Progress],
        requests: RequestLog | None = None,
        trouble: str | None = None,
    ) -> Voter:
        """Record the executor's progress in the ballot; return the votes that belong to no operation.

        Without `requests` the rank takes no control requests. The rank votes that it is unhealthy if
        `trouble` or the executor gives a reason why it cannot continue.
        """
        for each in progress:
            self._ballot.note(each)
        trouble = trouble or self._executor.trouble()
        if trouble is not None:
            log.error("rank %d cannot continue: %s", self._rank, trouble)
        return Voter(
            healthy=trouble is None,
            time_ms=self._clock_ms(),
            staged=self.staging.vote(),
            requests=None if requests is None else requests.count,
            newest=0 if requests is None else requests.newest,
        )


def _steady_clock_ms() -> Callable[[], int]:
    """Return a clock in milliseconds that starts at the wall-clock time and never jumps."""
    base_ns = time.time_ns() - time.monotonic_ns()
    return lambda: (base_ns + time.monotonic_ns()) // 1_000_000
