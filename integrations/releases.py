"""The releases of an engine that a plug-in is for; others are refused, because it reaches into them."""

import logging
import re
from collections.abc import Sequence
from enum import StrEnum

from ..errors import ConfigError


class UnsupportedEngine(StrEnum):
    """Policies for an engine of another release."""

    REFUSE = "refuse"
    TRY = "try"


def is_release(found: str, releases: Sequence[str]) -> bool:
    """Say whether a version is of one of these releases: 0.33.1 and 0.33.0+cpu are of 0.33."""
    return any(re.match(rf"{re.escape(each)}(?!\d)", found) for each in releases)


def require_release(
    engine: str,
    found: str,
    releases: Sequence[str],
    unsupported: UnsupportedEngine,
    *,
    where: str,
    log: logging.Logger,
) -> None:
    """Raise `ConfigError` for an engine of another release, unless the user wants it tried."""
    if is_release(found, releases):
        return
    known = (
        f"{engine} {found} is installed, and Lockstep's plug-in is for {engine}"
        f" {' and '.join(releases)}"
    )
    if unsupported is UnsupportedEngine.TRY:
        log.warning("%s; it is tried, as the settings say", known)
        return
    raise ConfigError(
        f'{known}; install one of these, or set "unsupported_engine": "try" in {where}'
    )
