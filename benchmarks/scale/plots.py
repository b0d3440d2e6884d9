"""The plots of a report: `python -m lockstep.benchmarks.scale.plots FILE.json DIRECTORY`.

Draws with matplotlib, which is in the extra `dev`, as SVG with text as text. Equal reports give equal
files.
"""

import argparse
import json
from collections.abc import Callable
from math import inf, log10
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter, StrMethodFormatter

from ...coordinator.collective import Transport
from .fit import deployment_of
from .memory import memory
from .model import (
    DOUBLING,
    Costs,
    Network,
    Term,
    Way,
    critical_path,
    exchange_work_us,
    read_us,
    total_us,
)
from .report import (
    LATENCIES_US,
    RANKS_PER_HOST,
    SEATS,
    doubling_step_us,
    group_of,
    step_us,
    transport_of,
)

Report = dict[str, Any]
"""What `benchmarks.scale` has written, as JSON gives it."""

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#f0e442")
"""Told apart by colour-blind readers, too (Okabe and Ito)."""

SIZE_INCHES = (7.2, 4.4)

PARTS_SEATS = 256
"""The seats of the groups whose steps are shown by parts."""

PARTS = {
    "ballot, verdict, apply": ("fill the ballot", "read the verdict", "apply it"),
    "cells": (
        *("write the cell", "wake up", "read the ranks' cells", "fold the ranks"),
        *("write the result", "wake up again", "read the result"),
    ),
    "the courier's turns": ("the courier's turns",),
    "entering gloo": ("enter gloo",),
    "gloo's steps": ("gloo's steps",),
    "bytes, fold of the hosts": ("gloo's bytes", "fold the hosts"),
}
"""The terms of the model, gathered into what can be told apart in a bar."""

Label = tuple[float, str, str]
"""The height at which a line ends, its name, and its colour."""


def draw(report: Report, folder: Path, suffix: str = "svg") -> list[Path]:
    """Draw every plot of a report into a folder, and return the files."""
    mpl.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "lockstep",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#dddddd",
            "grid.linewidth": 0.6,
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    plots: dict[str, Callable[[Axes, Report], None]] = {
        "agreement-step": _step,
        "agreement-parts": _parts,
        "agreement-cells": _cells,
        "agreement-processes": _processes,
        "agreement-memory": _memory,
    }
    for name, plot in plots.items():
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        plot(figure.subplots(), report)
        file = folder / f"{name}.{suffix}"
        figure.savefig(file, metadata={"Date": None} if suffix == "svg" else None, dpi=120)
        files.append(file)
    return files


def _costs(report: Report, how: str) -> Costs:
    return Costs(**report["fit"][how])


def _way(name: str) -> Way:
    return DOUBLING if name == DOUBLING else Transport(name)


def _step(axes: Axes, report: Report) -> None:
    """A blocking step by ranks, for several vectors, with what lies between hosts as a band."""
    costs = _costs(report, "cold")

    def steps_ms(seats: int, latency_us: float) -> list[float]:
        return [step_us(group_of(ranks, seats), costs, latency_us) / 1e3 for ranks in RANKS]

    least, usual, most = LATENCIES_US
    labels: list[Label] = []
    for colour, seats in zip(COLOURS, SEATS, strict=False):
        axes.fill_between(
            RANKS, steps_ms(seats, least), steps_ms(seats, most), color=colour, alpha=0.12, lw=0
        )
        line = steps_ms(seats, usual)
        axes.plot(RANKS, line, color=colour, marker="o", markersize=3)
        labels.append((line[-1], f"{seats:,} seats", colour))
    for colour, seats in ((COLOURS[0], SEATS[0]), (COLOURS[3], SEATS[-1])):
        doubled = [doubling_step_us(group_of(ranks, seats), costs) / 1e3 for ranks in RANKS[1:]]
        axes.plot(RANKS[1:], doubled, color=colour, ls=":", lw=1.5)
        labels.append((doubled[-1], f"{seats:,}, doubling", colour))
    _logarithmic(axes, RANKS)
    _label(axes, RANKS[-1], labels)
    axes.set_xlabel(f"ranks, {RANKS_PER_HOST} on a host")
    axes.set_ylabel("a blocking step, ms")
    axes.set_title(
        f"Predicted: line {usual:g} us between hosts, band {least:g} to {most:g} us,"
        " dotted without the ring",
        fontsize=9,
        loc="left",
    )


def _parts(axes: Axes, report: Report) -> None:
    """Draw what the parts of a step take, by the number of hosts."""
    costs = _costs(report, "cold")
    rows: list[tuple[int, tuple[Term, ...]]] = []
    for ranks in (8, 16, 64, 256, 1024):
        group = group_of(ranks, PARTS_SEATS)
        rows.append((group.hosts, critical_path(group, transport_of(group), costs, Network())))
    shares = {name: [_share(parts, terms) for _, terms in rows] for name, parts in PARTS.items()}
    left = [0.0] * len(rows)
    for colour, (name, each) in zip(COLOURS, shares.items(), strict=False):
        axes.barh(range(len(rows)), each, left=left, color=colour, height=0.6, label=name)
        for at, share in enumerate(each):
            if share > 0.05:
                axes.text(left[at] + share / 2, at, f"{share:.0%}", ha="center", va="center")
        left = [before + share for before, share in zip(left, each, strict=True)]
    axes.set_yticks(
        range(len(rows)),
        [
            f"{hosts} {'host' if hosts == 1 else 'hosts'}\n{total_us(terms) / 1e3:,.2f} ms"
            for hosts, terms in rows
        ],
    )
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axes.grid(visible=False)
    axes.set_xlabel(
        f"share of a blocking step; {RANKS_PER_HOST} ranks a host, {PARTS_SEATS:,} seats, predicted"
    )
    axes.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=3, frameon=False)


def _share(parts: tuple[str, ...], terms: tuple[Term, ...]) -> float:
    return sum(term.us for term in terms if term.name in parts) / total_us(terms)


def _cells(axes: Axes, report: Report) -> None:
    """Reading the cells of many ranks: what was measured, and the line that was fitted."""
    ranks = sorted({each["rows"] for each in report["steps"]["cold"]["read"]})
    lanes = sorted({each["lanes"] for each in report["steps"]["cold"]["read"]})
    labels: list[Label] = []
    for colour, length in zip(COLOURS, lanes, strict=False):
        for how, marker, style in (("warm", "o", "--"), ("cold", "s", "-")):
            samples = [each for each in report["steps"][how]["read"] if each["lanes"] == length]
            axes.plot(
                [each["rows"] for each in samples],
                [each["us"] for each in samples],
                ls="",
                marker=marker,
                markersize=4,
                color=colour,
                fillstyle="none" if how == "warm" else "full",
            )
            fitted = [read_us(rows, length, _costs(report, how)) for rows in ranks]
            axes.plot(ranks, fitted, color=colour, ls=style, lw=1)
            if how == "cold":
                labels.append((fitted[-1], f"{length:,} lanes", colour))
    _logarithmic(axes, ranks)
    _label(axes, ranks[-1], labels)
    axes.set_xlabel("ranks whose cells are read")
    axes.set_ylabel("read and check, us")
    axes.set_title(
        "Lines: model. Squares: measured, caches filled by something else; circles: in a loop",
        fontsize=9,
        loc="left",
    )


def _processes(axes: Axes, report: Report) -> None:
    """Draw what all processors do for a round of several processes: predicted and measured."""
    lanes = 120
    kinds = (
        ("shm", "shm", 1),
        ("hierarchical", "hierarchical, 2 hosts", 2),
        ("torch", "torch", 1),
        ("doubling", "doubling", 1),
    )
    labels: list[Label] = []
    for colour, (kind, name, hosts) in zip(COLOURS, kinds, strict=False):
        found = [
            each
            for each in report["comparisons"]
            if each["transport"] == kind
            and each["lanes"] == lanes
            and each["hosts"] == hosts
            and each["cores"] == report["machine"]["cores"]
        ]
        ranks = [each["ranks"] for each in found]
        bands = [
            [
                exchange_work_us(deployment_of(each, hosts, lanes), _way(kind),
                                 _costs(report, how))
                for each in ranks
            ]
            for how in ("warm", "cold")
        ]  # fmt: skip
        axes.fill_between(ranks, bands[0], bands[1], color=colour, alpha=0.25, lw=1)
        axes.plot(ranks, [each["work_us"] for each in found], ls="", marker="o", ms=5, color=colour)
        labels.append((found[-1]["work_us"], name, colour))
    _logarithmic(axes, (1, 2, 4, 8, 16))
    _label(axes, 16, labels)
    axes.set_xlabel("processes on the machine's cores")
    axes.set_ylabel("processor time of all of them for a round, us")
    axes.set_title(
        f"{lanes} lanes. Points: measured. Bands: model, with warm to cold caches",
        fontsize=9,
        loc="left",
    )


def _memory(axes: Axes, report: Report) -> None:
    """Draw what agreement takes on the first rank of a host, by the seats, all of which are taken."""
    costs = _costs(report, "cold")
    groups = [group_of(RANKS[-1], seats) for seats in SEATS]
    taken = [memory(group, transport_of(group), costs) for group in groups]
    parts = {
        "operations of the replica": [each.replica for each in taken],
        "segment of the host": [each.segment for each in taken],
        "ballot": [each.ballot for each in taken],
        "rows that are read": [each.rows for each in taken],
        "vectors": [each.vectors for each in taken],
        "gloo": [each.gloo for each in taken],
    }
    labels: list[Label] = []
    for colour, (name, sizes) in zip(COLOURS, parts.items(), strict=False):
        megabytes = [size / 1e6 for size in sizes]
        axes.plot(SEATS, megabytes, color=colour, marker="o", markersize=3)
        labels.append((megabytes[-1], name, colour))
    _logarithmic(axes, SEATS)
    _label(axes, SEATS[-1], labels)
    axes.set_xlabel("seats, each with a prefetch of 16 pages")
    axes.set_ylabel("MB on the first rank of a host")
    axes.set_title(
        f"{RANKS[-1]:,} ranks on {groups[0].hosts} hosts, predicted", fontsize=9, loc="left"
    )


def _logarithmic(axes: Axes, ticks: tuple[int, ...] | list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    # Room for the labels at the lines' ends.
    first, last = axes.get_xlim()
    axes.set_xlim(first, last * (last / first) ** 0.28)


def _label(axes: Axes, x: float, labels: list[Label]) -> None:
    """Write the labels right of the lines' ends, in their order and so far apart as to be read."""
    lowest, highest = (log10(limit) for limit in axes.get_ylim())
    apart, before = 0.05 * (highest - lowest), -inf
    for y, text, colour in sorted(labels):
        at = max(log10(y), before + apart)
        before = at
        axes.annotate(
            text,
            (x, 10.0**at),
            xytext=(8, 0),
            textcoords="offset points",
            color=colour,
            va="center",
        )


def main() -> None:
    """Draw the plots of a report."""
    parser = argparse.ArgumentParser(prog="python -m lockstep.benchmarks.scale.plots")
    parser.add_argument("report", type=Path, help="what lockstep.benchmarks.scale has written")
    parser.add_argument("folder", type=Path, help="where the plots go")
    parser.add_argument("--format", default="svg", choices=("svg", "png"))
    arguments = parser.parse_args()
    report: Report = json.loads(arguments.report.read_text(encoding="utf-8"))
    for file in draw(report, arguments.folder, arguments.format):
        print(file)


if __name__ == "__main__":
    main()
