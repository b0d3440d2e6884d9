"""`metrics+...`: counts the outcomes of calls, their durations, and the calls in flight.

If `metrics+` wraps a retrying wrapper, it counts one outcome per key. If a retrying wrapper wraps
`metrics+`, it counts one outcome per attempt. `MetricsBackend.log` has the numbers. Memory use is
constant.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from ...coordinator.validated_settings import Settings
from ...page_format.object_name import ObjectName
from ..base import ReadOutcome, StorageBackend, WriteOutcome
from ..latencies import Histogram, Latencies
from ..uri import StoreUri
from .base import Answer, AroundWrapper, Call, PendingCall

_OK: Final = (ReadOutcome.OK, WriteOutcome.OK)
INTERRUPTED: Final = "interrupted"
"""The only outcome in the record of a call that was cancelled or raised an exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMetrics:
    """The metrics of one kind of call, since the log was created."""

    outcomes: Mapping[str, int]
    """Number of keys by outcome. The outcomes are the lower-case names of `ReadOutcome` or
    `WriteOutcome`; `yes` and `no` for existence; `free` and `taken` for removal."""
    nbytes: int
    """Total bytes of the objects that were read or written with the outcome OK."""
    in_flight: int
    """Number of calls that have not returned yet."""
    interrupted: int
    """Number of calls that were cancelled or raised an exception; `outcomes` does not count their keys.
    """
    took: Histogram
    """Durations of the calls that returned."""


class SeenCall(NamedTuple):
    """The record of one call that returned, was cancelled, or raised an exception."""

    kind: Call
    pool: str
    """The pool that all keys of the call belong to."""
    outcomes: dict[str, int]
    """Number of keys by outcome, named as in `CallMetrics.outcomes`. After a cancellation or an
    exception the only outcome is `INTERRUPTED`."""
    nbytes: int
    began_s: float
    """Time at the start of the call, by the backend's clock; the default clock is `time.monotonic`."""
    ended_s: float


Metrics = Mapping[Call, CallMetrics]
"""The metrics of a backend, by kind of call."""


class CallLog:
    """Collects the metrics of calls to one store, or the sums for several stores. Thread-safe."""

    def __init__(self, on_call: Callable[[SeenCall], None] | None = None) -> None:
        """`on_call` is called with the record of each finished call, in that call's asyncio task."""
        self._on_call = on_call
        self._lock = threading.Lock()
        self._seen = {call: _Seen() for call in Call}

    def metrics(self) -> Metrics:
        """Return the metrics up to now."""
        with self._lock:
            return {call: seen.frozen() for call, seen in self._seen.items()}

    def begin(self, kind: Call) -> None:
        """Count the start of a call."""
        with self._lock:
            self._seen[kind].in_flight += 1

    def end(self, call: SeenCall) -> None:
        """Count the end of a call."""
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
    """A wrapper that counts and measures calls, and forwards them unchanged."""

    def __init__(
        self,
        backend: StorageBackend,
        log: CallLog | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`log` collects the metrics and may be shared; by default each backend has a separate log."""
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
    """Return the pool of the call's keys, which all belong to one pool."""
    if not call.keys:
        return ""
    first = call.keys[0]
    return first.pool if isinstance(first, ObjectName) else first.name.pool


def _word(kind: Call, answer: ReadOutcome | WriteOutcome | bool) -> str:
    """Return the name under which `CallMetrics.outcomes` counts an answer."""
    if isinstance(answer, ReadOutcome | WriteOutcome):
        return answer.name.lower()
    no, yes = ("no", "yes") if kind is Call.EXISTS else ("taken", "free")
    return yes if answer else no


class _Seen:
    """The metrics of one kind of call up to now."""

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
    """Return `backend` wrapped in a `MetricsBackend`."""
    uri.read(Settings, "metrics")
    return MetricsBackend(backend)
