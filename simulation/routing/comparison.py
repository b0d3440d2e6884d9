"""All policies over one trace at several loads, and what that says of the router."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

from ...errors import ConfigError
from .arrivals import Arrival
from .block_cache import BlockCache
from .policies import policies
from .run import RunCounts, RunSettings, Service, run

JUDGED_LOAD = 0.9
"""The load at which the router is judged, as a part of what round robin can serve."""
OURS, ROUND_ROBIN = "lockstep", "round robin"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSettings:
    """What is compared."""

    groups: int = 4
    device_pages: int | None = None
    """Pages of each group; None looks for so few that one group alone hits half of what is possible."""
    tokens_per_s: float = 10_000.0
    attention_tokens: int = 0
    lag_s: float = 0.1
    loads: tuple[float, ...] = (0.5, JUDGED_LOAD, 1.1)
    """How much comes, as parts of what the groups can serve under round robin."""


class PolicyResult(TypedDict):
    """What a policy has come to at one load."""

    policy: str
    about: str
    load: float
    hit_ratio: float
    queueing_p50_s: float
    queueing_p99_s: float
    queueing_mean_s: float
    first_token_p50_s: float
    first_token_p99_s: float
    busy: float
    """The part of the time in which groups compute."""


class Claim(TypedDict):
    """Something that the router is to come to, and what it has come to."""

    what: str
    wanted: float
    found: float
    holds: bool


class ComparisonReport(TypedDict):
    """Everything, ready for JSON."""

    requests: int
    tokens: int
    groups: int
    page_tokens: int
    device_pages: int
    ideal_hit_ratio: float
    """Of one group with room for everything."""
    alone_hit_ratio: float
    """Of one group with the memory of one."""
    together_hit_ratio: float
    """Of one group with the memory of all."""
    saturation_requests_per_s: float
    """What all groups can serve under round robin."""
    tokens_per_s: float
    attention_tokens: int
    lag_s: float
    results: list[PolicyResult]
    claims: list[Claim]


def hit_ratio_alone(arrivals: Sequence[Arrival], device_pages: int) -> float:
    """Return what one group hits that computes all requests, one after the other."""
    cache = BlockCache(device_pages)
    hit = tokens = 0
    for each in arrivals:
        pages, _ = cache.admit(each.prompt)
        cache.insert(each.prompt)
        hit += pages * each.prompt.page_tokens
        tokens += each.prompt.tokens
    return hit / tokens


def pages_for_half(arrivals: Sequence[Arrival]) -> int:
    """Return the least device memory with which one group alone hits half of what is possible."""
    wanted = hit_ratio_alone(arrivals, _pages_of_all(arrivals)) / 2
    too_few, enough = max(each.prompt.pages for each in arrivals) - 1, _pages_of_all(arrivals)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if hit_ratio_alone(arrivals, middle) < wanted:
            too_few = middle
        else:
            enough = middle
    return enough


def compare(
    arrivals: Sequence[Arrival],
    settings: ComparisonSettings,
    say: Callable[[str], None] = lambda _: None,
) -> ComparisonReport:
    """Run every policy at every load."""
    if len(arrivals) < 2:
        raise ConfigError("a comparison of policies needs two requests or more")
    device_pages = settings.device_pages
    if device_pages is None:
        say("looking for the memory with which one group hits half of what is possible")
        device_pages = pages_for_half(arrivals)
    service = Service(
        tokens_per_s=settings.tokens_per_s, attention_tokens=settings.attention_tokens
    )

    def settings_at(scale: float) -> RunSettings:
        return RunSettings(
            groups=settings.groups,
            device_pages=device_pages,
            service=service,
            scale=scale,
            lag_s=settings.lag_s,
        )

    say("round robin, to see what it can serve")
    # As long as this takes when all groups compute all the time, the trace may last.
    full_s = run(arrivals, settings_at(1.0), policies()[0]).busy_s / settings.groups
    span_s = arrivals[-1].at_s - arrivals[0].at_s
    results: list[PolicyResult] = []
    for load in settings.loads:
        for policy in policies():
            say(f"{policy.name} at {load:g}")
            counts = run(arrivals, settings_at(full_s / load / span_s), policy)
            results.append(_result(policy.name, policy.about, load, counts, settings.groups))
    together = hit_ratio_alone(arrivals, device_pages * settings.groups)
    return ComparisonReport(
        requests=len(arrivals),
        tokens=sum(each.prompt.tokens for each in arrivals),
        groups=settings.groups,
        page_tokens=arrivals[0].prompt.page_tokens,
        device_pages=device_pages,
        ideal_hit_ratio=hit_ratio_alone(arrivals, _pages_of_all(arrivals)),
        alone_hit_ratio=hit_ratio_alone(arrivals, device_pages),
        together_hit_ratio=together,
        saturation_requests_per_s=len(arrivals) / full_s,
        tokens_per_s=settings.tokens_per_s,
        attention_tokens=settings.attention_tokens,
        lag_s=settings.lag_s,
        results=results,
        claims=_claims(results, together),
    )


def _claims(results: Sequence[PolicyResult], together: float) -> list[Claim]:
    """Return what the router is held to, where the load at which it is judged was run."""
    judged = {each["policy"]: each for each in results if each["load"] == JUDGED_LOAD}
    if not judged:
        return []
    ours, others = judged[OURS], judged[ROUND_ROBIN]
    wanted = 0.9 * together
    return [
        Claim(
            what="hit ratio, of 0.9 of what one group with all the memory has",
            wanted=wanted,
            found=ours["hit_ratio"],
            holds=ours["hit_ratio"] >= wanted,
        ),
        Claim(
            what="p99 of queueing in seconds, no longer than under round robin",
            wanted=others["queueing_p99_s"],
            found=ours["queueing_p99_s"],
            holds=ours["queueing_p99_s"] <= others["queueing_p99_s"],
        ),
    ]


def _result(name: str, about: str, load: float, counts: RunCounts, groups: int) -> PolicyResult:
    waits, first_tokens = sorted(counts.waits_s), sorted(counts.first_tokens_s)
    return PolicyResult(
        policy=name,
        about=about,
        load=load,
        hit_ratio=counts.hit_ratio,
        queueing_p50_s=_percentile(waits, 0.5),
        queueing_p99_s=_percentile(waits, 0.99),
        queueing_mean_s=sum(waits) / len(waits),
        first_token_p50_s=_percentile(first_tokens, 0.5),
        first_token_p99_s=_percentile(first_tokens, 0.99),
        busy=counts.busy_s / groups / counts.took_s,
    )


def _percentile(ordered: Sequence[float], part: float) -> float:
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def _pages_of_all(arrivals: Sequence[Arrival]) -> int:
    return sum(each.prompt.pages for each in arrivals)
