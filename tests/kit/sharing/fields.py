"""Compares an engine's settings with Lockstep's lists of known settings and excluded settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.integrations.sharing import Exclusions

Fields = Mapping[str, Sequence[str]]
"""Names of an engine's settings, by class (capital first letter) or argument group."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Differences between an engine's settings and Lockstep's lists of settings."""

    lacking: Sequence[str]
    """Excluded settings that the engine does not have."""
    added: Sequence[str]
    """Settings of the engine that are not among the known ones."""


def compare(exclusions: Exclusions, found: Fields, known: Mapping[str, str]) -> Compared:
    """Compare an engine's settings, `found`, with Lockstep's excluded and known settings."""
    names = {*found}
    for owner, each in found.items():
        names |= {f"{owner}.{name}" if owner[0].isupper() else name for name in each}
    added = [
        f"{owner}.{name}"
        for owner, each in found.items()
        for name in sorted({*each} - {*known.get(owner, "").split()})
    ]
    return Compared(sorted((exclusions.operational | exclusions.rounding) - names), added)
