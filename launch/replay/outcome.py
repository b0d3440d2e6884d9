"""Prints and writes the result of a replay on rank 0, and determines the exit status."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from rich.console import Console
from rich.table import Table

from ...small_engine.profiles import find_profile
from ...telemetry.chrome_trace import trace_text
from ...telemetry.kept_events import RankEvents
from ..cli.amounts import bytes_in_words, count
from ..cli.exits import EXIT_FAULT, printing, say
from ..cli.interruption import EXIT_INTERRUPTED
from ..cli.replay_settings import ReplaySettings
from ..cli.report_files import write_report, write_text
from .report import Report, failures_in

Row = tuple[str, str, bool]
"""A row of a table: label, value, and whether a line is drawn after the row."""

EXIT_REFUSED = 5
"""Exit status of a replay that had no faults but refused some requests."""


VIEWER = "https://ui.perfetto.dev"


class Replayed(NamedTuple):
    """The report of a replay, and the timelines of its ranks."""

    report: Report
    timelines: Sequence[bytes]
    """Packed events (`RankEvents.pack`) of each rank whose events were kept and sent to rank 0."""


def conclude(replayed: Replayed, settings: ReplaySettings) -> int:
    """Print the report as a table, write the files, and return the exit status.

    Raises `ConfigError` if a file cannot be written, and `LockstepError` if stdout cannot be written.
    """
    report = replayed.report
    try:
        with printing():
            if settings.table:
                console = Console(highlight=False, emoji=False)
                console.print(_pace(report), soft_wrap=True)
                profile = find_profile(str(report["settings"]["profile"]))
                console.print(profile.scale, soft_wrap=True)
                title = count(report["ranks"], "rank")
                title = f"{title}, interrupted" if report["interrupted"] else title
                console.print(table_of({title: report}))
                console.print("lockstep replay --explain explains each row")
    finally:
        # Write the report file even if printing the table has failed.
        if settings.report is not None:
            write_report(settings.report, report)
    for line in report["refusals"]:
        say(f"refused: {line}")
    unnamed = report["refused"] - len(report["refusals"])
    if report["refusals"] and unnamed > 0:
        say(f"refused: {unnamed} more")
    for kind, outcomes in report["operations"].items():
        if outcomes.get("failed"):
            failed = f"{outcomes['failed']} of {sum(outcomes.values())} {kind} operations failed"
            say(f"{failed}; see the warnings above")
    faults = failures_in(report)
    for fault in faults:
        say(fault)
    if settings.timeline is not None:
        ranks = [RankEvents.unpack(each) for each in replayed.timelines]
        write_text(settings.timeline, trace_text(ranks), "timeline")
        if settings.table:
            with printing():
                print(f"timeline: {settings.timeline}, for {VIEWER}")
    if report["interrupted"]:
        return EXIT_INTERRUPTED
    if faults:
        return EXIT_FAULT
    return EXIT_REFUSED if report["refused"] else 0


def _pace(report: Report) -> str:
    """Return a line that says how many requests the replay kept in the system at a time."""
    settings = report["settings"]
    unused = "" if settings["trace"] is None else "; the trace's timestamps are not used"
    requests = count(cast("int", settings["concurrency"]), "request")
    return f"{requests} in the system at a time (--concurrency){unused}"


def table_of(reports: Mapping[str, Report]) -> Table:
    """Return a table with one column per report; `reports` is by column title."""
    columns = {title: rows_of(report) for title, report in reports.items()}
    table = Table(title=None, header_style="bold")
    table.add_column("", no_wrap=True)
    for title in columns:
        table.add_column(title, justify="right")
    for rows in zip(*columns.values(), strict=True):
        label, _, section_ends = rows[0]
        table.add_row(label, *(value for _, value, _ in rows), end_section=section_ends)
    return table


def rows_of(report: Report) -> list[Row]:
    """Return all rows of the table for one replay."""
    prompt, hits, moved = report["prompt_tokens"], report["hit_tokens"], report["bytes"]
    equal = {0: "not compared", 1: "yes"}.get(len(set(report["digests"])), "NO")

    def share(tokens: int) -> str:
        return f"{tokens:,} ({100 * tokens / prompt:.1f} %)" if prompt else f"{tokens:,}"

    ended = report["operations"]
    failed = sum(outcomes.get("failed", 0) for outcomes in ended.values())
    return [
        ("requests served", f"{report['requests']:,}", False),
        ("requests refused", f"{report['refused']:,}", False),
        ("requests retracted", f"{report['retractions']:,}", False),
        ("  resumed", f"{report['resumes']:,}", False),
        ("requests preempted", f"{report['preempted']:,}", False),
        ("wall time", f"{report['wall_s']:.2f} s", True),
        ("prompt tokens", f"{prompt:,}", False),
        ("  computed", share(report["computed_tokens"]), False),
        ("  hit on the device (L1)", share(hits["device"]), False),
        ("  hit in host memory (L2)", share(hits["host"]), False),
        ("  hit in storage (L3)", share(hits["storage"]), True),
        *_pool_rows(report),
        ("steps", f"{report['steps']:,}", False),
        ("rounds", f"{report['rounds']:,}", False),
        ("collectives", f"{report['collectives']:,}", False),
        ("transport", report["transport"], False),
        ("time in Cache.step p50", f"{report['round_us']['p50']:,.0f} us", False),
        ("time in Cache.step p99", f"{report['round_us']['p99']:,.0f} us", True),
        ("operations ended", f"{sum(sum(each.values()) for each in ended.values()):,}", False),
        ("  of them failed", f"{failed:,}", False),
        ("operations left at the end", f"{report['operations_left']:,}", False),
        ("device to host", bytes_in_words(moved["l1_to_l2"]), False),
        ("host to device", bytes_in_words(moved["l2_to_l1"]), False),
        ("host to storage", bytes_in_words(moved["l2_to_l3"]), False),
        ("storage to host", bytes_in_words(moved["l3_to_l2"]), True),
        ("pages verified when used", f"{report['pages_verified']:,}", False),
        ("pages verified at the end", f"{report['pages_rechecked']:,}", False),
        ("pages corrupt", f"{report['pages_corrupt']:,}", False),
        ("objects bad in storage", f"{report['storage_corrupt']:,}", False),
        ("storage calls that timed out", f"{report['storage_late_calls']:,}", False),
        ("  waited for them", f"{report['storage_waited_s']:,.1f} s", False),
        ("replicas equal", equal, False),
    ]


def _pool_rows(report: Report) -> list[Row]:
    """Return two rows for each pool: its size, and the number of pages whose content was compared."""
    pools = report["pools"]
    rows: list[Row] = []
    for name, pool in pools.items():
        pages = f"{pool['device_pages']:,} + {pool['host_pages']:,}"
        compared = pool["pages_verified"] + pool["pages_rechecked"]
        size = f"{pages} of {bytes_in_words(pool['page_bytes'])}"
        rows.append((f"pool {name}: pages in L1 + L2", size, False))
        rows.append(("  pages compared", f"{compared:,}", name == [*pools][-1]))
    return rows
