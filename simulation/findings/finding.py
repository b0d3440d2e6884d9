"""What every finding has: one sentence that says which rule was broken, where, and by what."""

from collections.abc import Callable


class Finding:
    """Something that must hold does not, with what is known about it; `str` says it."""

    __slots__ = ()


Record = Callable[[Finding], None]
"""A function that receives a finding where raising is not possible."""


class Violated(Exception):
    """A checker has found something."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding)
        self.finding = finding
