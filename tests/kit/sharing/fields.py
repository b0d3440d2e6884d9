"""Compares the settings of an installed engine with the lists and with what was known of it before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.integrations.sharing import Exclusions

Fields = Mapping[str, Sequence[str]]
"""Names by class, which begins with a capital letter, by namespace, or of variables."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What was found."""

    lacking: Sequence[str]
    """Names on the lists that the engine has not."""
    added: Sequence[str]
    """Settings of the engine that nobody knew of."""


def compare(exclusions: Exclusions, found: Fields, known: Mapping[str, str]) -> Compared:
    """Compare `found` with the lists, and with the names that are `known`, by class or namespace."""
    names = {*found}
    for owner, each in found.items():
        names |= {f"{owner}.{name}" if owner[0].isupper() else name for name in each}
    added = [
        f"{owner}.{name}"
        for owner, each in found.items()
        for name in sorted({*each} - {*known.get(owner, "").split()})
    ]
    return Compared(sorted((exclusions.operational | exclusions.rounding) - names), added)
