"""One page of HTML that needs nothing but itself: styles, plots, tables and a script of some lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from .plots import Plot
from .style import SCRIPT, STYLE


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
    tiles: Sequence[tuple[str, str]] = ()
    """Labels and values."""
    faults: Sequence[str] = ()
    plots: Sequence[Plot] = ()
    table: Table | None = None
    printed: str = ""


def page(
    title: str, subtitle: str, sections: Sequence[Section], settings: Mapping[str, object]
) -> str:
    """Return the page."""
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="sub">{escape(subtitle)}</p>']
    for section in sections:
        parts += _section(section)
    if settings:
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>"
            for name, value in settings.items()
        )
        parts.append(f"<details><summary>Settings</summary><table>{rows}</table></details>")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">"
        # Without an icon of its own a page asks its server for one.
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style>'
    )
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n'
        f"<script>{SCRIPT}</script>\n</body></html>\n"
    )


def _section(section: Section) -> list[str]:
    parts = [f"<h2>{escape(section.title)}</h2>"] if section.title else []
    parts += [f'<p class="fault">{escape(each)}</p>' for each in section.faults]
    if section.tiles:
        tiles = "".join(
            f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
            for label, value in section.tiles
        )
        parts.append(f'<div class="tiles">{tiles}</div>')
    if section.plots:
        parts.append(f'<div class="plots">{"".join(map(_figure, section.plots))}</div>')
    if section.table is not None:
        parts.append(_table(section.table))
    if section.printed:
        parts.append(f"<pre>{escape(section.printed)}</pre>")
    return parts


def _figure(plot: Plot) -> str:
    key = "".join(
        f'<span><i class="{each.colour}"></i>{escape(each.name)}</span>' for each in plot.legend
    )
    return (
        f"<figure><h3>{escape(plot.title)}</h3><p>{escape(plot.note)}</p>"
        f'<div class="key">{key}</div>{plot.svg}<div class="tip"></div></figure>'
    )


def _table(table: Table) -> str:
    titles = "".join(f'<th class="value">{escape(each)}</th>' for each in table.columns)
    rows: list[str] = []
    for row in table.rows:
        values = "".join(f'<td class="value">{escape(each)}</td>' for each in row.values)
        ends = ' class="end"' if row.ends_part else ""
        rows.append(
            f'<tr{ends}><td class="label">{escape(row.label)}</td>{values}'
            f'<td class="meaning">{escape(row.meaning)}</td></tr>'
        )
    head = f"<tr><th></th>{titles}<th></th></tr>"
    return f'<div class="wide"><table>{head}{"".join(rows)}</table></div>'
