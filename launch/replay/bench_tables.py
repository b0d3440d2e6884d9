"""Tables that `lockstep bench` prints for its results."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from rich import box
from rich.console import Console
from rich.table import Table

from ...ranks.protocol.transfer_engine_settings import TCP
from ..cli.amounts import count

if TYPE_CHECKING:
    from ...benchmarks.agreement import AgreementReport
    from ...benchmarks.handoff.report import HandoffReport
    from ...benchmarks.path.report import PathReport
    from ...benchmarks.storage import StorageReport
    from ...benchmarks.tree import TreeReport


def _table(what: str, *titles: str) -> Table:
    """Return an empty table; the first column has the title `what`, for the names of measurements."""
    table = Table(header_style="bold", box=box.SIMPLE, pad_edge=False)
    table.add_column(what, no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _print(*parts: Table | str) -> None:
    console = Console(highlight=False, emoji=False)
    for each in parts:
        console.print(each, soft_wrap=isinstance(each, str))


def print_agreement(report: "AgreementReport") -> None:
    """Print the result of `lockstep bench agreement`."""
    table = _table("microseconds", "p50", "p99")
    for what, times in (
        ("a whole step, blocking", report["blocking_us"]),
        ("  of it the transport", report["exchange_us"]),
        ("  of it Python", report["python_us"]),
        ("an idle step of an open cache", report["idle_step_us"]),
        ("the exchange alone", report["exchange_alone_us"]),
        (
            f"pipelined behind {report['work_us']:,} us of work: stall",
            report["pipelined_stall_us"],
        ),
        ("  and reading the result", report["pipelined_wait_us"]),
        ("  the whole step", report["pipelined_step_us"]),
    ):
        table.add_row(what, f"{times['p50']:,.1f}", f"{times['p99']:,.1f}")
    limits = report["limit_us"]
    table.add_section()
    table.add_row("limit: one bare all_reduce over gloo", f"{limits['gloo']:,.1f}", "")
    table.add_row("limit: one bare exchange over shared memory", f"{limits['shm']:,.1f}", "")
    all_reduces = count(1 + report["operations"], "all_reduce")
    table.add_row(f"per request: {all_reduces} of one lane", f"{report['per_request_us']:,.1f}", "")
    ratios = report["ratios"]
    _print(
        table,
        f"{count(report['ranks'], 'rank')} on {count(report['cores'], 'core')},"
        f" {count(report['operations'], 'operation')} in flight, {report['lanes']:,} lanes;"
        f" rounds over {report['transport']}",
        f"{report['collectives_per_step']:g} collective in each step; a blocking step takes"
        f" {_in_words(ratios['gloo_to_blocking'])} one bare all_reduce, and"
        f" {_in_words(ratios['per_request_to_blocking'])} one all_reduce for each request",
    )
    if report["ranks"] > report["cores"]:
        _print(
            "There are more ranks than cores, so every wait, including the stall, includes other ranks'"
            " work."
        )


def _in_words(ratio: float) -> str:
    """Return text that compares Lockstep's time with a reference; `ratio` is reference / Lockstep."""
    if ratio >= 1:
        return f"1/{ratio:.{1 if ratio < 10 else 0}f} of the time of"
    return f"{1 / max(ratio, 0.001):.2g} times the time of"


def print_storage(report: "StorageReport") -> None:
    """Print the result of `lockstep bench storage`."""
    table = _table("GB/s", "store", "limit", "ratio")
    for what, ours, limit, ratio in (
        ("read", report["read_gbps"], report["limit_read_gbps"], report["ratio_read"]),
        ("write", report["write_gbps"], report["limit_write_gbps"], report["ratio_write"]),
    ):
        table.add_row(what, f"{ours:.2f}", f"{limit:.2f}", f"{ratio:.2f}")
    _print(
        table,
        f"pages of {count(report['page_bytes'], 'byte')}, {count(report['threads'], 'thread')}; "
        f"limit: {report['limit_file']}",
        f"existence: {report['exists_us_per_key']:.3f} us per existing key; "
        f"CPU: {report['cpu_s_per_gb']:.2f} s for each GB, {report['limit_cpu_s_per_gb']:.2f} s at "
        "the limit",
    )


def print_handoff(report: "HandoffReport") -> None:
    """Print the result of `lockstep bench handoff`."""
    table = _table("GB/s", "Lockstep", "limit", "ratio")
    figures = (report["handoff_gbps"], report["limit_gbps"], report["ratio"])
    by = "host to host" if report["transfer"] == TCP else f"host to host, by {report['transfer']}"
    table.add_row(by, *(f"{each:.2f}" for each in figures))
    authenticated = report["authenticated_gbps"]
    if authenticated is not None:
        limit = report["limit_gbps"]
        figures = (authenticated, limit, authenticated / limit)
        table.add_row(f"{by}, authenticated", *(f"{each:.2f}" for each in figures))
    _print(table)
    if authenticated is not None:
        _print(
            f"authenticated frames (`Peers.secret`): {report['authenticated_ratio']:.2f} of the speed"
            f" without, {report['authenticated_cpu_s_per_gb']:.2f} s of CPU for each GB"
        )
    _print(
        f"pages of {count(report['page_bytes'], 'byte')}; limit: one bare connection over loopback;"
        f" medians of {count(report['rounds'], 'round')}",
        f"CPU: {report['handoff_cpu_s_per_gb']:.2f} s for each GB, both sides together,"
        f" {report['limit_cpu_s_per_gb']:.2f} s at the limit",
    )


def print_path(report: "PathReport") -> None:
    """Print the result of `lockstep bench path`."""
    table = _table("GB/s", "Lockstep", "limit", "ratio")
    figures = cast("Mapping[str, float]", report)
    for what, way in (
        ("storage to host, right after opening", "first_prefetch"),
        ("storage to host", "l3_l2"),
        ("host to device", "l2_l1"),
        ("host to storage", "l2_l3"),
    ):
        keys = (f"{way}_gbps", f"limit_{way}_gbps", f"{way}_ratio")
        table.add_row(what, *(f"{figures[key]:.2f}" for key in keys))
    _print(
        table,
        f"{count(report['ranks'], 'rank')} on {count(report['cpus'], 'core')}, pages of"
        f" {count(report['page_bytes'], 'byte')}, {count(report['threads'], 'thread')} a rank;"
        f" limit: {report['limit_text']}; medians of {report['turns'] - 1} turns, one right after"
        " opening",
        f"CPU: {report['l3_l2_cpu_s_per_gb']:.2f} s for each GB read,"
        f" {report['limit_l3_l2_cpu_s_per_gb']:.2f} s at the limit;"
        f" {report['l2_l3_cpu_s_per_gb']:.2f} s for each GB written,"
        f" {report['limit_l2_l3_cpu_s_per_gb']:.2f} s at the limit",
    )
    if report["limit_device_gbps"] is not None:
        _print(f"the device alone, past the page cache: {report['limit_device_gbps']:.2f} GB/s")
    if report["left_behind"]:
        _print("The pages written are still in the store, because it cannot list or remove them.")


def print_tree(report: "TreeReport") -> None:
    """Print the result of `lockstep bench tree`."""
    from ...benchmarks.tree import OPS

    table = _table("microseconds", "page", "nodes", "tokens", "path", "p50", "memcmp", "ratio")
    for op in OPS:
        points = [point for point in report["points"] if point["op"] == op]
        table.add_row(op, style="bold")
        for point in points:
            table.add_row(
                f"  {point['components']}",
                str(point["page_tokens"]),
                f"{point['nodes']:,}",
                f"{point['tokens']:,}",
                str(point["path_nodes"] or ""),
                f"{point['p50_us']:,.1f}",
                f"{point['limit_us']:,.2f}",
                f"{point['p50_us'] / max(point['limit_us'], 0.01):,.1f}",
                end_section=point is points[-1],
            )
    _print(table)
