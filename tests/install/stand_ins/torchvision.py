"""A placeholder for torchvision, whose wheels need CUDA: every name exists and does nothing.

Engines import torchvision only for images.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.0"


class Nothing:
    """A placeholder for a class, function or constant; as a decorator it returns its argument."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        decorates = len(arguments) == 1 and not options and callable(arguments[0])
        return arguments[0] if decorates else self

    def __getattr__(self, name: str) -> "Nothing":
        return _nothing_named(name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __or__(self, other: Any) -> "Nothing":
        return self

    __ror__ = __or__


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Nothing:
        return _nothing_named(name)


class _Finder(MetaPathFinder, Loader):
    """Finds a placeholder for every module below one package."""

    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        below = fullname.startswith(self._prefix)
        return ModuleSpec(fullname, self, is_package=True) if below else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _nothing_named(name: str) -> Nothing:
    # Special names must be missing, because Python looks them up to detect an object's features.
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)
    return Nothing()


_here = sys.modules[__name__]
_here.__class__ = _Package
_here.__path__ = []
sys.meta_path.insert(0, _Finder(__name__))
