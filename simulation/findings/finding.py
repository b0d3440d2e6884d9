"""What every finding has: a sentence in the checker's words, and one in plain words."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple


class Said(NamedTuple):
    """A finding, told in two sentences."""

    what: str
    """The finding in the words of its checker."""
    plain: str
    """The finding for a reader who does not know the code."""


class Finding(ABC):
    """Something that must hold does not, with what is known about it."""

    __slots__ = ()

    @abstractmethod
    def say(self) -> Said:
        """Return the finding in the checker's words and in plain ones."""

    def __str__(self) -> str:
        return self.say().what


Record = Callable[[Finding], None]
"""A function that receives a finding where raising is not possible."""


class Violated(Exception):
    """A checker has found something."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding)
        self.finding = finding
