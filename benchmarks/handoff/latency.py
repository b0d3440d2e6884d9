"""How long a request waits between the end of its prompt and its first step in another group.

Two groups of one rank each, two processes on one machine, real caches, `Departures` and `Arrivals`. The
model is a wait: a chunk takes so many times as long as its pages take to travel, which is measured
first. Where computing takes longer, all but the last chunk's pages have arrived when it ends; where it
takes less, pages queue behind each other. Prompts share nothing, so every page travels.
"""

import platform
from collections.abc import Callable
from functools import partial
from typing import TypedDict

import numpy as np

from ..rank_processes import Measurement, run_ranks
from .latency_settings import LatencySettings, jobs


class Waited(TypedDict):
    """What was found for prompts of one length, computed at one pace."""

    prompt_tokens: int
    ratio: float
    chunk_ms: float
    """How long a chunk was computed."""
    handoff_ms_p50: float
    """From the end of the last chunk until the request was READY where it goes on."""
    handoff_ms_max: float
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
    both = zip(computes.at_s, decodes.at_s, strict=True)
    waited_ms = [1000 * (ready - computed) for computed, ready in both]
    points: list[Waited] = []
    for at, (ratio, prompt) in enumerate(jobs(settings)):
        some = slice(at * settings.repeats, (at + 1) * settings.repeats)
        outcomes = decodes.outcomes[some]
        points.append(
            Waited(
                prompt_tokens=prompt,
                ratio=ratio,
                chunk_ms=round(1000 * ratio * decodes.transfer_s, 3),
                handoff_ms_p50=round(float(np.median(waited_ms[some])), 3),
                handoff_ms_max=round(max(waited_ms[some]), 3),
                outcomes={each: outcomes.count(each) for each in sorted(set(outcomes))},
            )
        )
    return LatencyReport(
        chunk_tokens=settings.chunk_tokens,
        token_bytes=settings.token_bytes,
        chunk_transfer_ms=round(1000 * decodes.transfer_s, 3),
        points=points,
        repeats=settings.repeats,
        python=platform.python_version(),
        machine=platform.platform(),
    )
