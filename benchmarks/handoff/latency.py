"""How long a request waits between the end of its prompt and its first step in another group.

Two groups of one rank each, two processes on one machine, real caches, `Departures` and `Arrivals`. The
model is a wait: a chunk takes so many times as long as its pages take to travel, which is measured
first. Where computing takes longer, all but the last chunk's pages have arrived when it ends; where it
takes less, pages queue behind each other. Prompts share nothing, so every page travels.
"""

import platform
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypedDict

from ..rank_processes import Measurement, run_ranks
from .latency_settings import Job, LatencySettings, Moment, jobs


class Waited(TypedDict):
    """What was found for prompts of one length, computed at one pace."""

    prompt_tokens: int
    ratio: float
    chunk_ms: float
    """How long a chunk was computed."""
    handoff_ms_p50: float
    """From the end of the last chunk until the request was READY where it goes on."""
    handoff_ms_max: float
    total_ms_p50: float
    """From the beginning of the first chunk until then."""
    checksum_cost: float | None
    """By how much longer that is than without checksums, as a share: the median of the pairs."""
    outcomes: dict[str, int]
    """How the requests came, by `Outcome`."""


class LatencyReport(TypedDict):
    """Holds what `lockstep bench latency` reports."""

    chunk_tokens: int
    token_bytes: int
    chunk_transfer_ms: float
    """How long the pages of one chunk took from host memory to host memory, the median."""
    points: list[Waited]
    repeats: int
    python: str
    machine: str


def run(settings: LatencySettings, say: Callable[[str], None] = lambda _: None) -> LatencyReport:
    """Measure; `say` is told what is being done. No process is left."""
    from .latency_rank import measure  # noqa: PLC0415 - needs torch, which takes seconds.

    computes, decodes = run_ranks(
        Measurement(2, partial(measure, settings), measure.__module__), say
    )
    seen = list(zip(jobs(settings), computes.of_jobs, decodes.of_jobs, strict=True))
    points = [
        _waited(
            [one for one in seen if (one[0].ratio, one[0].prompt_tokens) == (ratio, prompt)],
            1000 * ratio * decodes.transfer_s,
        )
        for ratio in settings.ratios
        for prompt in settings.prompts
    ]
    return LatencyReport(
        chunk_tokens=settings.chunk_tokens,
        token_bytes=settings.token_bytes,
        chunk_transfer_ms=round(1000 * decodes.transfer_s, 3),
        points=points,
        repeats=settings.repeats,
        python=platform.python_version(),
        machine=platform.platform(),
    )


def _waited(seen: Sequence[tuple[Job, Moment, Moment]], chunk_ms: float) -> Waited:
    """Return what was found for prompts of one kind."""
    checked = [one for one in seen if one[0].checked]
    waited_ms = [1000 * (ready.done_s - computed.done_s) for _, computed, ready in checked]
    total_ms = [_total_ms(one) for one in checked]
    outcomes = [ready.outcome for *_, ready in seen]
    costs = [
        checked_ms / _total_ms(one) - 1
        for checked_ms, one in zip(
            total_ms, [one for one in seen if not one[0].checked], strict=False
        )
    ]
    job = seen[0][0]
    return Waited(
        prompt_tokens=job.prompt_tokens,
        ratio=job.ratio,
        chunk_ms=round(chunk_ms, 3),
        handoff_ms_p50=round(statistics.median(waited_ms), 3),
        handoff_ms_max=round(max(waited_ms), 3),
        total_ms_p50=round(statistics.median(total_ms), 3),
        checksum_cost=round(statistics.median(costs), 4) if costs else None,
        outcomes={each: outcomes.count(each) for each in sorted(set(outcomes))},
    )


def _total_ms(one: tuple[Job, Moment, Moment]) -> float:
    _, computed, ready = one
    return 1000 * (ready.done_s - computed.began_s)
