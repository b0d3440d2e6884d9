"""Checks the engine's release, because a plug-in depends on internals of the engine."""

import logging
import re
from collections.abc import Sequence
from enum import StrEnum

from ..errors import ConfigError


class UnsupportedEngine(StrEnum):
    """Policies for an engine whose release is not supported."""

    REFUSE = "refuse"
    TRY = "try"


def is_release(found: str, releases: Sequence[str]) -> bool:
    """Return whether a version belongs to one of these releases.

    For example, 0.33.1 and 0.33.0+cpu belong to the release 0.33.
    """
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
    """Raise `ConfigError` for an unsupported release; with the policy `try`, only log a warning."""
    if is_release(found, releases):
        return
    known = (
        f"{engine} {found} is installed, but Lockstep's plug-in supports {engine}"
        f" {' and '.join(releases)}"
    )
    if unsupported is UnsupportedEngine.TRY:
        log.warning("%s; continuing because unsupported_engine is 'try'", known)
        return
    raise ConfigError(
        f'{known}; install one of these, or set "unsupported_engine": "try" in {where}'
    )
