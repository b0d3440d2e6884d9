"""`lockstep doctor`: run all checks of this machine, and print the findings with remedies."""

import json
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Final

from cyclopts import Parameter
from rich.console import Console

from ...version import VERSION
from ..cli.amounts import LINE_MAX, count, printable, well_formed
from ..cli.options import OF_A_GROUP, Json, check_store, command_line
from .finding import CheckResult, Status, exit_status, well

WIDTH: Final = 92
_STATUS: Final = 8
_NAME: Final = 16

EXIT_STATUSES: Final = (
    "Exit status: 0, no problem, possibly advice; 1, a problem; 2, wrong options."
)


doctor = command_line("doctor", help_epilogue=EXIT_STATUSES)


@doctor.default
def _doctor(
    *,
    store: Annotated[
        str | None,
        Parameter(
            help="A store to test, for example file:///var/kv; test objects are removed again.",
            show_default="none",
            metavar="URI",
        ),
    ] = None,
    ranks: Annotated[
        int, OF_A_GROUP, Parameter(help="Number of ranks that this machine will run.")
    ] = 2,
    as_json: Json = False,
) -> int:
    """Check whether this machine has what a group of ranks needs.

    Each finding says what was found, and what to do. Nothing is changed; test files are removed.
    """
    if store is not None:
        check_store(store, only_read=True)
    with Console(stderr=True).status("checking") as status:
        findings = list(examine(ranks, store, status.update))
    if as_json:
        record = {
            "version": VERSION,
            "status": max(findings, key=_gravity).status,
            "findings": [asdict(each) for each in findings],
        }
        print(json.dumps(well_formed(record), indent=2))
    else:
        print("\n".join(lines_of(findings)))
    return exit_status(findings)


def examine(ranks: int, store: str | None, say: Callable[[str], None]) -> Iterator[CheckResult]:
    """Run all checks and yield their findings; `say` is called with the name of each check."""
    from . import kernel, memory, network, software

    say("versions")
    cuda = software.probe_cuda()
    yield software.judge_python(sys.version_info[:3])
    yield from software.judge_packages(software.probe_packages())
    yield software.judge_cuda(cuda)
    yield kernel.judge_processors(kernel.probe_processors(ranks))
    yield memory.judge_host_memory(memory.probe_host_memory(ranks))
    yield memory.judge_shared(memory.probe_shared())
    yield memory.judge_locked(memory.probe_locked(cuda=bool(cuda.devices)))
    yield memory.judge_huge_pages(memory.probe_huge_pages())
    yield kernel.judge_calls(kernel.probe_calls())
    yield kernel.judge_open_files(kernel.probe_open_files())
    yield kernel.judge_clocks(kernel.probe_clocks())
    yield network.judge_host_name(network.probe_host_name())
    interface = network.probe_interface()
    yield network.judge_interface(interface)
    say("all_reduce of two processes over gloo")
    yield network.judge_gloo(network.probe_gloo(interface), interface)
    if store is None:
        yield well("store", "not tested; use --store URI to test one")
    else:
        yield from _examine_store(store, say)


def _examine_store(uri: str, say: Callable[[str], None]) -> Iterator[CheckResult]:
    from . import store

    tried = store.of_rank_0(uri)
    direct = store.probe_direct(tried)
    if direct is not None:
        yield store.judge_direct(direct)
        yield from store.judge_room(uri, direct.directory)
    say("the store")
    answers = store.probe_answers(tried)
    yield store.judge_answers(answers)
    # Skip the bandwidth test if the store did not answer, because the test would fail, too.
    speed = None if answers.failure else store.probe_speed(tried, say)
    if speed is not None:
        yield store.judge_speed(speed)


def lines_of(findings: Sequence[CheckResult]) -> list[str]:
    """Return the findings as text lines of at most `WIDTH` characters."""
    lines: list[str] = []
    margin = " " * (_STATUS + _NAME)
    for each in findings:
        head = f"{each.status:<{_STATUS}}{each.name:<{_NAME - 1}} "
        lines += _folded(head, margin, printable(each.seen, LINE_MAX))
        if each.remedy:
            lines += _folded(f"{margin}-> ", f"{margin}   ", printable(each.remedy, LINE_MAX))
    problems = sum(each.status is Status.PROBLEM for each in findings)
    hints = sum(each.status is Status.ADVICE for each in findings)
    pieces = f"{count(problems, 'problem')}, {hints} with advice, of {len(findings)} findings"
    return [*lines, "", pieces]


def _folded(head: str, margin: str, text: str) -> list[str]:
    return textwrap.wrap(f"{head}{text}", WIDTH, subsequent_indent=margin, break_on_hyphens=False)


def _gravity(finding: CheckResult) -> int:
    return list(Status).index(finding.status)
