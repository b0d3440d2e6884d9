"""Comparing ways to route requests, from the command line: a table, two claims, a report."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigError
from ...simulation.routing.arrivals import arrivals_of
from ...simulation.routing.comparison import ComparisonReport, ComparisonSettings, compare
from ...simulation.routing.replica_check import check_against_replica
from ...small_engine.request import BLOCK_TOKENS, WorkloadRequest
from ...small_engine.workload import requests_of
from ..option_values import check_number
from ..report import write_report
from ..settings import SEED_MAX

if TYPE_CHECKING:
    from rich.console import Console

BUILT_IN_REQUESTS = 2000
"""Requests of the built-in workload where nobody says how many."""
CHECKED_REQUESTS = 300
"""With so many of the requests the cache of the simulation is held against a replica."""


def run_comparison(
    *,
    trace: Path | None,
    skip: int,
    requests: int | None,
    seed: int,
    loads: str,
    settings: ComparisonSettings,
    report: Path | None,
) -> None:
    """Run every policy, print what came out and write the report."""
    from rich.console import Console

    chosen = _settings(settings, loads)
    wanted = _requests(trace, skip, requests, seed)
    console = Console(highlight=False, emoji=False)
    with Console(stderr=True).status("holding the cache against a replica") as status:
        console.print(_checked(wanted[:CHECKED_REQUESTS]), soft_wrap=True)
        found = compare(arrivals_of(wanted, seed), chosen, status.update)
    print_comparison(found, console)
    if report is not None:
        write_report(str(report), found)


def _settings(settings: ComparisonSettings, loads: str) -> ComparisonSettings:
    check_number("groups", settings.groups, 1, 256)
    if settings.device_pages is not None:
        check_number("device_pages", settings.device_pages, 1)
    check_number("tokens_per_s", settings.tokens_per_s, 1)
    check_number("attention_tokens", settings.attention_tokens, 0)
    check_number("lag_s", settings.lag_s, 0)
    try:
        parts = tuple(float(each) for each in loads.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--loads is {loads!r}, must be numbers with commas, for example 0.5,0.9"
        ) from error
    for each in parts:
        if not 0.01 <= each <= 100:
            raise ConfigError(f"--loads has {each:g}, must be from 0.01 to 100")
    return replace(settings, loads=parts)


def _requests(
    trace: Path | None, skip: int, requests: int | None, seed: int
) -> list[WorkloadRequest]:
    check_number("skip", skip, 0)
    check_number("seed", seed, 0, SEED_MAX)
    if requests is not None:
        check_number("requests", requests, 2)
    limit = requests
    if limit is None and trace is None:
        limit = BUILT_IN_REQUESTS
    name = None if trace is None else str(trace)
    read = requests_of(name, seed, None if limit is None else skip + limit)
    return list(islice(read, skip, None))


def _checked(requests: Sequence[WorkloadRequest]) -> str:
    """Hold the cache against a replica with so little memory that much is displaced."""
    device_pages = max((-(-each.prompt_length // BLOCK_TOKENS) for each in requests), default=1)
    displaced = check_against_replica(requests, BLOCK_TOKENS, device_pages)
    return (
        f"The simulated cache is a replica's over the first {len(requests)} requests:"
        f" {device_pages:,} pages, {displaced:,} displaced."
    )


def print_comparison(report: ComparisonReport, console: "Console") -> None:
    """Print the table, and whether the router comes to what it is held to."""
    from rich import box
    from rich.table import Table

    console.print(
        f"{report['requests']:,} requests, {report['tokens']:,} tokens of prompts;"
        f" {report['groups']} groups of {report['device_pages']:,} pages of"
        f" {report['page_tokens']} tokens.\n"
        f"Hit ratio of one group that computes everything: {report['alone_hit_ratio']:.3f} with the"
        f" memory of one, {report['together_hit_ratio']:.3f} with that of all,"
        f" {report['ideal_hit_ratio']:.3f} with room for everything.\n"
        f"Load 1 is what all groups can serve under round robin:"
        f" {report['saturation_requests_per_s']:.2f} requests a second.\n"
        "Queueing and the time to the first token (TTFT) are in seconds.",
        soft_wrap=True,
    )
    table = Table(header_style="bold", box=box.SIMPLE, pad_edge=False)
    table.add_column("load, policy", no_wrap=True)
    for title in ("hits", "busy", "queue p50", "p99", "mean", "TTFT p50", "p99"):
        table.add_column(title, justify="right", no_wrap=True)
    load = None
    for each in report["results"]:
        if each["load"] != load:
            load = each["load"]
            table.add_row(f"{load:g}", style="bold")
        times_s = (
            *(each["queueing_p50_s"], each["queueing_p99_s"], each["queueing_mean_s"]),
            *(each["first_token_p50_s"], each["first_token_p99_s"]),
        )
        table.add_row(
            f"  {each['policy']}",
            f"{each['hit_ratio']:.3f}",
            f"{each['busy']:.2f}",
            *(f"{time_s:,.{2 if time_s < 100 else 0}f}" for time_s in times_s),
        )
    console.print(table)
    for claim in report["claims"]:
        verdict = "holds" if claim["holds"] else "DOES NOT HOLD"
        console.print(
            f"{verdict}: {claim['what']}: {claim['found']:.3f} where {claim['wanted']:.3f} is wanted",
            soft_wrap=True,
        )
