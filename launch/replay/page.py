"""One page of HTML that needs nothing but itself: tables, and plots as embedded images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from .plots import Plots

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


def page(
    title: str, subtitle: str, sections: Sequence[Section], settings: Mapping[str, object]
) -> str:
    """Return the page."""
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(subtitle)}</p>"]
    for section in sections:
        parts += _section(section)
    if settings:
        rows = [Row(name, [str(value)]) for name, value in settings.items()]
        table = _table(Table(["value"], rows))
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


def _section(section: Section) -> list[str]:
    parts = [f"<h2>{escape(section.title)}</h2>"] if section.title else []
    parts += [f'<p class="fault">{escape(each)}</p>' for each in section.faults]
    if section.figures:
        rows = [Row(label, [value]) for label, value in section.figures]
        parts.append(_table(Table([""], rows)))
    if section.plots is not None:
        titles = escape("; ".join(section.plots.titles))
        source = f"data:image/svg+xml;base64,{section.plots.svg_base64}"
        parts.append(f'<img alt="{titles}" src="{source}">')
    if section.table is not None:
        parts.append(_table(section.table))
    if section.printed:
        parts.append(f"<pre>{escape(section.printed)}</pre>")
    return parts


def _table(table: Table) -> str:
    titles = "".join(f"<th>{escape(each)}</th>" for each in table.columns)
    rows: list[str] = []
    for row in table.rows:
        values = "".join(f"<td>{escape(each)}</td>" for each in row.values)
        ends = ' class="end"' if row.ends_part else ""
        label, meaning = escape(row.label), escape(row.meaning)
        rows.append(f'<tr{ends}><td class="label">{label}</td>{values}<td>{meaning}</td></tr>')
    return f"<table><tr><th></th>{titles}<th></th></tr>{''.join(rows)}</table>"
