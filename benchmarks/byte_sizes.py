"""Parses byte sizes with units, for command options."""

import re
from collections.abc import Sequence
from typing import Any, Final

from cyclopts import Parameter

_SIZE: Final = re.compile(r"(-?[0-9]{1,30}(?:\.[0-9]{1,6})?)\s*([A-Za-z]*)")
_UNITS: Final = {"": 1, "B": 1} | {
    f"{letter}{end}": base ** (power + 1)
    for power, letter in enumerate("KMGTP")
    for end, base in (("iB", 1024), ("B", 1000))
}


def _parse_bytes(_kind: object, tokens: Sequence[Any]) -> int:
    text = str(tokens[0].value)
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        raise ValueError(
            f"{text!r} is not a size; give a number, alone or with B, KiB, MiB, GiB or TiB"
        )
    return int(float(match[1]) * _UNITS[match[2]]) if match[2] else int(match[1])


BYTES: Final = Parameter(converter=_parse_bytes, metavar="BYTES")
"""The type of a command option that is a size in bytes, such as 65536, 1MiB or 100GiB."""
