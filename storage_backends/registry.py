"""From a URI to a backend: built-in schemes, those of other packages, and wrappers around them.

A built-in scheme is imported only when it is used. Another package adds a scheme through the entry
point group `lockstep.storage_backends`; the entry's name is the scheme, and its value a callable
that takes a `StoreUri` and returns a `StorageBackend`. It cannot replace a built-in scheme.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, cast

from ..errors import ConfigError
from .base import StorageBackend
from .uri import StoreUri, parse_uri, telling_no_secrets

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "lockstep.storage_backends"

MakeBackend = Callable[[StoreUri], StorageBackend]
"""Makes a backend that is not open yet; raises `ConfigError` for a URI that makes no sense."""
WrapBackend = Callable[[StoreUri, StorageBackend], StorageBackend]
"""Makes a backend that stands before another one."""

_BUILT_IN = {
    "3fs": ".three_fs.backend",
    "memory": ".memory",
    "file": ".file.backend",
    "mooncake": ".mooncake.backend",
    "s3": ".s3.backend",
    "peer": ".peer.backend",
}
"""The module of each built-in scheme; it has a function `from_uri`, a `MakeBackend`."""
_WRAPPERS = {
    "breaker": ".wrappers.breaker",
    "fault": ".wrappers.fault",
    "metrics": ".wrappers.metrics",
}
"""The module of each wrapper; it has a function `wrap`, a `WrapBackend`."""


def make_backend(uri: str) -> StorageBackend:
    """Return the backend that `uri` names, not open yet.

    Raises `ConfigError` if the URI is malformed, or its scheme, a wrapper or an option is unknown.
    """
    with telling_no_secrets(uri):
        parsed = parse_uri(uri)
        wrappers = [_wrapper(parsed, name) for name in parsed.wrappers]
        backend = _maker(parsed)(parsed)
        for wrap in reversed(wrappers):
            backend = wrap(parsed, backend)
        return backend


def known_schemes() -> list[str]:
    """Return the schemes that can be used here, sorted."""
    return sorted({*_BUILT_IN, *(entry.name for entry in _entries())})


def is_built_in(scheme: str) -> bool:
    """Say whether a scheme is this package's own: to make its backend is quick and asks nobody."""
    return scheme in _BUILT_IN


def _maker(uri: StoreUri) -> MakeBackend:
    module = _BUILT_IN.get(uri.scheme)
    if module is not None:
        return cast(MakeBackend, import_module(module, __package__).from_uri)
    for entry in _entries():
        if entry.name == uri.scheme:
            # Any exception can come out of a stranger's import, and the user is told whose it was.
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
    # It takes a while, and only a scheme that is not built in needs it.
    from importlib.metadata import entry_points

    return list(entry_points(group=ENTRY_POINT_GROUP))
