"""Validation and conversion of the arguments of engine calls."""

from operator import index
from typing import cast

import numpy as np

from ....coordinator.validated_settings import TIMEOUT_S_MAX
from ....errors import UsageError
from ...protocol.config import NamespaceLimit

_FLAGS = (bool, np.bool_)
_COUNT_MAX = 1 << 48
"""Upper bound of any count of tokens or pages. It fits the 64-bit integers that enter the digest."""


def require_text(text: str, what: str = "a namespace") -> None:
    """Raise `UsageError` unless `text` is a string that UTF-8 can encode."""
    try:
        text.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise UsageError(f"{what} must be text that UTF-8 can hold: {error}") from error


def require_source(source: str) -> None:
    """Raise `UsageError` if the URI of a source group contains more than the address.

    The error does not quote the URI, because the URI may contain a secret and errors are sent to other
    ranks.
    """
    require_text(source, "a source")
    if "?" in source or "@" in source:
        raise UsageError(
            "a source must be peer://host:port without options; set the secret in `peers`"
        )


def require_limit(limit: object) -> None:
    """Raise `UsageError` unless `limit` is a `NamespaceLimit`."""
    if not isinstance(limit, NamespaceLimit):
        raise UsageError(f"a limit is {limit!r}, must be a NamespaceLimit")


def as_count(number: int, what: str = "a number of tokens") -> int:
    """Convert any kind of integer to `int`; raise `UsageError` for other values or huge ones."""
    try:
        count = index(number)
    except TypeError as error:
        raise UsageError(f"{what} must be an integer: {error}") from error
    if abs(count) > _COUNT_MAX:
        raise UsageError(f"{what} is {count}, which is more than {_COUNT_MAX}")
    return count


def as_seconds(seconds: float, what: str, least: float = 0.0) -> float:
    """Convert a time to `float`; raise `UsageError` if it is not a number within the allowed range."""
    try:
        if least <= seconds <= TIMEOUT_S_MAX:
            return float(seconds)
    except (TypeError, ValueError, ArithmeticError):  # A decimal NaN raises ArithmeticError.
        pass
    raise UsageError(
        f"{what} is {seconds!r}, must be a number from {least:g} to {TIMEOUT_S_MAX:.0f}"
    )


def as_flag(flag: object, what: str) -> bool:
    """Convert Python's or numpy's bool to `bool`; raise `UsageError` for other values."""
    if not isinstance(flag, _FLAGS):
        raise UsageError(f"{what} is {flag!r}, must be true or false")
    return bool(cast("bool", flag))
