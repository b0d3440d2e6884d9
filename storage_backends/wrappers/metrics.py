"""`metrics+...`: what calls came to, how long they took, and how many are in flight.

It counts what its callers see: outside of a retry, that is one outcome for each key, and inside of it
one for each try. `MetricsBackend.log` has the numbers. Memory is bounded: a fixed number of numbers,
whatever happens.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from ...coordinator.settings import Settings
from ...page_format.object_name import ObjectName
from ..base import ReadOutcome, StorageBackend, WriteOutcome
from ..latencies import Histogram, Latencies
from ..uri import StoreUri
from .base import Answer, AroundWrapper, Call, PendingCall

_OK: Final = (ReadOutcome.OK, WriteOutcome.OK)
INTERRUPTED: Final = "interrupted"
"""The outcome of all keys of a call that was cancelled, or raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMetrics:
    """What was seen of one kind of call since the log was made."""

    outcomes: Mapping[str, int]
    """Keys by what became of them: the outcomes' names in small letters; `yes` and `no` for
    existence; `free` and `taken` for removal."""
    nbytes: int
    """Bytes of the keys that were OK."""
    in_flight: int
    """Calls that have not returned yet."""
    interrupted: int
    """Calls that were cancelled, or raised. Their keys have no outcome."""
    took: Histogram
    """Calls that returned, by how long they took."""


class SeenCall(NamedTuple):
    """One call that has returned, was cancelled, or raised."""

    kind: Call
    pool: str
    """The pool of its keys."""
    outcomes: dict[str, int]
    """As `CallMetrics.outcomes`, or `INTERRUPTED`."""
    nbytes: int
    began_s: float
    """On the scale of the backend's clock, by default `time.monotonic`'s."""
    ended_s: float


Metrics = Mapping[Call, CallMetrics]
"""By the kind of call; all kinds are there."""


class CallLog:
    """What was seen of calls to one store, or to several of a kind. Thread-safe."""

    def __init__(self, on_call: Callable[[SeenCall], None] | None = None) -> None:
        """`on_call` is told of each call, in its own task, when it is over."""
        self._on_call = on_call
        self._lock = threading.Lock()
        self._seen = {call: _Seen() for call in Call}

    def metrics(self) -> Metrics:
        """Return what was seen so far."""
        with self._lock:
            return {call: seen.frozen() for call, seen in self._seen.items()}

    def begin(self, kind: Call) -> None:
        """Note that a call has begun."""
        with self._lock:
            self._seen[kind].in_flight += 1

    def end(self, call: SeenCall) -> None:
        """Note that a call is over."""
        with self._lock:
            seen = self._seen[call.kind]
            seen.in_flight -= 1
            if INTERRUPTED in call.outcomes:
                seen.interrupted += 1
            else:
                seen.took.add(call.ended_s - call.began_s)
                seen.outcomes.update(call.outcomes)
                seen.nbytes += call.nbytes
        if self._on_call is not None:
            self._on_call(call)


class MetricsBackend(AroundWrapper):
    """Counts and measures what goes through it, and changes nothing."""

    def __init__(
        self,
        backend: StorageBackend,
        log: CallLog | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`log` is where it is counted, which several may share; by default one of its own."""
        super().__init__(backend)
        self.log = log or CallLog()
        self._clock = clock

    async def _around(self, call: PendingCall[Answer]) -> list[Answer]:
        began_s = self._clock()
        self.log.begin(call.kind)
        outcomes, nbytes = {INTERRUPTED: len(call.keys)}, 0
        try:
            answers = await call.ask()
            outcomes = {_word(call.kind, each): count for each, count in Counter(answers).items()}
            for key, answer in zip(call.keys, answers, strict=True):
                if answer in _OK and not isinstance(key, ObjectName):
                    nbytes += key.shape.nbytes
            return answers
        finally:
            ended_s = self._clock()
            self.log.end(SeenCall(call.kind, _pool(call), outcomes, nbytes, began_s, ended_s))


def _pool(call: PendingCall[Answer]) -> str:
    """Return the pool of a call's keys, of which all are alike."""
    if not call.keys:
        return ""
    first = call.keys[0]
    return first.pool if isinstance(first, ObjectName) else first.name.pool


def _word(kind: Call, answer: ReadOutcome | WriteOutcome | bool) -> str:
    """Return what `CallMetrics.outcomes` calls an answer."""
    if isinstance(answer, ReadOutcome | WriteOutcome):
        return answer.name.lower()
    no, yes = ("no", "yes") if kind is Call.EXISTS else ("taken", "free")
    return yes if answer else no


class _Seen:
    """What was seen of one kind of call, so far."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.nbytes = 0
        self.in_flight = 0
        self.interrupted = 0
        self.took = Latencies()

    def frozen(self) -> CallMetrics:
        return CallMetrics(
            outcomes=dict(self.outcomes),
            nbytes=self.nbytes,
            in_flight=self.in_flight,
            interrupted=self.interrupted,
            took=self.took.histogram(),
        )


def wrap(uri: StoreUri, backend: StorageBackend) -> MetricsBackend:
    """Return `backend`, measured."""
    uri.read(Settings, "metrics")
    return MetricsBackend(backend)
