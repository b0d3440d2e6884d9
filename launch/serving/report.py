"""The report of groups that served a trace together: one JSON object, and a table for people."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TypedDict, cast

import numpy as np
from rich.console import Console

from ...ranks.disaggregation.arrivals import Outcome
from ...small_engine.profiles import find_profile
from ...storage_backends.uri import without_secrets
from ..amounts import count
from ..first_error import EXIT_FAULT, say
from ..outcome import EXIT_REFUSED, Row, table_with
from ..report import HitTokens, Percentiles, Report, faults_of, write_report
from .front_counts import FrontCounts
from .result import GroupResult
from .settings import ServeSettings


class Handoffs(TypedDict):
    """How requests came to the groups that decode."""

    ok: int
    """With everything, at the first time of asking."""
    refetched: int
    """With everything, once it was asked for again."""
    resent: int
    """With everything, once the other group had offered it again."""
    recomputed: int
    """With less: the rest was computed where they were decoded."""


class ServeReport(TypedDict):
    """Says what a run has shown. Every key is always present."""

    requests: int
    """Requests that were served: computed, handed over, and decoded to their end."""
    refused: int
    """Requests that fit no group; nothing else counts them."""
    refusals: list[str]
    sent_again: int
    """Requests that were sent once more: their group was lost, or had them no more."""
    groups_lost: list[str]
    """Groups that ended, were started anew, or were listed no more before all requests were served."""
    handoffs: Handoffs
    manifests_refused: dict[str, int]
    """Manifests that could not be gone on with, by why."""
    handoff_ms: Percentiles
    """From the end of a prompt's last chunk until all of it was on the device where it is decoded."""
    first_token_ms: Percentiles
    """From when a request came until its prompt was computed."""
    retractions: int
    """How often a request left the device of a group that decodes, so that an older one could go on."""
    resumes: int
    """How often one came back with all that it had."""
    resumes_from_storage: int
    """How many of them came back out of storage."""
    router_hit_ratio: float
    """The share of prompt tokens that the chosen groups had, as the router knew when it chose them."""
    prompt_tokens: int
    computed_tokens: int
    """Prompt tokens that any group has computed."""
    hit_tokens: HitTokens
    """Prompt tokens that the groups that prefill had, by the tier that they came from."""
    output_tokens: int
    pages_verified: int
    """Pages that were compared when they were used, over all groups, pools and ranks."""
    pages_rechecked: int
    pages_corrupt: int
    """Pages whose bytes were wrong when they were used. Must be 0."""
    storage_corrupt: int
    """Objects that were found corrupt when they were read, and were not used."""
    operations_left: int
    violations: list[str]
    wall_s: float
    """From the first request to the end of the last."""
    groups: dict[str, Report]
    """What each group counted, as `lockstep replay` reports it; of those that ended in order."""
    settings: dict[str, object]


def make_serve_report(
    settings: ServeSettings,
    counts: FrontCounts,
    results: Mapping[str, GroupResult],
    wall_s: float,
) -> ServeReport:
    """Return the report of what the front has seen and what groups have handed in."""
    reports = {name: each.report for name, each in results.items()}
    decoding = [each for each in results.values() if not each.departures]
    prefilling = [each.report for each in results.values() if each.departures]

    def total(
        number: Callable[[Report], int], of: Sequence[Report] = tuple(reports.values())
    ) -> int:
        return sum(map(number, of))

    outcomes = {each: sum(e.handoffs.get(each, 0) for e in decoding) for each in Outcome}
    refused: dict[str, int] = {}
    for result in decoding:
        for name, number in result.manifests_refused.items():
            refused[name] = refused.get(name, 0) + number
    shown: dict[str, object] = asdict(settings)
    shown["directory"] = without_secrets(settings.directory)
    shown["replay"] = asdict(settings.replay) | {
        "store": settings.replay.store and without_secrets(settings.replay.store)
    }
    return ServeReport(
        requests=counts.served,
        refused=counts.refused,
        refusals=counts.refusals[:10],
        sent_again=counts.sent_again,
        groups_lost=counts.lost,
        handoffs=Handoffs(
            ok=outcomes[Outcome.OK],
            refetched=outcomes[Outcome.REFETCHED],
            resent=outcomes[Outcome.RESENT],
            recomputed=outcomes[Outcome.RECOMPUTED],
        ),
        manifests_refused=refused,
        handoff_ms=_percentiles_ms(counts.handoffs_us),
        first_token_ms=_percentiles_ms(counts.first_tokens_us),
        retractions=total(lambda each: each["retractions"]),
        resumes=total(lambda each: each["resumes"]),
        resumes_from_storage=total(lambda each: each["resumes_from_storage"]),
        router_hit_ratio=round(counts.routed_hit_tokens / max(1, counts.routed_tokens), 4),
        prompt_tokens=counts.prompt_tokens,
        computed_tokens=total(lambda each: each["computed_tokens"]),
        hit_tokens=HitTokens(
            device=total(lambda each: each["hit_tokens"]["device"], prefilling),
            host=total(lambda each: each["hit_tokens"]["host"], prefilling),
            storage=total(lambda each: each["hit_tokens"]["storage"], prefilling),
        ),
        output_tokens=total(lambda each: each["output_tokens"]),
        pages_verified=total(lambda each: each["pages_verified"]),
        pages_rechecked=total(lambda each: each["pages_rechecked"]),
        pages_corrupt=total(lambda each: each["pages_corrupt"]),
        storage_corrupt=total(lambda each: each["storage_corrupt"]),
        operations_left=total(lambda each: each["operations_left"]),
        violations=sorted({one for each in reports.values() for one in each["violations"]}),
        wall_s=round(wall_s, 3),
        groups=reports,
        settings=shown,
    )


def conclude(
    report: ServeReport,
    faults: Sequence[str],
    *,
    path: str | None,
    console: Console | None,
    went_on: bool,
) -> int:
    """Print the report as a table, write it to `path`, and return the status to exit with.

    `went_on` says whether all requests were served, whatever was lost.
    """
    if console is not None:
        settings = cast("dict[str, object]", report["settings"]["replay"])
        console.print(find_profile(str(settings["profile"])).scale, soft_wrap=True)
        console.print(table_with({_shape(report): rows_of(report)}))
    if path is not None:
        write_report(path, report)
    for line in report["refusals"]:
        say(f"refused: {line}")
    for name in report["groups_lost"]:
        went_on_how = "; what it had went on elsewhere, or began anew" if went_on else ""
        say(f"group {name} was lost{went_on_how}")
    all_faults = [*faults]
    for name, group in report["groups"].items():
        all_faults += [f"group {name}: {fault}" for fault in faults_of(group)]
    for fault in all_faults:
        say(fault)
    if all_faults:
        return EXIT_FAULT
    return EXIT_REFUSED if report["refused"] else 0


def _shape(report: ServeReport) -> str:
    groups = report["groups"].values()
    ranks = sum(each["ranks"] for each in groups)
    return f"{count(len(groups), 'group')}, {count(ranks, 'rank')}"


def rows_of(report: ServeReport) -> list[Row]:
    """Return the rows of the table that shows what groups have served."""
    prompt, hits, handoffs = report["prompt_tokens"], report["hit_tokens"], report["handoffs"]

    def share(tokens: int) -> str:
        return f"{tokens:,} ({100 * tokens / prompt:.1f} %)" if prompt else f"{tokens:,}"

    def times(percentiles: Percentiles) -> str:
        return f"{milliseconds(percentiles['p50'])}, {milliseconds(percentiles['p99'])}"

    return [
        ("requests served", f"{report['requests']:,}", False),
        ("requests refused", f"{report['refused']:,}", False),
        ("requests sent again", f"{report['sent_again']:,}", False),
        ("wall time", f"{report['wall_s']:.2f} s", True),
        ("handed over at once", f"{handoffs['ok']:,}", False),
        ("  asked for again", f"{handoffs['refetched']:,}", False),
        ("  offered again", f"{handoffs['resent']:,}", False),
        ("  the rest computed here", f"{handoffs['recomputed']:,}", False),
        ("handoff p50, p99", times(report["handoff_ms"]), False),
        ("first token p50, p99", times(report["first_token_ms"]), False),
        ("put aside and taken up", f"{report['retractions']:,}, {report['resumes']:,}", False),
        ("  out of storage", f"{report['resumes_from_storage']:,}", True),
        ("prompt tokens", f"{prompt:,}", False),
        ("  computed", share(report["computed_tokens"]), False),
        ("  hit on the device (L1)", share(hits["device"]), False),
        ("  hit in host memory (L2)", share(hits["host"]), False),
        ("  hit in storage (L3)", share(hits["storage"]), False),
        ("  hits that the router saw", f"{100 * report['router_hit_ratio']:.1f} %", True),
        ("pages verified when used", f"{report['pages_verified']:,}", False),
        ("pages verified at the end", f"{report['pages_rechecked']:,}", False),
        ("pages corrupt", f"{report['pages_corrupt']:,}", False),
        ("objects bad where read", f"{report['storage_corrupt']:,}", False),
        ("operations left at the end", f"{report['operations_left']:,}", False),
    ]


def milliseconds(value: float) -> str:
    """Return a time as people read it; a dash where nothing was timed."""
    return f"{value:,.1f} ms" if value else "-"


def _percentiles_ms(samples_us: Sequence[int]) -> Percentiles:
    p50, p99 = np.percentile(samples_us, [50, 99]) / 1000 if samples_us else (0.0, 0.0)
    return Percentiles(p50=round(float(p50), 2), p99=round(float(p99), 2))
