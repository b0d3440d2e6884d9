"""Plots of a report, drawn with matplotlib (the extra `reports`)."""

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError
from .report import Report
from .samples import Samples

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MISSING: Final = "plots need the package matplotlib: pip install 'lockstep-kv[reports]'"
BINS: Final = 48
_HISTOGRAM_BINS: Final = 40
_COLUMNS: Final = 2
_TIERS: Final[Sequence[tuple[str, str]]] = (
    ("device (L1)", "hit_device_tokens"),
    ("host memory (L2)", "hit_host_tokens"),
    ("storage (L3)", "hit_storage_tokens"),
)
_WAYS: Final[Sequence[tuple[str, str]]] = (
    ("device to host", "l1_to_l2_bytes"),
    ("host to device", "l2_to_l1_bytes"),
    ("host to storage", "l2_to_l3_bytes"),
    ("storage to host", "l3_to_l2_bytes"),
)

_Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Plots:
    """All plots of a replay's report, drawn into one SVG image, with their titles."""

    titles: Sequence[str]
    svg_base64: str


def check_that_drawable() -> None:
    """Raise `ConfigError` if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ConfigError(MISSING)


def plots_of(report: Report) -> Plots | None:
    """Draw the plots of a report; None if there is nothing to draw.

    Raises `ConfigError` without matplotlib.
    """
    plots: list[tuple[str, Callable[[Axes], None]]] = []
    samples = report["samples"]
    if samples is not None and samples["seconds"][-1] > 0:
        plots += [
            ("Hit rate: cached share of the prompt tokens", partial(_hit_rate, samples)),
            ("Prompt tokens by the tier they came from", partial(_tiers, samples)),
            ("In flight", partial(_in_flight, samples)),
            ("Bytes moved by rank 0", partial(_bytes, samples)),
            ("Rounds: one for each step", partial(_rounds, samples)),
            ("Time in Cache.step of rank 0", partial(_step_times, samples)),
        ]
    if report["round_us_counts"]:
        plots.append(("Time in Cache.step, all ranks", partial(_distribution, report)))
    return _drawn(plots) if plots else None


def _drawn(plots: Sequence[tuple[str, "Callable[[Axes], None]"]]) -> Plots:
    check_that_drawable()
    from matplotlib.figure import Figure

    rows = -(-len(plots) // _COLUMNS)
    figure = Figure(figsize=(12, 3.1 * rows), layout="constrained")
    for place, (title, draw) in enumerate(plots, start=1):
        axes = figure.add_subplot(rows, _COLUMNS, place)
        axes.set_title(title, loc="left")
        axes.grid(axis="y", alpha=0.3)
        draw(axes)
        axes.legend(loc="best")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    titles = [title for title, _ in plots]
    return Plots(titles, base64.b64encode(drawn.getvalue()).decode())


def _hit_rate(samples: Samples, axes: "Axes") -> None:
    from matplotlib.ticker import PercentFormatter

    edges = _edges(samples)
    prompt = _at(samples, "prompt_tokens", edges)
    hits = sum((_at(samples, each, edges) for _, each in _TIERS), np.zeros_like(edges))
    for name, at, tokens, cached in (
        ("current", edges[1:], np.diff(prompt), np.diff(hits)),
        ("cumulative", edges, prompt, hits),
    ):
        some = tokens > 0
        axes.plot(at[some], cached[some] / tokens[some], label=name)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _in_units(axes, x="s")


def _tiers(samples: Samples, axes: "Axes") -> None:
    edges = _edges(samples)
    computed = _rate(samples, "prompt_tokens", edges)
    below = np.zeros_like(computed)
    for name, column in _TIERS:
        hits = _rate(samples, column, edges)
        axes.bar(edges[:-1], hits, np.diff(edges), below, align="edge", label=name)
        below += hits
    rest = computed - below
    axes.bar(edges[:-1], rest, np.diff(edges), below, align="edge", label="computed", color="0.75")
    _in_units(axes, x="s", y="/s")


def _in_flight(samples: Samples, axes: "Axes") -> None:
    axes.plot(samples["seconds"], samples["requests_in_system"], label="requests in the system")
    axes.plot(samples["seconds"], samples["operations_in_flight"], label="operations in flight")
    _in_units(axes, x="s", y="")


def _bytes(samples: Samples, axes: "Axes") -> None:
    edges = _edges(samples)
    for name, column in _WAYS:
        axes.plot(edges[1:], _rate(samples, column, edges), label=name)
    _in_units(axes, x="s", y="B/s")


def _rounds(samples: Samples, axes: "Axes") -> None:
    edges = _edges(samples)
    axes.plot(edges[1:], _rate(samples, "rounds", edges), label="rounds per second")
    _in_units(axes, x="s", y="/s")


def _step_times(samples: Samples, axes: "Axes") -> None:
    axes.set_yscale("log")
    for name, times_us in (("p50", samples["round_us_p50"]), ("p99", samples["round_us_p99"])):
        times_s = np.array(times_us) / 1e6
        some = times_s > 0
        axes.plot(np.array(samples["seconds"])[some], times_s[some], label=name)
    _in_units(axes, x="s", y="s")


def _distribution(report: Report, axes: "Axes") -> None:
    counts = report["round_us_counts"]
    low, high = counts[0][0] / 1.1, counts[-1][0]
    bins = max(4, min(_HISTOGRAM_BINS, round(np.log2(high / low) * 4)))
    edges = np.geomspace(low, high, bins + 1)
    # An entry of `counts` has a bucket's upper bound and its number of steps. Use a value slightly
    # below the bound, because a value exactly on an edge of the histogram counts in the next higher
    # bin.
    times = np.array([each[0] * 0.96 for each in counts])
    steps, _ = np.histogram(times, bins=edges, weights=[each[1] for each in counts])
    axes.set_xscale("log")
    axes.bar(edges[:-1] / 1e6, steps, np.diff(edges) / 1e6, align="edge", label="steps")
    _in_units(axes, x="s", y="")


def _in_units(axes: "Axes", *, x: str, y: str | None = None) -> None:
    """Format the axes' numbers with these units; if `y` is empty, the y axis has whole numbers.

    If `y` is None, the format of the y axis is not changed.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.xaxis.set_major_formatter(EngFormatter(x))
    if y is not None:
        axes.yaxis.set_major_formatter(EngFormatter(y))
    if y == "":
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _edges(samples: Samples) -> _Floats:
    bins = min(BINS, max(1, len(samples["seconds"]) - 1))
    return np.linspace(0.0, samples["seconds"][-1], bins + 1)


def _at(samples: Samples, column: str, edges: _Floats) -> _Floats:
    """Return a counter's values at the given times, interpolated linearly between samples."""
    counted = cast("Mapping[str, list[int]]", samples)[column]
    return np.asarray(np.interp(edges, samples["seconds"], counted), dtype=np.float64)


def _rate(samples: Samples, column: str, edges: _Floats) -> _Floats:
    return np.diff(_at(samples, column, edges)) / np.diff(edges)
