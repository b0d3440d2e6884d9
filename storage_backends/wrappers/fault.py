"""`fault+...`: seeded fault injection into the calls of a store, to test an engine or a store.

    fault.seed=0         equal seeds inject the same faults into the same calls
    fault.<kind>=0.01    rate of a kind; the kinds are those of `Fault`
    fault.delay_ms=20    the longest delay in milliseconds

If no rate is given, every kind has a rate of 0.01. Rates are per key, except that of `delay`, which is
per call. No fault makes a read with wrong bytes OK.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from types import MappingProxyType
from typing import Annotated, Final

from msgspec import Meta

from ...coordinator.validated_settings import Settings
from ...errors import ConfigError
from ...page_format.object_name import ObjectName
from ..base import Read, ReadOutcome, StorageBackend, Write, WriteOutcome
from ..uri import StoreUri
from .base import Wrapper

RATE: Final = 0.01
DELAY_S: Final = 0.02


class Fault(StrEnum):
    """The kinds of injected faults, and the real failures that they represent."""

    DELAY = "delay"
    """A call starts late, as with a busy disk or a network that loses packets."""
    ERROR = "error"
    """A key is FAILED at once (False for existence and removal) without a call to the store, as with a
    refused connection or a media error."""
    TIMEOUT = "timeout"
    """A key has no answer until the deadline, as with a server that hangs. Half of the writes and
    removals are still carried out, as if only the answer was lost."""
    LOST = "lost"
    """A write returns OK but stores nothing, as after a power failure or in a cache that evicts."""
    LIE = "lie"
    """An existence call returns the opposite of the truth, as with a stale index."""
    FLIP = "flip"
    """A read returns a changed byte, which the checksum detects: the key is CORRUPT and the object is
    removed."""


_OF_READS: Final = (Fault.ERROR, Fault.TIMEOUT, Fault.FLIP)
_OF_WRITES: Final = (Fault.ERROR, Fault.TIMEOUT, Fault.LOST)
_OF_EXISTENCE: Final = (Fault.ERROR, Fault.TIMEOUT, Fault.LIE)
_OF_REMOVALS: Final = (Fault.ERROR, Fault.TIMEOUT)


_Rate = Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class FaultOptions(Settings):
    """The options of `fault+`: the seed, a rate per kind of fault, and the longest delay."""

    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    delay_ms: Annotated[int, Meta(ge=0, le=3_600_000)] = 20
    delay: _Rate | None = None
    error: _Rate | None = None
    timeout: _Rate | None = None
    lost: _Rate | None = None
    lie: _Rate | None = None
    flip: _Rate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """The kinds and rates of injected faults, with the seed. Equal plans inject equal faults."""

    seed: int = 0
    rates: Mapping[Fault, float] = field(default_factory=dict[Fault, float])
    delay_s: float = DELAY_S
    """The longest delay, in seconds."""

    def __post_init__(self) -> None:
        for kinds in (_OF_READS, _OF_WRITES, _OF_EXISTENCE):
            if sum(self.rates.get(kind, 0.0) for kind in kinds) > 1:
                raise ConfigError(
                    f"the rates of {', '.join(kinds)} add up to more than 1; a key has at most "
                    "one fault"
                )


class FaultBackend(Wrapper):
    """Injects the faults of a plan. Rules S1 to S3 of the contract still hold.

    The members of `Fault` describe how other rules are broken. Faults are drawn per key when a call
    starts, so they depend only on the sequence of calls. A call that starts after its deadline or after
    `close` gets no fault. The fault `FLIP` is counted only if a byte was changed, because a read
    without a valid object has no byte to change.
    """

    def __init__(
        self,
        backend: StorageBackend,
        plan: FaultPlan,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(backend)
        self._plan = plan
        self._clock = clock
        self._random = Random(plan.seed)  # noqa: S311 - the faults are to be repeatable.
        self._closed = False
        self.injected: Counter[Fault] = Counter()
        """Number of faults injected so far, by kind."""

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        if self._spares(deadline):
            return await self.behind.exists(names, deadline=deadline)
        faults = [self._draw(_OF_EXISTENCE) for _ in names]
        await self._delay(deadline)
        found = list(await self.behind.exists(names, deadline=deadline))
        await self._hang(faults, deadline)
        for at, fault in enumerate(faults):
            if fault is not None:
                self.injected[fault] += 1
                found[at] = fault is Fault.LIE and not found[at]
        return found

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        if self._spares(deadline):
            return await self.behind.read(reads, deadline=deadline)
        faults = [self._draw(_OF_READS) for _ in reads]
        await self._delay(deadline)
        outcomes = [
            ReadOutcome.TIMED_OUT if fault is Fault.TIMEOUT else ReadOutcome.FAILED
            for fault in faults
        ]
        forwarded = [
            at for at, fault in enumerate(faults) if fault not in (Fault.ERROR, Fault.TIMEOUT)
        ]
        answers = await self.behind.read([reads[at] for at in forwarded], deadline=deadline)
        for at, answer in zip(forwarded, answers, strict=True):
            outcomes[at] = answer
        flipped = [
            at
            for at, fault in enumerate(faults)
            if fault is Fault.FLIP and outcomes[at] is ReadOutcome.OK
        ]
        for at in flipped:
            _flip(reads[at].buffers)
            outcomes[at] = ReadOutcome.CORRUPT
        if flipped:
            await self.behind.remove([reads[at].name for at in flipped], deadline=deadline)
            self.injected[Fault.FLIP] += len(flipped)
        await self._hang(faults, deadline)
        self._count(faults, (Fault.ERROR, Fault.TIMEOUT))
        return outcomes

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        if self._spares(deadline):
            return await self.behind.write(writes, deadline=deadline)
        faults = [self._draw(_OF_WRITES) for _ in writes]
        forwarded = [at for at, fault in enumerate(faults) if self._is_carried_out(fault)]
        await self._delay(deadline)
        answers = await self.behind.write([writes[at] for at in forwarded], deadline=deadline)
        outcomes = [WriteOutcome.FAILED] * len(writes)
        for at, answer in zip(forwarded, answers, strict=True):
            outcomes[at] = answer
        for at, fault in enumerate(faults):
            if fault is Fault.TIMEOUT:
                outcomes[at] = WriteOutcome.TIMED_OUT
            elif fault is Fault.LOST:
                outcomes[at] = WriteOutcome.OK
        await self._hang(faults, deadline)
        self._count(faults, _OF_WRITES)
        return outcomes

    async def remove(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        if self._spares(deadline):
            return await self.behind.remove(names, deadline=deadline)
        faults = [self._draw(_OF_REMOVALS) for _ in names]
        forwarded = [at for at, fault in enumerate(faults) if self._is_carried_out(fault)]
        await self._delay(deadline)
        answers = await self.behind.remove([names[at] for at in forwarded], deadline=deadline)
        freed = [False] * len(names)
        for at, answer in zip(forwarded, answers, strict=True):
            freed[at] = answer and faults[at] is None
        await self._hang(faults, deadline)
        self._count(faults, _OF_REMOVALS)
        return freed

    async def close(self) -> None:
        self._closed = True
        await self.behind.close()

    def _spares(self, deadline: float) -> bool:
        return self._closed or self._clock() >= deadline

    def _draw(self, kinds: Sequence[Fault]) -> Fault | None:
        drawn = self._random.random()
        for kind in kinds:
            drawn -= self._plan.rates.get(kind, 0.0)
            if drawn < 0:
                return kind
        return None

    def _is_carried_out(self, fault: Fault | None) -> bool:
        return fault is None or (fault is Fault.TIMEOUT and self._random.random() < 0.5)

    async def _delay(self, deadline: float) -> None:
        if self._random.random() < self._plan.rates.get(Fault.DELAY, 0.0):
            self.injected[Fault.DELAY] += 1
            delay_s = self._random.uniform(0, self._plan.delay_s)
            await asyncio.sleep(max(0.0, min(delay_s, deadline - self._clock())))

    async def _hang(self, faults: Sequence[Fault | None], deadline: float) -> None:
        """If a key is to be TIMED_OUT, wait until the deadline, because S2 permits that only then."""
        if Fault.TIMEOUT in faults:
            await asyncio.sleep(max(0.0, deadline - self._clock()))

    def _count(self, faults: Sequence[Fault | None], kinds: Sequence[Fault]) -> None:
        self.injected.update(fault for fault in faults if fault is not None and fault in kinds)


def _flip(buffers: Sequence[memoryview]) -> None:
    """Change the first byte in the buffers."""
    for buffer in buffers:
        if buffer.nbytes:
            buffer.cast("B")[0] ^= 1
            return


def wrap(uri: StoreUri, backend: StorageBackend) -> FaultBackend:
    """Return `backend` wrapped in a fault injector with the options of the URI."""
    options = uri.read(FaultOptions, "fault")
    given = {kind: getattr(options, kind) for kind in Fault}
    rates = {kind: rate for kind, rate in given.items() if rate is not None}
    try:
        plan = FaultPlan(
            seed=options.seed,
            rates=MappingProxyType(rates or dict.fromkeys(Fault, RATE)),
            delay_s=options.delay_ms / 1000,
        )
        return FaultBackend(backend, plan)
    except ConfigError as error:
        raise ConfigError(f"store {uri.text!r}: {error}") from error
