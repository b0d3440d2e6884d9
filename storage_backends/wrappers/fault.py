"""`fault+...`: seeded faults, to see how an engine or a store takes them.

    fault.seed=0         equal seeds inject the same faults into the same calls
    fault.<kind>=0.01    how often; the kinds are those of `Fault`
    fault.delay_ms=20    the longest delay

Without any rate, each kind comes at 0.01. Rates are for each key, except that of `delay`, which is for
each call. No fault makes a read OK whose bytes are wrong.
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

from ...coordinator.settings import Settings
from ...errors import ConfigError
from ...page_format.object_name import ObjectName
from ..base import Read, ReadOutcome, StorageBackend, Write, WriteOutcome
from ..uri import StoreUri
from .base import Wrapper

RATE: Final = 0.01
DELAY_S: Final = 0.02


class Fault(StrEnum):
    """What goes wrong, and what it stands for in the field."""

    DELAY = "delay"
    """A call begins late: a busy disk, a network that loses packets."""
    ERROR = "error"
    """A key FAILED at once (False for existence and removal), and the store was not asked: a refused
    connection, an error of the medium."""
    TIMEOUT = "timeout"
    """A key has no answer until the deadline: a server that hangs. A write or removal is carried out
    half of the time, as when only the answer was lost."""
    LOST = "lost"
    """A write is said to be OK and nothing is stored: a power failure, or a cache that evicts."""
    LIE = "lie"
    """Existence is answered the wrong way round: an index that is out of date."""
    FLIP = "flip"
    """A byte of what is read has changed, and the store's check has found that: the key is CORRUPT, and
    the object is removed."""


_OF_READS: Final = (Fault.ERROR, Fault.TIMEOUT, Fault.FLIP)
_OF_WRITES: Final = (Fault.ERROR, Fault.TIMEOUT, Fault.LOST)
_OF_EXISTENCE: Final = (Fault.ERROR, Fault.TIMEOUT, Fault.LIE)
_OF_REMOVALS: Final = (Fault.ERROR, Fault.TIMEOUT)


_Rate = Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class FaultOptions(Settings):
    """The options of the wrapper; a kind without a rate never comes, unless none has one."""

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
    """Which faults are injected, and how often. Equal plans treat equal calls alike."""

    seed: int = 0
    rates: Mapping[Fault, float] = field(default_factory=dict[Fault, float])
    delay_s: float = DELAY_S
    """The longest delay."""

    def __post_init__(self) -> None:
        for kinds in (_OF_READS, _OF_WRITES, _OF_EXISTENCE):
            if sum(self.rates.get(kind, 0.0) for kind in kinds) > 1:
                raise ConfigError(
                    f"the rates of {', '.join(kinds)} make more than 1 together; a key has at most "
                    "one fault"
                )


class FaultBackend(Wrapper):
    """Injects the faults of a plan. Keeps S1 to S3; what it breaks of the rest is what `Fault` says.

    Faults are drawn when a call begins, key by key, so that they depend on the order of calls alone.
    A call that comes after its deadline, or after `close`, has none. A flip is counted when it is done;
    there is none where there is no sound object.
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
        """How many faults there were of each kind."""

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
        asked = [at for at, fault in enumerate(faults) if fault not in (Fault.ERROR, Fault.TIMEOUT)]
        answers = await self.behind.read([reads[at] for at in asked], deadline=deadline)
        for at, answer in zip(asked, answers, strict=True):
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
        asked = [at for at, fault in enumerate(faults) if self._is_carried_out(fault)]
        await self._delay(deadline)
        answers = await self.behind.write([writes[at] for at in asked], deadline=deadline)
        outcomes = [WriteOutcome.FAILED] * len(writes)
        for at, answer in zip(asked, answers, strict=True):
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
        asked = [at for at, fault in enumerate(faults) if self._is_carried_out(fault)]
        await self._delay(deadline)
        answers = await self.behind.remove([names[at] for at in asked], deadline=deadline)
        freed = [False] * len(names)
        for at, answer in zip(asked, answers, strict=True):
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
        """Wait for the deadline if a key has no answer before it: S2 lets no call say so sooner."""
        if Fault.TIMEOUT in faults:
            await asyncio.sleep(max(0.0, deadline - self._clock()))

    def _count(self, faults: Sequence[Fault | None], kinds: Sequence[Fault]) -> None:
        self.injected.update(fault for fault in faults if fault is not None and fault in kinds)


def _flip(buffers: Sequence[memoryview]) -> None:
    """Change the first byte of what was read."""
    for buffer in buffers:
        if buffer.nbytes:
            buffer.cast("B")[0] ^= 1
            return


def wrap(uri: StoreUri, backend: StorageBackend) -> FaultBackend:
    """Return `backend` with the faults that the URI's options ask for."""
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
