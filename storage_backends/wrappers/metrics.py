"""`metrics+...`: what calls came to, how long they took, and how many are in flight.

It counts what its callers see: outside of a retry, that is one outcome for each key, and inside of it
one for each try. `MetricsBackend.metrics` gives the numbers, and `exposition` writes them in the text
format that Prometheus reads. Memory is bounded: a fixed number of numbers, whatever happens.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from ..base import ReadOutcome, StorageBackend, WriteOutcome
from ..uri import StoreUri
from .around import Answer, AroundWrapper, Call, PendingCall

_OK: Final = (ReadOutcome.OK, WriteOutcome.OK)
_STEPS: Final = (1.0, 2.5, 5.0)
BOUNDS_S: Final = tuple(step * 10.0**power for power in range(-5, 2) for step in _STEPS)
"""The upper bounds of the latency buckets: 10 us to 50 s; what takes longer has a bucket too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMetrics:
    """What was seen of one kind of call since the wrapper was made."""

    outcomes: Mapping[str, int]
    """Keys by what became of them: the outcomes' names in small letters; `yes` and `no` for
    existence; `free` and `taken` for removal."""
    nbytes: int
    """Bytes of the keys that were OK."""
    in_flight: int
    """Calls that have not returned yet."""
    interrupted: int
    """Calls that were cancelled, or raised. Their keys have no outcome."""
    latencies: tuple[int, ...]
    """Calls that returned, by how long they took: one count for each of `BOUNDS_S`, and one for what
    took longer."""
    latency_sum_s: float
    """How long they took together."""


Metrics = Mapping[Call, CallMetrics]
"""By the kind of call; all kinds are there."""


class MetricsBackend(AroundWrapper):
    """Counts and measures what goes through it, and changes nothing."""

    def __init__(
        self, backend: StorageBackend, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(backend)
        self._clock = clock
        self._seen = {call: _Seen() for call in Call}

    def metrics(self) -> Metrics:
        """Return what was seen so far."""
        return {call: seen.frozen() for call, seen in self._seen.items()}

    async def _around(self, call: PendingCall[Answer]) -> list[Answer]:
        seen = self._seen[call.kind]
        started_at = self._clock()
        seen.in_flight += 1
        try:
            answers = await call.ask()
        except BaseException:
            seen.interrupted += 1
            raise
        finally:
            seen.in_flight -= 1
        took_s = self._clock() - started_at
        seen.latencies[bisect_left(BOUNDS_S, took_s)] += 1
        seen.latency_sum_s += took_s
        for answer, count in Counter(answers).items():
            seen.outcomes[_word(call.kind, answer)] += count
        each = zip(call.sizes, answers, strict=bool(call.sizes))
        seen.nbytes += sum(nbytes for nbytes, answer in each if answer in _OK)
        return answers


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
        self.latencies = [0] * (len(BOUNDS_S) + 1)
        self.latency_sum_s = 0.0

    def frozen(self) -> CallMetrics:
        return CallMetrics(
            outcomes=dict(self.outcomes),
            nbytes=self.nbytes,
            in_flight=self.in_flight,
            interrupted=self.interrupted,
            latencies=tuple(self.latencies),
            latency_sum_s=self.latency_sum_s,
        )


def exposition(metrics: Metrics, labels: Mapping[str, str]) -> str:
    """Return `metrics` in the Prometheus text format; every sample has `labels` too.

    Label names are the caller's to choose well; values may be any text.
    """
    fixed = [(name, value) for name, value in labels.items()]
    lines: list[str] = []
    for name, kind, meaning, samples in _families(metrics):
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
        for suffix, own, value in samples:
            written = ",".join(f'{label}="{_escaped(text)}"' for label, text in [*fixed, *own])
            lines.append(f"{name}{suffix}{{{written}}} {value}")
    return "\n".join(lines) + "\n"


_Sample = tuple[str, list[tuple[str, str]], int | float]
"""Suffix of the name, labels, value."""


def _families(metrics: Metrics) -> Iterator[tuple[str, str, str, list[_Sample]]]:
    """Yield name, kind and meaning of each metric, and its samples."""
    prefix = "lockstep_storage"
    calls = [([("call", str(call))], seen) for call, seen in metrics.items()]
    yield (
        f"{prefix}_keys_total",
        "counter",
        "Keys by what became of them.",
        [
            ("", [*call, ("outcome", outcome)], count)
            for call, seen in calls
            for outcome, count in seen.outcomes.items()
        ],
    )
    yield (
        f"{prefix}_bytes_total",
        "counter",
        "Bytes read and written.",
        [("", call, seen.nbytes) for call, seen in calls],
    )
    yield (
        f"{prefix}_interrupted_total",
        "counter",
        "Calls that were cancelled or raised.",
        [("", call, seen.interrupted) for call, seen in calls],
    )
    yield (
        f"{prefix}_calls_in_flight",
        "gauge",
        "Calls that have not returned yet.",
        [("", call, seen.in_flight) for call, seen in calls],
    )
    yield (
        f"{prefix}_call_seconds",
        "histogram",
        "How long calls took.",
        [sample for call, seen in calls for sample in _histogram(call, seen)],
    )


def _histogram(call: list[tuple[str, str]], seen: CallMetrics) -> Iterator[_Sample]:
    bounds = [*(f"{bound:.6g}" for bound in BOUNDS_S), "+Inf"]
    for bound, count in zip(bounds, accumulate(seen.latencies), strict=True):
        yield "_bucket", [*call, ("le", bound)], count
    yield "_sum", call, seen.latency_sum_s
    yield "_count", call, sum(seen.latencies)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def wrap(uri: StoreUri, backend: StorageBackend) -> MetricsBackend:
    """Return `backend`, measured."""
    uri.only_wrapper_options("metrics", ())
    return MetricsBackend(backend)
