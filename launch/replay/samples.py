"""Samples of rank 0's counters during a replay, in a list of bounded length.

A step in which no sample is due costs one read of the clock. When the list is full, every second sample
is dropped and the interval doubles. Dropped samples do not change totals: counters are cumulative, and
the step times of a dropped sample are added to the next sample.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, TypedDict, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ...ranks.group.cache import Cache
    from ...small_engine.scheduler import Scheduler

MOMENTS_MAX: Final = 500
_FIRST_PAUSE_S: Final = 0.05
SIZES_PER_DOUBLING: Final = 8
_SIZES: Final = 27 * SIZES_PER_DOUBLING
"""Number of buckets of a histogram of step times. The buckets cover 1 us to two minutes; the last
bucket also has all longer times."""


class Samples(TypedDict):
    """Counters of rank 0 over time; each list has one entry per sample.

    Tokens, requests, rounds and bytes are cumulative; bytes are those of rank 0 alone.
    """

    seconds: list[float]
    """Seconds since the start of the replay."""
    requests: list[int]
    """Number of requests that were served or refused."""
    requests_in_system: list[int]
    operations_in_flight: list[int]
    prompt_tokens: list[int]
    """Number of prompt tokens of the served requests."""
    hit_device_tokens: list[int]
    """Number of prompt tokens that hit on the device."""
    hit_host_tokens: list[int]
    hit_storage_tokens: list[int]
    rounds: list[int]
    round_us_p50: list[float]
    """Median time of the steps since the previous sample, in microseconds; the relative error is below
    1/12."""
    round_us_p99: list[float]
    l1_to_l2_bytes: list[int]
    l2_to_l1_bytes: list[int]
    l2_to_l3_bytes: list[int]
    l3_to_l2_bytes: list[int]


Counted = npt.NDArray[np.int64]
"""A histogram of step times: the number of steps in each bucket."""


def counted_by_size(times_us: Sequence[float] | npt.NDArray[np.float64]) -> Counted:
    """Return a histogram of step times: how many of the times are in each bucket."""
    times = np.maximum(np.asarray(times_us, dtype=np.float64), 1.0)
    sizes = np.minimum((np.log2(times) * SIZES_PER_DOUBLING).astype(np.int64), _SIZES - 1)
    return np.bincount(sizes, minlength=_SIZES).astype(np.int64)


def upper_us(size: int) -> float:
    """Return the upper bound of a bucket in microseconds."""
    return round(float(2 ** ((size + 1) / SIZES_PER_DOUBLING)), 1)


def percentile_us(counted: Counted, share: float) -> float:
    """Return a percentile of the step times in microseconds; 0 if there are no steps."""
    total = int(counted.sum())
    if not total:
        return 0.0
    size = int(np.searchsorted(counted.cumsum(), share * total))
    return round(float(2 ** ((size + 0.5) / SIZES_PER_DOUBLING)), 1)


@dataclass(slots=True)
class _Moment:
    """One sample of the counters, with a histogram of the step times since the previous sample."""

    seconds: float
    counts: dict[str, int]
    times: Counted


class Sampler:
    """Takes samples of one rank's counters; call `look` once in every step."""

    def __init__(
        self,
        cache: "Cache",
        stopped: Callable[[], bool],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create the sampler; `stopped` returns whether the replay must stop."""
        self._cache = cache
        self._stopped = stopped
        self._clock = clock
        self._scheduler: Scheduler | None = None
        self._moments: list[_Moment] = []
        self._pause_s = _FIRST_PAUSE_S
        self._began = self._due = 0.0
        self._steps = 0

    def begin(self, scheduler: "Scheduler") -> None:
        """Take the first sample, before the first request is served."""
        self._scheduler = scheduler
        self._began = self._clock()
        self._take(self._began)

    def look(self) -> bool:
        """Take a sample if one is due; return the result of `stopped`."""
        now = self._clock()
        if self._scheduler is not None and now >= self._due:
            self._take(now)
        return self._stopped()

    def samples(self) -> Samples:
        """Return all samples, with a last one taken now."""
        self._take(self._clock())
        record: dict[str, object] = {
            name: [each.counts[name] for each in self._moments] for name in self._moments[0].counts
        }
        record["seconds"] = [each.seconds for each in self._moments]
        for name, share in (("round_us_p50", 0.5), ("round_us_p99", 0.99)):
            record[name] = [percentile_us(each.times, share) for each in self._moments]
        return cast("Samples", record)

    def _take(self, now: float) -> None:
        scheduler = self._scheduler
        assert scheduler is not None
        steps = self._cache.stats(rounds=0).steps
        stats = self._cache.stats(rounds=steps - self._steps)
        self._steps = steps
        counts = scheduler.counts
        moment = _Moment(
            round(now - self._began, 3),
            {
                "requests": counts.requests + counts.refused,
                "requests_in_system": scheduler.in_system,
                "operations_in_flight": len(self._cache.inspection.in_flight),
                "prompt_tokens": counts.prompt_tokens,
                "hit_device_tokens": counts.hit_device_tokens,
                "hit_host_tokens": counts.hit_host_tokens,
                "hit_storage_tokens": counts.hit_storage_tokens,
                "rounds": stats.rounds,
                **{f"{way}_bytes": moved for way, moved in asdict(stats.bytes_moved).items()},
            },
            counted_by_size(stats.round_us),
        )
        if len(self._moments) == MOMENTS_MAX:
            self._thin_out()
        self._moments.append(moment)
        self._due = now + self._pause_s

    def _thin_out(self) -> None:
        """Drop every second sample after the first; add its step times to those of the next sample."""
        first, *others = self._moments
        left = others[len(others) // 2 * 2 :]
        for dropped, stays in zip(others[::2], others[1::2], strict=False):
            stays.times = dropped.times + stays.times
        self._moments = [first, *others[1::2], *left]
        self._pause_s *= 2
