"""`lockstep bench`: what things cost, each beside its limit in the same run."""

import re
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ..coordinator.collective import Transport
from .amounts import count, parse_bytes
from .option_values import check_not_a_path
from .options import ReportFile
from .report import check_that_writable, write_report

if TYPE_CHECKING:
    from ..benchmarks.agreement import AgreementReport
    from ..benchmarks.storage import StorageReport
    from ..benchmarks.tree import TreeReport

bench = typer.Typer(
    name="bench",
    help="Measure what things cost, each beside its limit in the same run.",
    rich_markup_mode=None,
    no_args_is_help=True,
)

_PLAIN: Final = re.compile(r"-?[0-9]{1,30}")


@bench.callback()
def _group() -> None:
    """Measure what things cost, each beside its limit in the same run."""


Numbers = list[int] | None


@bench.command("tree")
def tree(
    *,
    tokens: Annotated[
        Numbers,
        typer.Option(help="Length of a prompt; may be repeated.", show_default="1k, 8k, 32k, 128k"),
    ] = None,
    nodes: Annotated[
        Numbers,
        typer.Option(help="Nodes of the tree; may be repeated.", show_default="1,000 and 100,000"),
    ] = None,
    page_tokens: Annotated[
        Numbers, typer.Option(help="Tokens of a page; may be repeated.", show_default="16 and 64")
    ] = None,
    components: Annotated[
        list[str] | None,
        typer.Option(help="What the model keeps; may be repeated.", show_default="all there are"),
    ] = None,
    blocks: Annotated[
        Numbers,
        typer.Option(
            help="Which block of a request that decodes; may be repeated.",
            show_default="16, 256, 1,024 and 4,096",
        ),
    ] = None,
    repetitions: Annotated[
        int, typer.Option(help="How often each call is timed; the median counts.")
    ] = 500,
    report: ReportFile = None,
) -> None:
    """Measure match, insert, lock, eviction and decoding beside memcmp."""
    from rich.console import Console

    from ..benchmarks.tree import Sizes, run

    all_sizes = Sizes()
    sizes = Sizes(
        tokens=tokens or all_sizes.tokens,
        nodes=nodes or all_sizes.nodes,
        page_tokens=page_tokens or all_sizes.page_tokens,
        components=components or all_sizes.components,
        blocks=blocks or all_sizes.blocks,
        repetitions=repetitions,
    )
    if report is not None:
        check_that_writable(str(report))
    with Console(stderr=True).status("measuring") as status:
        found = run(sizes, lambda what: status.update(f"measuring: {what}"))
    _print(found)
    if report is not None:
        write_report(str(report), found)


@bench.command("storage")
def storage(
    *,
    store: Annotated[
        str, typer.Option(help="The store, as a URI; what is written there is removed again.")
    ],
    page_bytes: Annotated[
        str, typer.Option(help="Bytes of a page, such as 65536 or 1MiB.", metavar="BYTES")
    ],
    threads: Annotated[int, typer.Option(help="Threads, of the store and of its limit.")] = 1,
    total_bytes: Annotated[
        str, typer.Option("--bytes", help="Bytes of all pages of a round.", metavar="BYTES")
    ] = "256MiB",
    report: ReportFile = None,
) -> None:
    """Measure a store beside bare preadv and pwrite."""
    from rich.console import Console

    from ..benchmarks.storage import StorageSizes, run

    check_not_a_path(store)
    sizes = StorageSizes(
        store=store,
        page_bytes=_bytes(page_bytes, "--page-bytes"),
        threads=threads,
        total_bytes=_bytes(total_bytes, "--bytes"),
    )
    if report is not None:
        check_that_writable(str(report))
    with Console(stderr=True).status("measuring") as status:
        found = run(sizes, lambda what: status.update(f"measuring: {what}"))
    _print_storage(found)
    if report is not None:
        write_report(str(report), found)


@bench.command("agreement")
def agreement(
    *,
    ranks: Annotated[int, typer.Option(help="Ranks, one process each.")] = 2,
    operations: Annotated[
        int, typer.Option(help="Prefetches in flight, each with a place in the ballot.")
    ] = 32,
    transport: Annotated[
        Transport, typer.Option(help="What carries the rounds; auto picks by the hosts.")
    ] = Transport.AUTO,
    work_us: Annotated[
        int, typer.Option(help="Microseconds that the caller computes between pipelined steps.")
    ] = 5000,
    hosts: Annotated[int, typer.Option(help="Pretend that the ranks are on so many hosts.")] = 1,
    blocks: Annotated[int, typer.Option(help="How often everything is measured in turns.")] = 10,
    report: ReportFile = None,
) -> None:
    """Measure what a step's round costs beside bare all_reduces."""
    from rich.console import Console

    from ..benchmarks.agreement import run
    from ..benchmarks.agreement_settings import AgreementSettings

    settings = AgreementSettings(
        ranks=ranks,
        operations=operations,
        transport=transport,
        work_us=work_us,
        hosts=hosts,
        blocks=blocks,
    )
    if report is not None:
        check_that_writable(str(report))
    with Console(stderr=True).status("measuring") as status:
        found = run(settings, status.update)
    _print_agreement(found)
    if report is not None:
        write_report(str(report), found)


def _print_agreement(report: "AgreementReport") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(header_style="bold", box=box.SIMPLE, pad_edge=False)
    table.add_column("microseconds", no_wrap=True)
    for title in ("p50", "p99"):
        table.add_column(title, justify="right", no_wrap=True)
    for what, times in (
        ("a whole step, blocking", report["blocking_us"]),
        ("  of it the transport", report["exchange_us"]),
        ("  of it Python", report["python_us"]),
        ("the exchange alone", report["exchange_alone_us"]),
        (
            f"pipelined behind {report['work_us']:,} us of work: stall",
            report["pipelined_stall_us"],
        ),
        ("  and reading what all ranks said", report["pipelined_wait_us"]),
        ("  the whole step", report["pipelined_step_us"]),
    ):
        table.add_row(what, f"{times['p50']:,.1f}", f"{times['p99']:,.1f}")
    limits = report["limit_us"]
    table.add_section()
    table.add_row("limit: one bare all_reduce over gloo", f"{limits['gloo']:,.1f}", "")
    table.add_row("limit: one bare exchange over shared memory", f"{limits['shm']:,.1f}", "")
    all_reduces = count(1 + report["operations"], "all_reduce")
    table.add_row(f"per request: {all_reduces} of one lane", f"{report['per_request_us']:,.1f}", "")
    console = Console(highlight=False, emoji=False)
    console.print(table)
    ratios = report["ratios"]
    console.print(
        f"{count(report['ranks'], 'rank')} on {count(report['cores'], 'core')},"
        f" {count(report['operations'], 'operation')} in flight, {report['lanes']:,} lanes;"
        f" rounds over {report['transport']}",
        soft_wrap=True,
    )
    console.print(
        f"{report['collectives_per_step']:g} collective in each step; a blocking step takes"
        f" {_in_words(ratios['gloo_to_blocking'])} one bare all_reduce, and"
        f" {_in_words(ratios['per_request_to_blocking'])} one all_reduce for each request",
        soft_wrap=True,
    )
    if report["ranks"] > report["cores"]:
        console.print(
            "There are more ranks than cores, so every wait, the stall too, is also one for other"
            " ranks' work.",
            soft_wrap=True,
        )


def _in_words(ratio: float) -> str:
    """Say how long something takes that another thing takes `ratio` times as long as."""
    if ratio >= 1:
        return f"1/{ratio:.{1 if ratio < 10 else 0}f} of the time of"
    return f"{1 / max(ratio, 0.001):.2g} times the time of"


def _bytes(text: str, option: str) -> int:
    """Return bytes, for a plain number or one with a unit."""
    plain = _PLAIN.fullmatch(text.strip())
    return int(text) if plain is not None else parse_bytes(text, option)


def _print_storage(report: "StorageReport") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(header_style="bold", box=box.SIMPLE, pad_edge=False)
    table.add_column("GB/s", no_wrap=True)
    for title in ("store", "limit", "ratio"):
        table.add_column(title, justify="right", no_wrap=True)
    for what, ours, limit, ratio in (
        ("read", report["read_gbps"], report["limit_read_gbps"], report["ratio_read"]),
        ("write", report["write_gbps"], report["limit_write_gbps"], report["ratio_write"]),
    ):
        table.add_row(what, f"{ours:.2f}", f"{limit:.2f}", f"{ratio:.2f}")
    console = Console(highlight=False, emoji=False)
    console.print(table)
    console.print(
        f"pages of {count(report['page_bytes'], 'byte')}, {count(report['threads'], 'thread')}; "
        f"limit: {report['limit_file']}",
        soft_wrap=True,
    )
    console.print(
        f"existence: {report['exists_us_per_key']:.3f} us for each key that was seen; "
        f"CPU: {report['cpu_s_per_gb']:.2f} s for each GB, {report['limit_cpu_s_per_gb']:.2f} s at "
        "the limit",
        soft_wrap=True,
    )


def _print(report: "TreeReport") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from ..benchmarks.decoding import DECODING
    from ..benchmarks.tree import OPS

    table = Table(header_style="bold", box=box.SIMPLE, pad_edge=False)
    table.add_column("microseconds", no_wrap=True)
    for title in ("page", "nodes", "tokens", "path", "p50", "memcmp", "ratio"):
        table.add_column(title, justify="right", no_wrap=True)
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
    console = Console(highlight=False, emoji=False)
    console.print(table)
    for name, blocks in report["decode_us"].items():
        costs = ", ".join(f"{int(block):,}th {us:,.1f} us" for block, us in blocks.items())
        console.print(
            f"a block of a request that decodes, {DECODING[name]}: {costs}", soft_wrap=True
        )
    for tokens, converting_us in report["convert_list_us"].items():
        console.print(f"a Python list of {int(tokens):,} tokens: {converting_us:,.1f} us more")
    for name, found in report["bytes_by_components"].items():
        console.print(
            f"{name}: {found['with_keys']} bytes of bookkeeping for each page beside its tokens,"
            f" {found['without_keys']} without page keys, in runs of {found['run_pages']} pages",
            soft_wrap=True,
        )
