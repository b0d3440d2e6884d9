"""From a report's JSON to one page of HTML, which needs nothing but itself."""

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from ...errors import ConfigError
from ...small_engine.profiles import find_profile
from ..cli.amounts import count
from .bench_tables import (
    print_agreement,
    print_handoff,
    print_path,
    print_storage,
    print_tree,
)
from .meanings import meaning_of
from .outcome import rows_of
from .plots import Plots, plots_of
from .report import Report, faults_of

_BYTES_MAX: Final = 64 << 20
_BENCHMARKS: Final[Sequence[tuple[str, str, Callable[[Any], None]]]] = (
    ("agreement", "exchange_alone_us", print_agreement),
    ("storage", "exists_us_per_key", print_storage),
    ("handoff", "handoff_gbps", print_handoff),
    ("path", "l3_l2_gbps", print_path),
    ("tree", "repetitions", print_tree),
)
"""The benchmarks, each with a key that no other has in its report, and what prints it."""
_WANTED: Final = "a report of `lockstep replay`, `demo` or `bench`, as --report writes it"


_STYLE: Final = """
body { max-width:1200px; margin:2em auto; padding:0 1em; font:15px/1.5 sans-serif }
img { width:100% } table { border-collapse:collapse } pre { overflow-x:auto }
th,td { text-align:left; vertical-align:top; padding:3px 12px 3px 0 } td.label { white-space:pre }
tr.end td { border-bottom:1px solid } .fault { color:#b00 }
"""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: its label, a value for each column, what it means, and whether a part ends."""

    label: str
    values: Sequence[str]
    meaning: str = ""
    ends_part: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under the titles of their columns."""

    columns: Sequence[str]
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: what matters most, plots, a table, and text as it was printed."""

    title: str
    figures: Sequence[tuple[str, str]] = ()
    """Labels and values."""
    faults: Sequence[str] = ()
    plots: Plots | None = None
    table: Table | None = None
    printed: str = ""


def page_of(path: Path) -> str:
    """Return the page that shows the report in a file.

    Raises `ConfigError` for a file that cannot be read, or that is not such a report.
    """
    try:
        if path.stat().st_size > _BYTES_MAX:
            raise ConfigError(
                f"{path} is larger than {_BYTES_MAX >> 20} MiB, so it is not {_WANTED}"
            )
        record = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not {_WANTED}: {error}") from error
    try:
        shown = _shown(record)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{path} is not whole, or of another version of Lockstep: {type(error).__name__} {error}"
        ) from error
    if shown is None:
        raise ConfigError(f"{path} is not {_WANTED}")
    return shown


def _shown(record: dict[str, Any]) -> str | None:
    """Return the page of a record by its kind; None for one of no kind that is known."""
    if {"cold", "warm"} <= record.keys():
        return _replays({name: cast("Report", record[name]) for name in ("cold", "warm")}, "demo")
    if {"round_us", "hit_tokens", "digests"} <= record.keys():
        return _replays({"": cast("Report", record)}, "replay")
    for name, key, show in _BENCHMARKS:
        if key in record:
            return _benchmark(name, record, show)
    return None


def _replays(reports: Mapping[str, Report], what: str) -> str:
    whole = {name: _with_samples(each) for name, each in reports.items()}
    sections = [_section(name, each) for name, each in whole.items()]
    titles = [name or count(each["ranks"], "rank") for name, each in whole.items()]
    table = _table(titles, [rows_of(each) for each in whole.values()])
    first = next(iter(whole.values()))
    settings = first["settings"]
    profile = find_profile(str(settings["profile"])).scale
    subtitle = (
        f"{settings['trace'] or 'built-in workload'}, {count(first['ranks'], 'rank')}. {profile}"
    )
    return _page(
        f"lockstep {what}", subtitle, [*sections, Section("Totals", table=table)], settings
    )


def _benchmark(name: str, record: dict[str, Any], show: Callable[[Any], None]) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        show(record)
    figures = [
        Row(key, [f"{value:,.4g}" if isinstance(value, float) else str(value)])
        for key, value in record.items()
        if isinstance(value, int | float | str)
    ]
    table = Table(["value"], figures)
    sections = [Section("", printed=printed.getvalue().rstrip()), Section("Figures", table=table)]
    return _page(f"lockstep bench {name}", str(record.get("machine", "")), sections, {})


def _with_samples(report: Report) -> Report:
    """Return a report of any version: one without samples is shown without their plots."""
    empty: dict[str, object] = {"samples": None, "round_us_counts": []}
    return cast("Report", {**empty, **report})


def _section(title: str, report: Report) -> Section:
    faults = faults_of(report)
    if report["interrupted"]:
        faults.append("The run was interrupted: this is what was counted so far.")
    if report["samples"] is None:
        faults.append("There are no samples in this report, so nothing is drawn over time.")
    return Section(title, figures=_figures(report), faults=faults, plots=plots_of(report))


def _figures(report: Report) -> list[tuple[str, str]]:
    prompt = report["prompt_tokens"]
    hits = sum(cast("Mapping[str, int]", report["hit_tokens"]).values())
    return [
        ("prompt tokens that were cached", f"{100 * hits / prompt:.1f} %" if prompt else "-"),
        ("prompt tokens", f"{prompt:,}"),
        ("requests served", f"{report['requests']:,}"),
        ("wall time", f"{report['wall_s']:,.1f} s"),
        ("time in Cache.step p50", f"{report['round_us']['p50']:,.0f} us"),
        ("time in Cache.step p99", f"{report['round_us']['p99']:,.0f} us"),
        ("pages corrupt", f"{report['pages_corrupt']:,}"),
    ]


def _table(
    titles: Sequence[str],
    columns: Sequence[Sequence[tuple[str, str, bool]]],
) -> Table:
    rows = [
        Row(label, [row[1] for row in rows], meaning_of(label), ends)
        for rows in zip(*columns, strict=True)
        for label, _, ends in rows[:1]
    ]
    return Table(titles, rows)


def _page(
    title: str, subtitle: str, sections: Sequence[Section], settings: Mapping[str, object]
) -> str:
    """Return the page."""
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(subtitle)}</p>"]
    for section in sections:
        parts += _html_of(section)
    if settings:
        rows = [Row(name, [str(value)]) for name, value in settings.items()]
        table = _html_table(Table(["value"], rows))
        parts.append(f"<details><summary>Settings</summary>{table}</details>")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">"
        # Without an icon of its own a page asks its server for one.
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}</style>'
    )
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _html_of(section: Section) -> list[str]:
    parts = [f"<h2>{escape(section.title)}</h2>"] if section.title else []
    parts += [f'<p class="fault">{escape(each)}</p>' for each in section.faults]
    if section.figures:
        rows = [Row(label, [value]) for label, value in section.figures]
        parts.append(_html_table(Table([""], rows)))
    if section.plots is not None:
        titles = escape("; ".join(section.plots.titles))
        source = f"data:image/svg+xml;base64,{section.plots.svg_base64}"
        parts.append(f'<img alt="{titles}" src="{source}">')
    if section.table is not None:
        parts.append(_html_table(section.table))
    if section.printed:
        parts.append(f"<pre>{escape(section.printed)}</pre>")
    return parts


def _html_table(table: Table) -> str:
    titles = "".join(f"<th>{escape(each)}</th>" for each in table.columns)
    rows: list[str] = []
    for row in table.rows:
        values = "".join(f"<td>{escape(each)}</td>" for each in row.values)
        ends = ' class="end"' if row.ends_part else ""
        label, meaning = escape(row.label), escape(row.meaning)
        rows.append(f'<tr{ends}><td class="label">{label}</td>{values}<td>{meaning}</td></tr>')
    return f"<table><tr><th></th>{titles}<th></th></tr>{''.join(rows)}</table>"
