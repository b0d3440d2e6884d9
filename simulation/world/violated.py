"""The exception that all checkers raise; its message names the broken rule and the values found."""

from collections.abc import Callable


class Violated(Exception):
    """A rule was violated; the message says which one, where and how."""


def not_kept(tokens: int, why: str, found: int) -> Violated:
    """Return a violation message: cached tokens were lost.

    `why` follows the word "tokens" and says why they had to be cached, as in "were pinned".
    """
    return Violated(f"{tokens} tokens {why}, but a match finds {found} of them")


def not_to_be_had(what: str, found: object) -> Violated:
    """Return a violation message: unused pages cannot be allocated although nothing is in flight."""
    return Violated(f"{what} are unused, but the available ones are {found}")


Record = Callable[[str], None]
"""Function that records a violation. Simulated parts call it where an exception that they raise would
not reach the code that runs the schedule."""
