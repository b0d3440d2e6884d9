"""Replacing a part of the code under test for a while."""

from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def replaced(owner: object, name: str, replacement: object) -> Generator[None]:
    """Let the attribute `name` of a class or module be `replacement` inside the context."""
    original: object = vars(owner)[name]
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
