"""The plots of one report: what they show, and what is to be seen in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from ..report import Report
from .samples import Samples
from .svg import Format, Series, histogram, lines, stacked

BINS: Final = 48
_HISTOGRAM_BINS: Final = 40
_Counted = Literal[
    "prompt_tokens",
    "hit_device_tokens",
    "hit_host_tokens",
    "hit_storage_tokens",
    "rounds",
    "l1_to_l2_bytes",
    "l2_to_l1_bytes",
    "l2_to_l3_bytes",
    "l3_to_l2_bytes",
]
_HITS: Final[Sequence[_Counted]] = (
    "hit_device_tokens",
    "hit_host_tokens",
    "hit_storage_tokens",
)


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot of a page."""

    title: str
    note: str
    """What is to be seen, in one sentence."""
    svg: str
    legend: Sequence[Series]


def plots_of(report: Report) -> list[Plot]:
    """Return the plots of a report; none where there is nothing to draw."""
    plots: list[Plot] = []
    samples = report["samples"]
    if samples is not None and samples["seconds"][-1] > 0:
        plots += [
            _hit_rate(samples),
            _tiers(samples),
            _in_system(samples),
            _bytes(samples),
            _rounds(samples),
            _step_times(samples),
        ]
    if report["round_us_counts"]:
        plots.append(_distribution(report))
    return plots


def _hit_rate(samples: Samples) -> Plot:
    edges, seconds = _edges(samples), _seconds_text(samples)
    prompt = _at(samples, "prompt_tokens", edges)
    hits = sum((_at(samples, each, edges) for each in _HITS), np.zeros_like(edges))
    lately = [
        None if not tokens else float(hit / tokens)
        for hit, tokens in zip(np.diff(hits), np.diff(prompt), strict=True)
    ]
    so_far = [
        None if not tokens else float(hit / tokens)
        for hit, tokens in zip(hits, prompt, strict=True)
    ]
    series = [
        Series("at the time", "device", [None, *lately]),
        Series("so far", "host", so_far),
    ]
    svg = lines(list(edges), series, x_text=seconds, y_text=_percent, high=1.0)
    note = "Which share of the prompt tokens of the requests that ended was cached on every rank."
    return Plot("Hit rate", note, svg, series)


def _tiers(samples: Samples) -> Plot:
    edges, seconds = _edges(samples), _seconds_text(samples)
    hits = [_rate(samples, each, edges) for each in _HITS]
    computed = _rate(samples, "prompt_tokens", edges) - sum(hits, np.zeros(len(edges) - 1))
    series = [
        Series("device (L1)", "device", hits[0].tolist()),
        Series("host memory (L2)", "host", hits[1].tolist()),
        Series("storage (L3)", "storage", hits[2].tolist()),
        Series("computed", "computed", computed.tolist()),
    ]
    svg = stacked(list(edges), series, x_text=seconds, y_text=_per_second)
    note = "Prompt tokens for each second, by where they came from."
    return Plot("Tokens by tier", note, svg, series)


def _in_system(samples: Samples) -> Plot:
    series = [
        Series("requests in the system", "device", samples["requests_in_system"]),
        Series("operations in flight", "storage", samples["operations_in_flight"]),
    ]
    svg = lines(samples["seconds"], series, x_text=_seconds_text(samples), y_text=_short)
    note = (
        "Requests that had entered and not left; prefetches, loads, backups and writes under way."
    )
    return Plot("In flight", note, svg, series)


def _bytes(samples: Samples) -> Plot:
    edges, seconds = _edges(samples), _seconds_text(samples)
    ways: Sequence[tuple[str, str, _Counted]] = (
        ("device to host", "device", "l1_to_l2_bytes"),
        ("host to device", "host", "l2_to_l1_bytes"),
        ("host to storage", "storage", "l2_to_l3_bytes"),
        ("storage to host", "fourth", "l3_to_l2_bytes"),
    )
    series = [
        Series(name, colour, [None, *_rate(samples, column, edges).tolist()])
        for name, colour, column in ways
    ]
    svg = lines(list(edges), series, x_text=seconds, y_text=_bytes_per_second)
    return Plot("Bytes moved", "By rank 0, for each second, by way.", svg, series)


def _rounds(samples: Samples) -> Plot:
    edges, seconds = _edges(samples), _seconds_text(samples)
    series = [Series("rounds a second", "host", [None, *_rate(samples, "rounds", edges).tolist()])]
    svg = lines(list(edges), series, x_text=seconds, y_text=_per_second)
    note = "One for each step of the engine: few where a step computes much."
    return Plot("Rounds", note, svg, series)


def _step_times(samples: Samples) -> Plot:
    series = [
        Series("p50", "host", samples["round_us_p50"]),
        Series("p99", "storage", samples["round_us_p99"]),
    ]
    svg = lines(
        samples["seconds"],
        series,
        x_text=_seconds_text(samples),
        y_text=microseconds,
        logarithmic=True,
    )
    note = "How long a step kept rank 0's engine: the vote, the wait for others, and what follows."
    return Plot("Time in Cache.step", note, svg, series)


def _distribution(report: Report) -> Plot:
    counts = report["round_us_counts"]
    low, high = counts[0][0] / 1.1, counts[-1][0]
    bins = max(4, min(_HISTOGRAM_BINS, round(np.log2(high / low) * 4)))
    edges = np.geomspace(low, high, bins + 1)
    # A time stands below its bound, so it is counted with what lies just under that.
    times = np.array([each[0] * 0.96 for each in counts])
    steps, _ = np.histogram(times, bins=edges, weights=[each[1] for each in counts])
    series = Series("steps", "host", steps.tolist())
    svg = histogram(edges.tolist(), series, x_text=microseconds, y_text=_short)
    note = (
        f"Of all ranks; half of the steps took at most {microseconds(report['round_us']['p50'])},"
        f" and 99 of 100 at most {microseconds(report['round_us']['p99'])}."
    )
    return Plot("Time in Cache.step, distribution", note, svg, [series])


def _edges(samples: Samples) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    bins = min(BINS, max(1, len(samples["seconds"]) - 1))
    return np.linspace(0.0, samples["seconds"][-1], bins + 1)


def _at(
    samples: Samples, column: _Counted, edges: "np.ndarray[tuple[int], np.dtype[np.float64]]"
) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Return what was counted by then, as if it had grown evenly between two moments."""
    values = np.interp(edges, samples["seconds"], samples[column])
    return np.asarray(values, dtype=np.float64)


def _rate(
    samples: Samples, column: _Counted, edges: "np.ndarray[tuple[int], np.dtype[np.float64]]"
) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return np.diff(_at(samples, column, edges)) / np.diff(edges)


def _seconds_text(samples: Samples) -> Format:
    last = samples["seconds"][-1]
    if last >= 600:
        return lambda seconds: f"{seconds / 60:,.0f} min"
    digits = 1 if last >= 20 else 2
    return lambda seconds: f"{round(seconds, digits):g} s"


def _percent(share: float) -> str:
    return (
        f"{100 * share:.0f} %" if share in (0, 1) else f"{100 * share:.1f} %".replace(".0 %", " %")
    )


def _short(number: float, unit: str = "") -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def _per_second(number: float) -> str:
    return f"{_short(number)}/s"


def _bytes_per_second(number: float) -> str:
    return _short(number, "B/s")


def microseconds(us: float) -> str:
    """Return a time as a person reads it."""
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.3g} us"
