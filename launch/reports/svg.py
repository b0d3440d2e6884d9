"""Plots as SVG: lines, stacked bars and a histogram, on axes of their own, without any library.

A plot is drawn here and needs no script. What a pointer over it shows is beside it as data, which
the page's one script reads.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil, floor, log10
from typing import Final

WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 34
_TICKS: Final = 5

Format = Callable[[float], str]
"""Makes a text of a number."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or the bars of one colour. None is where there is no value."""

    name: str
    colour: str
    """The name of one of the page's colours."""
    values: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of numbers on a length of the plot, from `start` to `end` in its units."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Return where a number is."""
        low, high, at = self.low, self.high, value
        if self.logarithmic:
            low, high, at = log10(low), log10(high), log10(max(value, self.low))
        share = (at - low) / (high - low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round numbers within the range."""
        if self.logarithmic:
            exponents = range(ceil(log10(self.low)), floor(log10(self.high)) + 1)
            return [10.0**each for each in exponents]
        step = round_step((self.high - self.low) / _TICKS)
        first = ceil(self.low / step)
        return [each * step for each in range(first, floor(self.high / step + 1e-9) + 1)]


def round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** floor(log10(least))
    return next(each * power for each in (1, 2, 5, 10) if each * power >= least * (1 - 1e-9))


def _across(low: float, high: float) -> Axis:
    return Axis(low, high if high > low else low + 1, _LEFT, WIDTH - _RIGHT)


def _upwards(series: Sequence[Series], *, high: float | None, logarithmic: bool = False) -> Axis:
    values = [value for each in series for value in each.values if value is not None]
    most = high if high is not None else max(values, default=0.0)
    if logarithmic:
        least = min((value for value in values if value > 0), default=1.0)
        low = 10.0 ** floor(log10(least))
        top = 10.0 ** ceil(log10(max(most, low * 10)))
        return Axis(low, top, HEIGHT - _BOTTOM, _TOP, logarithmic=True)
    return Axis(0.0, most * (1.0 if high is not None else 1.06) or 1.0, HEIGHT - _BOTTOM, _TOP)


def lines(
    x: Sequence[float],
    series: Sequence[Series],
    *,
    x_text: Format,
    y_text: Format,
    high: float | None = None,
    logarithmic: bool = False,
) -> str:
    """Return a plot of lines over `x`. `high` is the end of the upward axis, where it is known."""
    across = _across(x[0], x[-1])
    upwards = _upwards(series, high=high, logarithmic=logarithmic)
    marks: list[str] = []
    for each in series:
        points = [
            f"{across.place(at):.1f},{upwards.place(value):.1f}"
            for at, value in zip(x, each.values, strict=True)
            if value is not None and (value > 0 or not logarithmic)
        ]
        marks.append(f'<polyline class="line {each.colour}" points="{" ".join(points)}"/>')
    ground = _Ground(across, upwards, x_text, y_text)
    return ground.drawn(marks, [across.place(at) for at in x], [x_text(at) for at in x], series)


def stacked(
    edges: Sequence[float], series: Sequence[Series], *, x_text: Format, y_text: Format
) -> str:
    """Return a plot of bars between `edges`, in which one series stands on the other."""
    return _bars(_across(edges[0], edges[-1]), edges, series, x_text=x_text, y_text=y_text)


def histogram(edges: Sequence[float], counts: Series, *, x_text: Format, y_text: Format) -> str:
    """Return a plot of counts between `edges`, which grow by a factor."""
    across = Axis(edges[0], edges[-1], _LEFT, WIDTH - _RIGHT, logarithmic=True)
    return _bars(across, edges, [counts], x_text=x_text, y_text=y_text)


def _bars(
    across: Axis,
    edges: Sequence[float],
    series: Sequence[Series],
    *,
    x_text: Format,
    y_text: Format,
) -> str:
    spans = list(pairwise(edges))
    heights = list(zip(*([value or 0.0 for value in each.values] for each in series), strict=True))
    upwards = _upwards([Series("", "", [sum(each) for each in heights])], high=None)
    marks: list[str] = []
    for (left, right), values in zip(spans, heights, strict=True):
        x0, below = across.place(left), 0.0
        width = max(across.place(right) - x0 - 0.8, 0.5)
        for each, value in zip(series, values, strict=True):
            if value:
                y0, y1 = upwards.place(below), upwards.place(below + value)
                place = f'x="{x0:.1f}" y="{y1:.1f}" width="{width:.1f}" height="{y0 - y1:.1f}"'
                marks.append(f'<rect class="bar {each.colour}" {place}/>')
                below += value
    places = [(across.place(left) + across.place(right)) / 2 for left, right in spans]
    titles = [f"{x_text(left)} to {x_text(right)}" for left, right in spans]
    return _Ground(across, upwards, x_text, y_text).drawn(marks, places, titles, series)


@dataclass(frozen=True, slots=True)
class _Ground:
    """What every plot stands on: two axes, and how their numbers are written."""

    across: Axis
    upwards: Axis
    x_text: Format
    y_text: Format

    def drawn(
        self,
        marks: Sequence[str],
        places: Sequence[float],
        titles: Sequence[str],
        series: Sequence[Series],
    ) -> str:
        """Return the plot with its marks. Places and titles are where a pointer finds its values."""
        foot, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
        parts: list[str] = []
        for value in self.upwards.ticks():
            at, text = self.upwards.place(value), escape(self.y_text(value))
            parts.append(_line("grid", _LEFT, at, right, at))
            parts.append(f'<text class="y" x="{_LEFT - 8}" y="{at + 4:.1f}">{text}</text>')
        for value in self.across.ticks():
            at, text = self.across.place(value), escape(self.x_text(value))
            parts.append(_line("tick", at, foot, at, foot + 4))
            parts.append(f'<text class="x" x="{at:.1f}" y="{foot + 18}">{text}</text>')
        parts += [
            _line("axis", _LEFT, foot, right, foot),
            *marks,
            _line("cursor", 0, _TOP, 0, foot),
        ]
        data = {
            "x": [round(each, 1) for each in places],
            "title": list(titles),
            "series": [
                [each.name, each.colour, ["" if v is None else self.y_text(v) for v in each.values]]
                for each in series
            ],
        }
        told = escape(json.dumps(data, separators=(",", ":")))
        head = f'class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" data-points="{told}"'
        return f"<svg {head}>{''.join(parts)}</svg>"


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
