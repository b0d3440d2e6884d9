"""`lockstep report`: convert the JSON file of a report to one HTML file."""

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from html import escape
from pathlib import Path
from typing import Annotated, Any, Final, cast

import msgspec
from cyclopts import Parameter

from ...errors import ConfigError
from ...small_engine.profiles import find_profile
from ..cli.amounts import count
from ..cli.report_files import check_that_writable, read_bounded, write_text
from .bench_tables import (
    print_agreement,
    print_handoff,
    print_path,
    print_storage,
    print_tree,
)
from .meanings import meaning_of
from .outcome import rows_of
from .plots import plots_of
from .report import Report, failures_in

_BYTES_MAX: Final = 64 << 20
_BENCHMARKS: Final[Sequence[tuple[str, str, Callable[[Any], None]]]] = (
    ("agreement", "exchange_alone_us", print_agreement),
    ("storage", "exists_us_per_key", print_storage),
    ("handoff", "handoff_gbps", print_handoff),
    ("path", "l3_l2_gbps", print_path),
    ("tree", "repetitions", print_tree),
)
"""For each benchmark: its name, a key that identifies its report, and the function that prints the
report."""
_WANTED: Final = "a report that --report of `lockstep replay`, `demo` or `bench` wrote"


_STYLE: Final = """
body { max-width:1200px; margin:2em auto; padding:0 1em; font:15px/1.5 sans-serif }
img { width:100% } table { border-collapse:collapse } pre { overflow-x:auto }
th,td { text-align:left; vertical-align:top; padding:3px 12px 3px 0 } td.label { white-space:pre }
tr.end td { border-bottom:1px solid } .fault { color:#b00 }
"""


def report(
    run: Annotated[Path, Parameter(help="A report that --report of replay, demo or bench wrote.")],
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(
            alias="-o",
            help="Write the page here.",
            show_default="RUN.html next to the report",
            metavar="FILE.html",
        ),
    ] = None,
) -> None:
    """Show a report as one page of plots and tables.

    The page is a single HTML file that needs no network.
    """
    target = output or run.with_suffix(".html")
    if target == run:
        raise ConfigError(f"{target} is the report itself; give another file with --output")
    write_page(run, target)
    print(f"wrote {target}")


def write_page(run: Path, target: Path) -> None:
    """Write the HTML file for the report in `run`. Raises `ConfigError` if a file operation fails."""
    check_that_writable(target)
    write_text(target, page_of(run))


def page_of(path: Path) -> str:
    """Return the HTML page of the report in a file.

    Raises `ConfigError` if the file cannot be read, or is not a report.
    """
    text = read_bounded(path, _BYTES_MAX)
    try:
        record = msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not {_WANTED}: {error}") from error
    try:
        shown = _shown(record)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"{path} is incomplete or from another version of Lockstep: {type(error).__name__} {error}"
        ) from error
    if shown is None:
        raise ConfigError(f"{path} is not {_WANTED}")
    return shown


def _shown(record: dict[str, Any]) -> str | None:
    """Return the HTML for a report of any known kind; None if the kind is unknown."""
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
    parts = [part for name, each in whole.items() for part in _section(name, each)]
    titles = [name or count(each["ranks"], "rank") for name, each in whole.items()]
    totals = [
        _row(label, [value for _, value, _ in rows], meaning_of(label), ends_part=ends)
        for rows in zip(*map(rows_of, whole.values()), strict=True)
        for label, _, ends in rows[:1]
    ]
    parts += ["<h2>Totals</h2>", _table(titles, totals)]
    first = next(iter(whole.values()))
    settings = first["settings"]
    profile = find_profile(str(settings["profile"])).scale
    subtitle = (
        f"{settings['trace'] or 'built-in workload'}, {count(first['ranks'], 'rank')}. {profile}"
    )
    shown = _table(["value"], [_row(name, [str(value)]) for name, value in settings.items()])
    parts.append(f"<details><summary>Settings</summary>{shown}</details>")
    return _page(f"lockstep {what}", subtitle, parts)


def _benchmark(name: str, record: dict[str, Any], show: Callable[[Any], None]) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        show(record)
    figures = [
        _row(key, [f"{value:,.4g}" if isinstance(value, float) else str(value)])
        for key, value in record.items()
        if isinstance(value, int | float | str)
    ]
    output = f"<pre>{escape(printed.getvalue().rstrip())}</pre>"
    parts = [output, "<h2>Figures</h2>", _table(["value"], figures)]
    return _page(f"lockstep bench {name}", str(record.get("machine", "")), parts)


def _with_samples(report: Report) -> Report:
    """Return the report; if an older version wrote it without samples, add empty samples."""
    empty: dict[str, object] = {"samples": None, "round_us_counts": []}
    return cast("Report", {**empty, **report})


def _section(title: str, report: Report) -> list[str]:
    """Return pieces of HTML with the faults, the main numbers and the plots of one replay."""
    faults = failures_in(report)
    if report["interrupted"]:
        faults.append("The run was interrupted; the counters are partial.")
    if report["samples"] is None:
        faults.append("The report has no samples, so there are no plots over time.")
    parts = [f"<h2>{escape(title)}</h2>"] if title else []
    parts += [f'<p class="fault">{escape(each)}</p>' for each in faults]
    parts.append(_table([""], [_row(label, [value]) for label, value in _figures(report)]))
    plots = plots_of(report)
    if plots is not None:
        source = f"data:image/svg+xml;base64,{plots.svg_base64}"
        parts.append(f'<img alt="{escape("; ".join(plots.titles))}" src="{source}">')
    return parts


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


def _page(title: str, subtitle: str, parts: Sequence[str]) -> str:
    """Return an HTML document with these parts, which must be HTML already."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">"
        # Include an empty icon, because a browser would otherwise request an icon from the server.
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}</style>'
    )
    body = "\n".join([f"<h1>{escape(title)}</h1>", f"<p>{escape(subtitle)}</p>", *parts])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _table(titles: Sequence[str], rows: Sequence[str]) -> str:
    """Return an HTML table; a row has a label, one value per title, and an explanation."""
    heads = "".join(f"<th>{escape(each)}</th>" for each in titles)
    return f"<table><tr><th></th>{heads}<th></th></tr>{''.join(rows)}</table>"


def _row(label: str, values: Sequence[str], meaning: str = "", *, ends_part: bool = False) -> str:
    cells = "".join(f"<td>{escape(each)}</td>" for each in (*values, meaning))
    ends = ' class="end"' if ends_part else ""
    return f'<tr{ends}><td class="label">{escape(label)}</td>{cells}</tr>'
