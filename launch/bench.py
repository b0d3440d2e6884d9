"""`lockstep bench`: what things cost, each beside its limit in the same run."""

from typing import TYPE_CHECKING, Annotated

import typer

from .options import ReportFile
from .report import check_that_writable, write_report

if TYPE_CHECKING:
    from ..benchmarks.tree import TreeReport

bench = typer.Typer(
    name="bench",
    help="Measure what things cost, each beside its limit in the same run.",
    rich_markup_mode=None,
    no_args_is_help=True,
)


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
    repetitions: Annotated[
        int, typer.Option(help="How often each call is timed; the median counts.")
    ] = 500,
    report: ReportFile = None,
) -> None:
    """Measure match, insert, lock and eviction beside memcmp."""
    from rich.console import Console

    from ..benchmarks.tree import Sizes, run

    all_sizes = Sizes()
    sizes = Sizes(
        tokens=tokens or all_sizes.tokens,
        nodes=nodes or all_sizes.nodes,
        page_tokens=page_tokens or all_sizes.page_tokens,
        components=components or all_sizes.components,
        repetitions=repetitions,
    )
    if report is not None:
        check_that_writable(str(report))
    with Console(stderr=True).status("measuring") as status:
        found = run(sizes, lambda what: status.update(f"measuring: {what}"))
    _print(found)
    if report is not None:
        write_report(str(report), found)


def _print(report: "TreeReport") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

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
    for tokens, converting_us in report["convert_list_us"].items():
        console.print(f"a Python list of {int(tokens):,} tokens: {converting_us:,.1f} us more")
    for name, found in report["bytes_by_components"].items():
        console.print(
            f"{name}: {found['with_keys']} bytes of bookkeeping for each page beside its tokens,"
            f" {found['without_keys']} without page keys, in runs of {found['run_pages']} pages",
            soft_wrap=True,
        )
