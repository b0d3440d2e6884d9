"""`lockstep plan`: print the hits per cache size, or the least size with a given hit ratio."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from ..cli.amounts import count
from ..cli.options import ReportFile, command_line
from ..cli.progress import Progress, progress_bar
from ..cli.replay_settings import Trace
from ..cli.report_files import write_report
from .evaluation import Evaluation
from .goal import Goal, reach
from .plan_settings import PlanPoint, PlanSettings, Size, Sweep
from .workers import Workers

EXIT_NOT_TO_BE_HAD: Final = 1
_BAR: Final = 40
_POLICY: Final = 8
_LEGEND: Final = (
    f"{'':{_POLICY}} # hit, + hit by the best cache of this size, . hit by an unbounded cache"
)


plan = command_line(
    "plan",
    help_epilogue="Exit status: 0, evaluated; 1, no size reaches the --goal; 2, wrong input.",
)
_USUAL: Final = PlanSettings()
_USUAL_SWEEP: Final = Sweep()


@plan.default
def _plan(
    trace: Trace = None,
    /,
    *,
    settings: PlanSettings = _USUAL,
    sweep: Sweep = _USUAL_SWEEP,
    report: ReportFile = None,
) -> int:
    """Evaluate the cache sizes, or search for the least one; report, and return the exit status."""
    settings, sizes, goal = replace(settings, trace=trace), sweep.sizes(), sweep.goal
    evaluation = Evaluation(settings)
    console = Console(highlight=False, emoji=False)
    for size in sizes:
        evaluation.require(size)
    _print_inputs(evaluation, settings, console)
    found: dict[str, object] = {"settings": asdict(settings)}
    found |= {"requests": len(evaluation.requests), "tokens": evaluation.tokens}
    status = 0
    with Workers(settings, evaluation, len(sizes) if goal is None else 64) as workers:
        if goal is None:
            points = _sweep(workers, sizes)
            print_points(points, console)
        else:
            with Console(stderr=True).status("searching") as spinner:
                answer = reach(goal, sizes[0], evaluation, workers, spinner.update)
            points = [] if answer["point"] is None else [answer["point"]]
            print_goal(answer, console)
            found["goal"] = answer
            status = 0 if points else EXIT_NOT_TO_BE_HAD
    found["points"] = points
    write_report(report, found)
    return status


def _sweep(workers: Workers, sizes: Sequence[Size]) -> list[PlanPoint]:
    points: list[PlanPoint] = []
    with progress_bar(shown=sys.stderr.isatty()) as on_done:
        for point in workers.evaluate(sizes):
            points.append(point)
            on_done(Progress(len(points), len(sizes)))
    return points


def _print_inputs(evaluation: Evaluation, settings: PlanSettings, console: Console) -> None:
    ranks = count(settings.tp, "rank")
    console.print(
        f"{count(len(evaluation.requests), 'request')}, {evaluation.tokens:,} tokens of prompts;"
        f" {evaluation.model.profile.model} in {settings.dtype} on {ranks}.\n"
        "GiB of device and host are per rank; of the store, down and up, totals of all ranks.",
        soft_wrap=True,
    )


def print_points(points: Sequence[PlanPoint], console: Console) -> None:
    """Print a table with a row per cache size, and in each row a bar of its hits and the ideal hits."""
    table = Table(header_style="bold", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("device", "host", "store", "page"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    for title in ("hits", "Belady", "ideal", "saved", "down", "up"):
        table.add_column(title, justify="right", no_wrap=True)
    bars: list[str] = []
    for each in points:
        storage, moved = each["storage_gib"], each["moved_gib"]
        shares = (each["hit_ratio"], each["belady_ratio"], each["ideal_ratio"])
        table.add_row(
            f"{each['device_gib']:g}",
            f"{each['host_gib']:,.4g}",
            "inf" if storage is None else f"{storage:,.4g}",
            str(each["page_tokens"]),
            each["policy"],
            *(f"{share:.1%}" for share in (*shares, each["compute_saved"])),
            f"{moved['l1_to_l2'] + moved['l2_to_l3']:,.0f}",
            f"{moved['l2_to_l1'] + moved['l3_to_l2']:,.0f}",
        )
        bars.append(f"{each['policy']:<{_POLICY}} {_bar(*shares)} {_sizes_of(each)}")
    console.print(table)
    console.print("\n".join([_LEGEND, *bars]), soft_wrap=True)
    too_long = max((each["too_long"] for each in points), default=0)
    if too_long:
        console.print(
            f"With the smallest device {count(too_long, 'request')} did not fit; they count as"
            " computed, and none of their pages were kept.",
            soft_wrap=True,
        )


def _sizes_of(point: PlanPoint) -> str:
    tiers = (("", point["device_gib"]), ("+", point["host_gib"]), ("+", point["storage_gib"]))
    given = " ".join(
        f"{sign}{'inf' if gib is None else f'{gib:,.4g}'}" for sign, gib in tiers if gib != 0
    )
    return f"{given} GiB, pages of {point['page_tokens']}"


def _bar(hit: float, best: float, ideal: float) -> str:
    """Return a bar of fixed length, which stands for the ideal hits.

    The bar has `#` for hits, `+` for further hits with optimal eviction, and `.` for the remaining
    ideal hits.
    """
    whole = ideal or 1.0
    hits, bests = (round(_BAR * share / whole) for share in (hit, best))
    return "#" * hits + "+" * (bests - hits) + "." * (_BAR - max(hits, bests))


def print_goal(goal: Goal, console: Console) -> None:
    """Print the least host memory for the wanted hit ratio, or that no size reaches the ratio."""
    point = goal["point"]
    if point is None:
        why = (
            "no cache hits more"
            if goal["ideal_ratio"] < goal["wanted"]
            else "this device and policy do not reach it even with host memory for the whole trace"
        )
        console.print(
            f"{goal['wanted']:.1%} cannot be reached: an unbounded cache hits"
            f" {goal['ideal_ratio']:.1%}, and {why}.",
            soft_wrap=True,
        )
        return
    print_points([point], console)
    console.print(
        f"To hit {goal['wanted']:.1%} of all prompt tokens, each rank needs {point['host_gib']:,.4g}"
        f" GiB of host memory\nnext to {point['device_gib']:g} GiB on its device (to within"
        f" {goal['within_gib']:.2g} GiB).",
        soft_wrap=True,
    )
