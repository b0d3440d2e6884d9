"""Deprecated aliases for the former names of public methods; each is kept for one release."""

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


def former_name(name: str, method: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Return a function that warns of the deprecated `name` and calls `method`, the renamed method."""

    @functools.wraps(method)
    def call(*args: Given.args, **named: Given.kwargs) -> Returned:
        warnings.warn(
            f"{name} is now {method.__name__}; the former name is removed in the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return method(*args, **named)

    return call
