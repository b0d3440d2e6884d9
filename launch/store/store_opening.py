"""Opens a store for a command-line tool; refuses stores that cannot list objects, and creates none."""

import os
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from ...errors import ConfigError, LockstepError, StorageError
from ...storage_backends.base import StorageBackend
from ...storage_backends.registry import make_backend
from ...storage_backends.uri import StoreUri, parse_uri
from ..cli.amounts import shown_store

_CALL_TIMEOUT_S: Final = 30.0
_BYTES_PER_S: Final = 1 << 20
"""Assumed minimum bandwidth of a store in bytes/s, with which the timeout of a call is computed."""
_SWEEPING: Final = ("quota_bytes", "quota_gib", "ttl_s")
"""Options of a file store's URI that enable evictions; with any of them, reads also count as uses.

A tool removes these options before it opens a store. A tool must not start evictions, and a tool that
reads every object must not mark all objects as used.
"""
_READ_ONLY: Final = "read_only"
_WHY_UNLISTED: Final = {
    "mooncake": "Mooncake clients can look up an object by name but cannot list",
    "peer": "pages of another group can only be looked up by name",
}
"""Reasons why a store cannot list its objects, by built-in URI scheme."""


def call_deadline(nbytes: int = 0) -> float:
    """Return the deadline of a call that starts now and reads or writes `nbytes` bytes."""
    return time.monotonic() + _CALL_TIMEOUT_S + nbytes / _BYTES_PER_S


def is_read_only_command(uri: StoreUri) -> bool:
    """Return whether a command can open the store read-only, without moving corrupt objects."""
    return uri.scheme in ("file", "3fs", "s3")


@asynccontextmanager
async def opened_store(uri: str, *, looking: bool = False) -> AsyncGenerator[StorageBackend]:
    """Open an existing store that can list its objects.

    Raises `ConfigError` for any other store, and never creates a store. While the store is open, no
    object is evicted, even if the URI has a quota. If `looking` is true and the store has a read-only
    mode, nothing is changed: corrupt objects stay in place, and the directory need not be writable.
    """
    _check_that_shared(uri)
    backend = make_backend(for_a_tool(uri, looking=looking))
    if not backend.capabilities.lists:
        why = _WHY_UNLISTED.get(parse_uri(uri).scheme, "its backend cannot list")
        raise ConfigError(
            f"store {shown_store(uri)!r} cannot list its objects, which this command needs: {why}; use"
            " for example file:// or s3://"
        )
    _check_that_there(uri)
    async with _open(backend, uri):
        yield backend


@contextmanager
def failures_named(uri: str) -> Generator[None]:
    """Convert an error of the operating system to a `StorageError` that names the store."""
    try:
        yield
    except (LockstepError, BrokenPipeError):
        raise
    except OSError as error:
        raise StorageError(f"store {shown_store(uri)!r} failed: {error}") from error


def _check_that_shared(uri: str) -> None:
    if not make_backend(uri).capabilities.shared:
        raise ConfigError(
            f"store {shown_store(uri)!r} is private to the process that uses it; give a shared store,"
            " for example file:///var/kv"
        )


def _check_that_there(uri: str) -> None:
    """Raise `ConfigError` if the store does not exist, because opening it would create it."""
    parsed = parse_uri(uri)
    if parsed.scheme not in ("file", "3fs"):
        return
    directory = Path(os.path.normpath(parsed.path))
    if not directory.exists():
        raise ConfigError(
            f"there is no store at {directory}: the directory does not exist; an engine or a "
            "replay creates it"
        )
    if parsed.scheme == "file" and not (directory / "objects").is_dir():
        raise ConfigError(
            f"there is no store at {directory}: it has no folder 'objects'; give the directory in the "
            "engines' store URI"
        )
    kind, _, path = parsed.options.get("index", "").partition("://")
    if parsed.scheme == "3fs" and kind == "sqlite" and not Path(path).is_file():
        raise ConfigError(
            f"there is no store at {directory}: its index {path} does not exist; give the index in the"
            " engines' store URI"
        )


def for_a_tool(uri: str, *, looking: bool = False) -> str:
    """Return the URI with which a tool opens a store: without evictions; read-only if `looking`."""
    if not is_read_only_command(parse_uri(uri)):
        return uri
    head, _, query = uri.partition("?")
    given = query.split("&") if query else []
    left_out = (*_SWEEPING, _READ_ONLY) if looking else _SWEEPING
    kept = [each for each in given if unquote(each.partition("=")[0]) not in left_out]
    if looking:
        kept.append(f"{_READ_ONLY}=1")
    elif parse_uri(uri).scheme == "file":
        kept.append("quota_gib=0")
    return f"{head}?{'&'.join(kept)}" if kept else head


@asynccontextmanager
async def _open(backend: StorageBackend, uri: str) -> AsyncGenerator[StorageBackend]:
    try:
        with failures_named(uri):
            await backend.open()
            yield backend
    finally:
        await backend.close()
