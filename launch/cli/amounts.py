"""Parsing and printing of sizes and ages, and escaping of untrusted text for a terminal."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from ...storage_backends.uri import without_secrets

_AGE: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([smhdw])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_SHOWN_MAX: Final = 200
LINE_MAX: Final = 10_000
"""Maximum characters of a printed path or error message; longer text is cut."""


def parse_age(_kind: object, tokens: Sequence[Any]) -> float:
    """Convert an option value with a unit, such as 90s, 15m, 12h, 7d or 2w, to seconds."""
    text = str(tokens[0].value)
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number with s, m, h, d or w, for example 7d")
    return float(match[1]) * _SECONDS[match[2]]


def bytes_in_words(nbytes: float) -> str:
    """Return a number of bytes with a unit, such as `1.5 GiB`."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def age_in_words(age_s: float | None) -> str:
    """Return an age with a unit, such as `5 min`; a dash if the age is unknown."""
    if age_s is None:
        return "-"
    for unit, seconds, until in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if age_s < until:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s / 86_400:,.0f} d"


def count(number: int, thing: str) -> str:
    """Return a number with its noun, such as `1 object` or `2,000 objects`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def printable(text: str, length_max: int = _SHOWN_MAX) -> str:
    """Return untrusted text with control characters escaped, cut to `length_max` characters."""
    shown = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
    return shown if len(shown) <= length_max else f"{shown[: length_max - 1]}…"


def well_formed(value: object) -> object:
    """Return a JSON value that encodes as UTF-8: lone surrogates, as in file names, are escaped."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        entries = cast(Mapping[object, object], value).items()
        return {well_formed(key): well_formed(each) for key, each in entries}
    if isinstance(value, list | tuple):
        return [well_formed(each) for each in cast(Sequence[object], value)]
    return value


def shown_store(uri: str) -> str:
    """Return a store's URI without secrets and escaped for a terminal."""
    return printable(without_secrets(uri))
