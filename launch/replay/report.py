"""The report of a replay: one JSON object.

Each rank sends a `RankResult`, and rank 0 makes the report from all of them. Counters that are equal on
all ranks (tokens, steps) are those of rank 0. Bytes, pages and corrupt pages are sums over the
ranks.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final, TypedDict, cast

import msgspec
import numpy as np

from ...small_engine.counts import PoolCounts, ReplayCounts
from ...storage_backends.uri import without_secrets
from ..cli.replay_settings import ReplaySettings
from .samples import Samples, counted_by_size, upper_us

_WORD: Final = (1 << 64) - 1


class HitTokens(TypedDict):
    """Prompt tokens by the tier in which they hit."""

    device: int
    host: int
    storage: int


class Percentiles(TypedDict):
    """Percentiles of a duration, over the measurements of all ranks."""

    p50: float
    p99: float


class Bytes(TypedDict):
    """Bytes that were moved between tiers, summed over the ranks."""

    l1_to_l2: int
    l2_to_l1: int
    l2_to_l3: int
    l3_to_l2: int


class Pool(TypedDict):
    """Size of one pool, and the number of its compared pages, summed over the ranks."""

    device_pages: int
    host_pages: int
    page_bytes: int
    """Bytes of a page, or of a slot for a recurrent state, on one rank."""
    pages_verified: int
    pages_rechecked: int
    pages_corrupt: int


class Report(TypedDict):
    """The result of a replay. Every key is always present."""

    ranks: int
    """Number of ranks whose results are in the report; all ranks, unless the replay was interrupted."""
    interrupted: bool
    """Whether the replay was interrupted before all requests were served.

    If so, the counters are partial and operations may still be in flight. There are no digests then,
    because the ranks stopped in different steps.
    """
    requests: int
    """Number of requests that were served."""
    refused: int
    """Number of requests that can never fit the device pool; no other counter includes them."""
    refusals: list[str]
    """Descriptions of the first refused requests, one line each."""
    retractions: int
    """Number of retractions, each of which copied all pages of a request to the host to free the device
    for an older request."""
    resumes: int
    """Number of retracted requests that resumed with all their pages; the others were computed again.
    """
    preempted: int
    """Number of times that a request lost its device pages to an older one, without a host copy.

    The lost tokens were computed again. The pages could not be copied to the host first (a retraction),
    because host memory was full or the request had no page to copy.
    """
    recomputed_tokens: int
    """Number of tokens that requests lost and computed again; no other counter includes them."""
    prompt_tokens: int
    """The sum of `computed_tokens` and the three `hit_tokens`."""
    computed_tokens: int
    hit_tokens: HitTokens
    output_tokens: int
    steps: int
    rounds: int
    transport: str
    """The transport of the rounds, and why it was chosen."""
    collectives: int
    """Number of collectives that one rank launched for its rounds."""
    round_us: Percentiles
    """Time in microseconds for which a `Cache.step` blocked the engine.

    Includes filling the ballot, waiting for the other ranks, and applying the verdict. Waits that the
    engine requests are not included.
    """
    operations: dict[str, dict[str, int]]
    operations_left: int
    """Number of operations in flight after the final flush. Must be 0."""
    violations: list[str]
    """Invariants that a replica violated when no operation was in flight. Must be empty."""
    bytes: Bytes
    pages_verified: int
    """Number of pages from the cache whose bytes were compared before use, over all pools and ranks."""
    pages_rechecked: int
    """Number of pages whose bytes were compared after their request had finished, over all pools and
    ranks."""
    pages_corrupt: int
    """Number of compared pages with wrong bytes. Must be 0."""
    pools: dict[str, Pool]
    """Pools by name: `kv` for full attention; `window` and `state` if the profile has them."""
    storage_corrupt: int
    """Objects that the store found corrupt and did not serve, summed over the ranks."""
    storage_late_calls: int
    """Number of calls to the store that timed out, summed over the ranks."""
    storage_waited_s: float
    """Sum of the durations of all store calls that timed out, in seconds."""
    loads_failed: int
    saves_failed: int
    """Number of retractions of which a copy failed, so that the request was computed again."""
    digests: list[str]
    """Digest of each rank's replicated state after the last step. All must be equal."""
    wall_s: float
    """Seconds from the start of the first request to the end of the last write."""
    flush_s: float
    """Seconds from the end of the last request to the end of the last write; a part of `wall_s`."""
    samples: Samples | None
    """Counters of rank 0 over time; None if no samples were taken."""
    round_us_counts: list[list[float]]
    """Histogram of `round_us` over all ranks, without empty buckets.

    Each entry has a bucket's upper bound in microseconds, and the number of steps in the bucket. The
    bucket's lower bound is 11/12 of its upper bound.
    """
    settings: dict[str, object]


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """The counters that one rank sends to rank 0 at the end of its replay."""

    counts: ReplayCounts
    refusals: list[str]
    steps: int
    rounds: int
    transport: str
    collectives: int
    round_us: list[float]
    operations: dict[str, dict[str, int]]
    operations_left: int
    violation: str
    """The first invariant that the replica violated when no operation was in flight; "" if none."""
    bytes_moved: dict[str, int]
    storage_corrupt: int
    storage_late_calls: int
    storage_waited_s: float
    digest: int
    wall_s: float
    flush_s: float
    samples: Samples | None = None
    """Counters of rank 0 over time; None on the other ranks."""
    timeline: bytes | None = None
    """The rank's packed events (`RankEvents.pack`); None if the rank kept no events."""


def make_report(
    settings: ReplaySettings, results: Sequence[RankResult], *, interrupted: bool = False
) -> Report:
    """Return the report; `results` are the ranks' results in rank order.

    After an interruption, results of ranks other than 0 may be missing.
    """
    first = results[0]
    counts = first.counts
    round_us = np.concatenate([np.asarray(each.round_us, dtype=np.float64) for each in results])
    p50, p99 = np.percentile(round_us, [50, 99]) if len(round_us) else (0.0, 0.0)

    def moved(way: str) -> int:
        return sum(each.bytes_moved[way] for each in results)

    return Report(
        ranks=len(results),
        interrupted=interrupted,
        requests=counts.requests,
        refused=counts.refused,
        refusals=first.refusals,
        retractions=counts.retractions,
        resumes=counts.resumes,
        preempted=counts.preempted,
        recomputed_tokens=counts.recomputed_tokens,
        prompt_tokens=counts.prompt_tokens,
        computed_tokens=counts.computed_tokens,
        hit_tokens=HitTokens(
            device=counts.hit_device_tokens,
            host=counts.hit_host_tokens,
            storage=counts.hit_storage_tokens,
        ),
        output_tokens=counts.output_tokens,
        steps=first.steps,
        rounds=first.rounds,
        transport=first.transport,
        collectives=max(each.collectives for each in results),
        round_us=Percentiles(p50=round(float(p50), 1), p99=round(float(p99), 1)),
        operations=first.operations,
        operations_left=max(each.operations_left for each in results),
        violations=sorted({each.violation for each in results if each.violation}),
        bytes=Bytes(
            l1_to_l2=moved("l1_to_l2"),
            l2_to_l1=moved("l2_to_l1"),
            l2_to_l3=moved("l2_to_l3"),
            l3_to_l2=moved("l3_to_l2"),
        ),
        pages_verified=sum(each.counts.pages_verified for each in results),
        pages_rechecked=sum(each.counts.pages_rechecked for each in results),
        pages_corrupt=sum(each.counts.pages_corrupt for each in results),
        pools=_pools(settings, [each.counts for each in results]),
        storage_corrupt=sum(each.storage_corrupt for each in results),
        storage_late_calls=sum(each.storage_late_calls for each in results),
        storage_waited_s=round(sum(each.storage_waited_s for each in results), 3),
        loads_failed=counts.loads_failed,
        saves_failed=counts.saves_failed,
        digests=[] if interrupted else [f"{each.digest & _WORD:016x}" for each in results],
        wall_s=round(max(each.wall_s for each in results), 3),
        flush_s=round(max(each.flush_s for each in results), 3),
        samples=first.samples,
        round_us_counts=[
            [upper_us(size), int(steps)]
            for size, steps in enumerate(counted_by_size(round_us))
            if steps
        ],
        settings=shown_settings(settings),
    )


def shown_settings(settings: ReplaySettings) -> dict[str, object]:
    """Return the settings as shown in a report, with the secrets of the store's URI removed."""
    shown: dict[str, object] = asdict(settings)
    if settings.store is not None:
        shown["store"] = without_secrets(settings.store)
    return shown


def _pools(settings: ReplaySettings, counts: Sequence[ReplayCounts]) -> dict[str, Pool]:
    pages = settings.pool_pages()
    pools: dict[str, Pool] = {}
    for name, page_bytes in settings.page_bytes().items():
        of_ranks = [each.pools.get(name, PoolCounts()) for each in counts]
        pools[name] = Pool(
            device_pages=pages[name][0],
            host_pages=pages[name][1],
            page_bytes=page_bytes,
            pages_verified=sum(each.pages_verified for each in of_ranks),
            pages_rechecked=sum(each.pages_rechecked for each in of_ranks),
            pages_corrupt=sum(each.pages_corrupt for each in of_ranks),
        )
    return pools


def failures_in(report: Report) -> list[str]:
    """Return the faults in a report, one sentence each."""
    faults: list[str] = []
    if report["pages_corrupt"]:
        pools = {name: each["pages_corrupt"] for name, each in report["pools"].items()}
        where = ", ".join(f"{pages} in pool {name}" for name, pages in pools.items() if pages)
        faults.append(f"{report['pages_corrupt']} pages had wrong bytes: {where}")
    if report["operations_left"] and not report["interrupted"]:
        faults.append(f"{report['operations_left']} operations were still in flight at the end")
    faults += report["violations"]
    if len(set(report["digests"])) > 1:
        faults.append(f"the replicas differ: digests {', '.join(report['digests'])}")
    return faults


def read_report(path: str | Path) -> Report:
    """Return the report in a file that `write_report` wrote."""
    return cast("Report", json.loads(Path(path).read_text(encoding="utf-8")))
