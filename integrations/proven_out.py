"""How a plug-in writes down what changes no byte of KV: names, several to a line, and their reason."""

from collections.abc import Mapping


def names_of(reasons: Mapping[str, str]) -> frozenset[str]:
    """Return all names that have a reason."""
    return frozenset(name for names in reasons for name in names.split())


def names_by_owner(reasons: Mapping[str, Mapping[str, str]]) -> dict[str, frozenset[str]]:
    """Return all names that have a reason, by whose they are."""
    return {owner: names_of(each) for owner, each in reasons.items()}
