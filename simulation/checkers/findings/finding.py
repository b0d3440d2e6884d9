"""What every finding has: a sentence in its checker's words, and one in plain words."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple


class Said(NamedTuple):
    """A finding in two sentences."""

    what: str
    """In the words of the checker that has found it."""
    plain: str
    """For a reader who does not know the code."""


class Finding(ABC):
    """Something that must hold and did not, with what is known of it."""

    __slots__ = ()

    @abstractmethod
    def say(self) -> Said:
        """Say it in the checker's words and in plain ones."""

    def __str__(self) -> str:
        return self.say().what


Record = Callable[[Finding], None]
"""Receives what is found where nothing can be raised."""


class Violated(Exception):
    """A checker has found something."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding)
        self.finding = finding
