"""Arguments of the engine's calls: what can be meant by them, and what is refused."""

from operator import index
from typing import cast

import numpy as np

from ....coordinator.settings import TIMEOUT_S_MAX
from ....errors import UsageError
from ...protocol.config import NamespaceLimit

_FLAGS = (bool, np.bool_)
_COUNT_MAX = 1 << 48
"""Larger than anything that is counted, and small enough for the journal."""


def require_text(text: str, what: str = "a namespace") -> None:
    """Raise `UsageError` for what is no text, or what UTF-8 cannot hold."""
    try:
        text.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise UsageError(f"{what} must be text that UTF-8 can hold: {error}") from error


def require_source(source: str) -> None:
    """Raise `UsageError` for another group's URI that says more than where it is, such as a secret.

    It is shown where a request's history is, and sent to others; so it is not repeated here either.
    """
    require_text(source, "a source")
    if "?" in source or "@" in source:
        raise UsageError(
            "a source is peer://host:port and nothing else; the secret is that of `peers`"
        )


def require_limit(limit: object) -> None:
    """Raise `UsageError` for what is no `NamespaceLimit`."""
    if not isinstance(limit, NamespaceLimit):
        raise UsageError(f"a limit is {limit!r}, must be a NamespaceLimit")


def as_count(number: int, what: str = "a number of tokens") -> int:
    """Return a number as an integer, whatever kind of integer it was."""
    try:
        count = index(number)
    except TypeError as error:
        raise UsageError(f"{what} must be an integer: {error}") from error
    if abs(count) > _COUNT_MAX:
        raise UsageError(f"{what} is {count}, which is more than {_COUNT_MAX}")
    return count


def as_seconds(seconds: float, what: str, least: float = 0.0) -> float:
    """Return a time as a float, whatever kind of number it was; as large as every wait may be."""
    try:
        if least <= seconds <= TIMEOUT_S_MAX:
            return float(seconds)
    except (TypeError, ValueError, ArithmeticError):  # The last is that of a decimal NaN.
        pass
    raise UsageError(
        f"{what} is {seconds!r}, must be a number from {least:g} to {TIMEOUT_S_MAX:.0f}"
    )


def as_flag(flag: object, what: str) -> bool:
    """Return true or false, whatever kind of it that was."""
    if not isinstance(flag, _FLAGS):
        raise UsageError(f"{what} is {flag!r}, must be true or false")
    return bool(cast("bool", flag))
