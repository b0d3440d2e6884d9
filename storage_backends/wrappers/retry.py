"""`retry+...`: keys that failed are tried again, a few times and with pauses.

    retry.attempts=3     tries of one key, the first one included (1 to 20)
    retry.base_ms=10     the first pause; each further one is twice as long
    retry.cap_ms=1000    no pause is longer
    retry.seed=N         for pauses that can be repeated; without it every process draws its own

Only what FAILED is tried again, since only then the store said that it could not. A key that is
MISSING, CORRUPT or LACKING has its answer, and one that TIMED_OUT has no time left. Existence and
removal are not tried again: a False says too little.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, TypeVar

from ..base import Read, ReadOutcome, StorageBackend, Write, WriteOutcome
from ..uri import StoreUri
from .base import Wrapper

ATTEMPTS: Final = 3
BASE_MS: Final = 10
CAP_MS: Final = 1000
_DOUBLINGS_MAX: Final = 64
"""Far beyond any cap, and not beyond what a float can hold."""

Item = TypeVar("Item", Read, Write)
Outcome = TypeVar("Outcome", ReadOutcome, WriteOutcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often, and with which pauses."""

    attempts: int = ATTEMPTS
    """Tries of one key, the first one included."""
    base_s: float = BASE_MS / 1000
    cap_s: float = CAP_MS / 1000

    def pause_s(self, tried: int, random: Random) -> float:
        """Return how long to wait after `tried` tries.

        Drawn from the upper half of what is due, so that the ranks, whose calls fail at the same
        moment, do not come back at the same moment too.
        """
        due = min(self.cap_s, self.base_s * 2.0 ** min(tried - 1, _DOUBLINGS_MAX))
        return random.uniform(due / 2, due)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """What was tried again since the wrapper was made; all cumulative."""

    tries: int
    """Keys handed to the store once more, counted each time."""
    recovered: int
    """Keys that failed first, and had an answer in the end."""
    given_up: int
    """Keys that were answered FAILED."""


class RetryBackend(Wrapper):
    """Tries failed keys again, within the call's deadline: a pause that would outlast it is not made.

    The answer to a key is that of its last try. A write that failed and is tried again may so be
    PRESENT, if the first try reached the store after all. Buffers are touched during tries only, so
    a call that is cancelled in a pause returns at once.
    """

    def __init__(
        self,
        backend: StorageBackend,
        policy: RetryPolicy,
        *,
        random: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__(backend)
        self._policy = policy
        self._random = random if random is not None else Random()  # noqa: S311 - jitter is no secret.
        self._clock = clock
        self._sleep = sleep
        self._closed = False
        self._tries = self._recovered = self._given_up = 0

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        """See `StorageBackend`."""

        async def call(some: Sequence[Read]) -> list[ReadOutcome]:
            return await self._behind.read(some, deadline=deadline)

        return await self._try(call, reads, ReadOutcome.FAILED, deadline)

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        """See `StorageBackend`."""

        async def call(some: Sequence[Write]) -> list[WriteOutcome]:
            return await self._behind.write(some, deadline=deadline)

        return await self._try(call, writes, WriteOutcome.FAILED, deadline)

    def retried(self) -> Retried:
        """Return what was tried again so far."""
        return Retried(tries=self._tries, recovered=self._recovered, given_up=self._given_up)

    async def close(self) -> None:
        """See `StorageBackend`; a call that pauses tries no more."""
        self._closed = True
        await self._behind.close()

    async def _try(
        self,
        call: Callable[[Sequence[Item]], Awaitable[list[Outcome]]],
        items: Sequence[Item],
        failed: Outcome,
        deadline: float,
    ) -> list[Outcome]:
        outcomes = list(await call(items))
        failed_first: list[int] = [at for at, outcome in enumerate(outcomes) if outcome is failed]
        again: list[int] = failed_first
        for tried in range(1, self._policy.attempts):
            if not again or not await self._pause(tried, deadline):
                break
            self._tries += len(again)
            answers = await call([items[at] for at in again])
            for at, answer in zip(again, answers, strict=True):
                outcomes[at] = answer
            again = [at for at in again if outcomes[at] is failed]
        late = type(failed).TIMED_OUT
        self._given_up += len(again)
        self._recovered += sum(outcomes[at] not in (failed, late) for at in failed_first)
        return outcomes

    async def _pause(self, tried: int, deadline: float) -> bool:
        """Wait before the next try; say whether there is to be one."""
        pause_s = self._policy.pause_s(tried, self._random)
        if self._closed or self._clock() + pause_s >= deadline:
            return False
        await self._sleep(pause_s)
        return not self._closed


def wrap(uri: StoreUri, backend: StorageBackend) -> RetryBackend:
    """Return `backend` with the retries that the URI's options ask for."""
    uri.only_wrapper_options(
        "retry", ("retry.attempts", "retry.base_ms", "retry.cap_ms", "retry.seed")
    )
    policy = RetryPolicy(
        attempts=uri.number("retry.attempts", ATTEMPTS, low=1, high=20),
        base_s=uri.number("retry.base_ms", BASE_MS, low=1, high=60_000) / 1000,
        cap_s=uri.number("retry.cap_ms", CAP_MS, low=1, high=600_000) / 1000,
    )
    seed = uri.number("retry.seed", -1, low=0, high=(1 << 63) - 1)
    return RetryBackend(backend, policy, random=Random(seed) if seed >= 0 else None)  # noqa: S311 - jitter is no secret.
