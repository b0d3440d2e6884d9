"""Compares an installed engine's settings with the exclusion lists and the previously known names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.integrations.sharing import Exclusions

Fields = Mapping[str, Sequence[str]]
"""Setting names by class (capitalised), by namespace, or of environment variables."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Differences between an engine's settings and the lists."""

    lacking: Sequence[str]
    """Names on the lists that the engine does not have."""
    added: Sequence[str]
    """Settings of the engine that are not known yet."""


def compare(exclusions: Exclusions, found: Fields, known: Mapping[str, str]) -> Compared:
    """Compare `found` with the exclusion lists and the `known` names, by class or namespace."""
    names = {*found}
    for owner, each in found.items():
        names |= {f"{owner}.{name}" if owner[0].isupper() else name for name in each}
    added = [
        f"{owner}.{name}"
        for owner, each in found.items()
        for name in sorted({*each} - {*known.get(owner, "").split()})
    ]
    return Compared(sorted((exclusions.operational | exclusions.rounding) - names), added)
