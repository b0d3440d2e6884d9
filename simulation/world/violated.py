"""The exception of all checkers: one sentence with the broken rule, the place and the values found."""

from collections.abc import Callable


class Violated(Exception):
    """A violated rule; the message describes it."""


def not_kept(tokens: int, why: str, found: int) -> Violated:
    """Return the finding that cached tokens were lost; `why` continues the word "tokens"."""
    return Violated(f"{tokens} tokens {why}, but a match finds {found} of them")


def not_to_be_had(what: str, found: object) -> Violated:
    """Return the finding that pages cannot be allocated at rest, without requests."""
    return Violated(f"{what} are unused, but the available ones are {found}")


Record = Callable[[str], None]
"""Receives a finding where raising is not possible."""
