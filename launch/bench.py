"""`lockstep bench`: what things cost, each beside its limit in the same run."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer

from ..coordinator.collective import Transport
from ..ranks.protocol.engine_settings import TCP
from .cli.amounts import parse_bytes
from .cli.option_values import check_not_a_path
from .replay.bench_tables import (
    print_agreement,
    print_handoff,
    print_path,
    print_storage,
    print_tree,
)
from .replay.options import ReportFile, Transfer
from .replay.report import check_that_writable, write_report

Found = TypeVar("Found", bound=Mapping[str, object])

bench = typer.Typer(
    name="bench",
    help="Measure what things cost, each beside its limit.",
    rich_markup_mode=None,
    no_args_is_help=True,
)

_PLAIN: Final = re.compile(r"-?[0-9]{1,30}")


@bench.callback()
def _group() -> None:
    """Measure what things cost, each beside its limit."""


Numbers = list[int] | None


@bench.command("tree", short_help="Measure match, insert, lock and eviction beside memcmp.")
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
    from ..benchmarks.tree import Sizes, run

    all_sizes = Sizes()
    sizes = Sizes(
        tokens=tokens or all_sizes.tokens,
        nodes=nodes or all_sizes.nodes,
        page_tokens=page_tokens or all_sizes.page_tokens,
        components=components or all_sizes.components,
        repetitions=repetitions,
    )
    _measure(lambda say: run(sizes, lambda what: say(f"measuring: {what}")), print_tree, report)


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
    from ..benchmarks.storage import StorageSizes, run

    check_not_a_path(store)
    sizes = StorageSizes(
        store=store,
        page_bytes=_bytes(page_bytes, "--page-bytes"),
        threads=threads,
        total_bytes=_bytes(total_bytes, "--bytes"),
    )
    _measure(lambda say: run(sizes, lambda what: say(f"measuring: {what}")), print_storage, report)


@bench.command("path", short_help="Measure storage to host to device beside bare reads.")
def path(
    *,
    store: Annotated[
        str, typer.Option(help="The store, as a URI; what is written there is removed again.")
    ],
    page_bytes: Annotated[
        str,
        typer.Option(
            help="Bytes of a rank's part of a page, such as 262144 or 1MiB.", metavar="BYTES"
        ),
    ],
    ranks: Annotated[int, typer.Option(help="Ranks, one process each.")] = 1,
    total_bytes: Annotated[
        str, typer.Option("--bytes", help="Bytes of all pages of one rank.", metavar="BYTES")
    ] = "1.5GiB",
    cold: Annotated[
        bool,
        typer.Option("--cold", help="Have the kernel forget the files before they are read."),
    ] = False,
    report: ReportFile = None,
) -> None:
    """Measure storage to host to device beside bare reads of the same files."""
    from ..benchmarks.path.report import run
    from ..benchmarks.path.settings import PathSettings

    check_not_a_path(store)
    settings = PathSettings(
        store=store,
        page_bytes=_bytes(page_bytes, "--page-bytes"),
        ranks=ranks,
        rank_bytes=_bytes(total_bytes, "--bytes"),
        cold=cold,
    )
    _measure(lambda say: run(settings, lambda what: say(f"measuring: {what}")), print_path, report)


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
    _measure(lambda say: run(settings, say), print_agreement, report)


@bench.command("handoff")
def handoff(
    *,
    page_bytes: Annotated[
        str, typer.Option(help="Bytes of a page, such as 262144 or 1MiB.", metavar="BYTES")
    ],
    total_bytes: Annotated[
        str, typer.Option("--bytes", help="Bytes of all pages of a round.", metavar="BYTES")
    ] = "256MiB",
    rounds: Annotated[int, typer.Option(help="How often everything is measured in turns.")] = 9,
    transfer: Transfer = TCP,
    report: ReportFile = None,
) -> None:
    """Measure pages from one group's host to another's."""
    from ..benchmarks.handoff.report import run
    from ..benchmarks.handoff.settings import HandoffSettings

    settings = HandoffSettings(
        page_bytes=_bytes(page_bytes, "--page-bytes"),
        total_bytes=_bytes(total_bytes, "--bytes"),
        rounds=rounds,
        transfer=transfer,
    )
    _measure(
        lambda say: run(settings, lambda what: say(f"measuring: {what}")), print_handoff, report
    )


def _measure(
    run: Callable[[Callable[[str], None]], Found],
    show: Callable[[Found], None],
    report: Path | None,
) -> None:
    """Measure, tell meanwhile what is being done, and show what was found."""
    from rich.console import Console

    if report is not None:
        check_that_writable(str(report))
    with Console(stderr=True).status("measuring") as status:
        found = run(status.update)
    show(found)
    if report is not None:
        write_report(str(report), found)


def _bytes(text: str, option: str) -> int:
    """Return bytes, for a plain number or one with a unit."""
    plain = _PLAIN.fullmatch(text.strip())
    return int(text) if plain is not None else parse_bytes(text, option)
