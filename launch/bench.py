"""`lockstep bench`: compare operations of Lockstep with a hardware limit that the same run measures."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from rich.console import Console

from ..benchmarks.agreement_settings import AgreementSettings
from ..benchmarks.handoff.handoff_settings import HandoffSettings
from ..benchmarks.path.path_settings import PathSettings
from ..benchmarks.storage import StorageSizes
from ..benchmarks.storage import run as measure_storage
from ..benchmarks.tree import Sizes
from ..benchmarks.tree import run as measure_tree
from ..errors import LockstepError
from .cli.environment import LOOPBACK
from .cli.options import ReportFile, check_not_a_path, command_line
from .cli.report_files import write_report
from .replay.bench_tables import (
    print_agreement,
    print_handoff,
    print_path,
    print_storage,
    print_tree,
)
from .store.store_opening import for_a_tool

Found = TypeVar("Found", bound=Mapping[str, object])

bench = command_line("bench")
_ALL_SIZES: Final = Sizes()
_AGREEMENT: Final = AgreementSettings()


@bench.command
def tree(*, sizes: Sizes = _ALL_SIZES, report: ReportFile = None) -> None:
    """Compare the tree's match, insert, lock and evict with memcmp."""
    _measure(lambda say: measure_tree(sizes, say), print_tree, report)


@bench.command
def storage(*, sizes: StorageSizes, report: ReportFile = None) -> None:
    """Compare a store's bandwidth to plain preadv and pwrite."""
    check_not_a_path(sizes.store)
    sizes = replace(sizes, store=for_a_tool(sizes.store))
    _measure(lambda say: measure_storage(sizes, say), print_storage, report)


@bench.command
def path(*, settings: PathSettings, report: ReportFile = None) -> None:
    """Compare loads from storage to the device with plain reads."""
    from ..benchmarks.path.report import run

    _require_ranks()
    check_not_a_path(settings.store)
    settings = replace(settings, store=for_a_tool(settings.store))
    _measure(lambda say: run(settings, say), print_path, report)


@bench.command
def agreement(*, settings: AgreementSettings = _AGREEMENT, report: ReportFile = None) -> None:
    """Compare the time of a step's round to plain all_reduces."""
    from ..benchmarks.agreement import run

    _require_ranks()
    _measure(lambda say: run(settings, say), print_agreement, report)


@bench.command
def handoff(*, settings: HandoffSettings, report: ReportFile = None) -> None:
    """Measure a handoff of pages between the hosts of two groups."""
    from ..benchmarks.handoff.report import run

    _require_ranks()
    _measure(lambda say: run(settings, say), print_handoff, report)


def _require_ranks() -> None:
    """Raise `LockstepError` if ranks cannot connect to each other on this machine."""
    from .cli.rank_processes import why_ranks_cannot_start

    if problem := why_ranks_cannot_start(LOOPBACK):
        raise LockstepError(problem)


def _measure(
    run: Callable[[Callable[[str], None]], Found],
    show: Callable[[Found], None],
    report: Path | None,
) -> None:
    """Run a benchmark, show its progress on stderr, print the result, and write the report."""
    with Console(stderr=True).status("measuring") as status:
        found = run(lambda what: status.update(f"measuring: {what}"))
    show(found)
    write_report(report, found)
