"""Stands in for sgl_kernel, which has no wheel for CPUs: what is not here fails when it is called.

It has no modules below it, so what imports one is skipped by SGLang, or refused, by that name.
"""

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*arguments: Any, **options: Any) -> NoReturn:
        message = f"sgl_kernel.{name} has no stand-in: write one in tests/install/stand_ins"
        raise NotImplementedError(message)

    return missing
