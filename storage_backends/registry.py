"""Creates a backend from a URI: built-in schemes, schemes of other packages, and wrappers.

A built-in scheme is imported only when it is used. Another package adds a scheme through the entry
point group `lockstep.storage_backends`; the entry's name is the scheme, and the entry's value is a
callable that takes a `StoreUri` and returns a `StorageBackend`. An entry cannot replace a built-in
scheme.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, cast

from ..errors import ConfigError
from .base import StorageBackend
from .uri import StoreUri, hiding_secrets, parse_uri

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "lockstep.storage_backends"

MakeBackend = Callable[[StoreUri], StorageBackend]
"""A function that creates a backend from a URI, without opening it. Raises `ConfigError` for an invalid
URI."""
WrapBackend = Callable[[StoreUri, StorageBackend], StorageBackend]
"""A function that wraps a backend in another one."""

_BUILT_IN = {
    "3fs": ".three_fs.backend",
    "memory": ".memory",
    "file": ".file.backend",
    "mooncake": ".mooncake.backend",
    "s3": ".s3.backend",
    "peer": ".peer.backend",
}
"""The module of each built-in scheme. The module's function `from_uri` is a `MakeBackend`."""
_WRAPPERS = {
    "breaker": ".wrappers.breaker",
    "fault": ".wrappers.fault",
    "metrics": ".wrappers.metrics",
}
"""The module of each wrapper. The module's function `wrap` is a `WrapBackend`."""


def make_backend(uri: str) -> StorageBackend:
    """Return the backend that `uri` names, without opening it.

    Raises `ConfigError` if the URI is malformed, or its scheme, a wrapper or an option is unknown.
    """
    with hiding_secrets(uri):
        parsed = parse_uri(uri)
        wrappers = [_wrapper(parsed, name) for name in parsed.wrappers]
        backend = _maker(parsed)(parsed)
        for wrap in reversed(wrappers):
            backend = wrap(parsed, backend)
        return backend


def known_schemes() -> list[str]:
    """Return the schemes that can be used, built-in or of installed packages, sorted."""
    return sorted({*_BUILT_IN, *(entry.name for entry in _entries())})


def is_built_in(scheme: str) -> bool:
    """Return whether a scheme is built into Lockstep; False for schemes of other packages."""
    return scheme in _BUILT_IN


def _maker(uri: StoreUri) -> MakeBackend:
    module = _BUILT_IN.get(uri.scheme)
    if module is not None:
        return cast(MakeBackend, import_module(module, __package__).from_uri)
    for entry in _entries():
        if entry.name == uri.scheme:
            # Turn any exception into an error that names the package, because the import of another
            # package may raise anything.
            try:
                return cast(MakeBackend, entry.load())
            except Exception as error:
                raise ConfigError(
                    f"store {uri.text!r}: the package that provides {uri.scheme}:// ({entry.value}) "
                    f"cannot be loaded: {error}"
                ) from error
    raise ConfigError(
        f"store {uri.text!r}: unknown scheme {uri.scheme!r}; known: {', '.join(known_schemes())}"
    )


def _wrapper(uri: StoreUri, name: str) -> WrapBackend:
    module = _WRAPPERS.get(name)
    if module is None:
        known = ", ".join(sorted(_WRAPPERS))
        raise ConfigError(f"store {uri.text!r}: unknown wrapper {name!r}; known: {known}")
    return cast(WrapBackend, import_module(module, __package__).wrap)


def _entries() -> "list[EntryPoint]":
    # Import `entry_points` here, because the module is slow to import and only schemes of other
    # packages need it.
    from importlib.metadata import entry_points

    return list(entry_points(group=ENTRY_POINT_GROUP))
