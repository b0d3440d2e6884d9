"""A placeholder for sgl_kernel, which has no wheel for CPUs: a missing function raises when called.

The placeholder has no submodules. SGLang skips code that imports a submodule, or raises an error that
names the submodule.
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
