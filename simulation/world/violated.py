"""What every checker raises: one sentence that says which rule was broken, where, and by what."""

from collections.abc import Callable


class Violated(Exception):
    """Something that must hold does not; the message says it."""


def not_kept(tokens: int, why: str, found: int) -> Violated:
    """Return that tokens are lost that must be there; `why` goes on after the word "tokens"."""
    return Violated(f"{tokens} tokens {why}, and a match finds {found} of them")


def not_to_be_had(what: str, found: object) -> Violated:
    """Return that at rest, without requests, some pages cannot be allocated."""
    return Violated(f"nobody holds any of {what}, and what can be had is {found}")


Record = Callable[[str], None]
"""A function that receives such a sentence where raising is not possible."""
