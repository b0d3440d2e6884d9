"""Opening a store to look at it or to tidy it: what is refused by name, and what is never created."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from ...errors import ConfigError, LockstepError, StorageError
from ...storage_backends.base import StorageBackend, StoredObject
from ...storage_backends.file.unsound import unsound_files
from ...storage_backends.registry import make_backend
from ...storage_backends.uri import RANK, StoreUri, parse_uri
from ..amounts import shown_store
from ..interruption import Interrupted, raise_on_signals

Result = TypeVar("Result")

_CALL_TIMEOUT_S: Final = 30.0
_BYTES_PER_S: Final = 1 << 20
"""How long a call may take, and how much longer for each second's worth of bytes that it moves."""
_SWEEPING: Final = ("quota_bytes", "quota_gib", "ttl_s")
"""Options that let whoever opens a store of files tidy it, and note what is read as used. A command
that tidies as it is told must do neither, and one that reads everything would make all look used."""
_READ_ONLY: Final = "read_only"
_WHY_UNLISTED: Final = {
    "mooncake": "a client of Mooncake can ask for an object by its name only, and cannot list"
}
"""Why a built-in scheme cannot say what is in the store."""


def call_deadline(nbytes: int = 0) -> float:
    """Return the deadline of a call that begins now and moves so many bytes."""
    return time.monotonic() + _CALL_TIMEOUT_S + nbytes / _BYTES_PER_S


def of_rank(uri: str, rank: int | None, other: str = "") -> str:
    """Return the URI of one rank's store, where each rank has one of its own.

    Raises `ConfigError` where it is not said whose, or where it is and neither this store nor the
    `other` one is a rank's.
    """
    if RANK not in uri and (rank is None or RANK in other):
        return uri
    if RANK not in uri:
        raise ConfigError(
            f"--rank is {rank}, and store {shown_store(uri)!r} has no {RANK} in it: it is one for all"
        )
    if rank is None:
        raise ConfigError(
            f"store {shown_store(uri)!r} is another one for each rank, and this command works on one; "
            f"add --rank N, which stands in the place of {RANK}"
        )
    return uri.replace(RANK, str(rank))


def store_directory(uri: StoreUri) -> Path | None:
    """Return the directory of a store of files; None for a store of another kind."""
    return Path(os.path.normpath(uri.path)) if uri.scheme == "file" else None


def can_only_look(uri: StoreUri) -> bool:
    """Say whether a store can be opened so that reading changes nothing in it."""
    return uri.scheme in ("file", "3fs", "s3")


@asynccontextmanager
async def opened_store(uri: str, *, looking: bool = False) -> AsyncGenerator[StorageBackend]:
    """Open a store that is there already and can say what is in it.

    Raises `ConfigError` for any other, and creates nothing. The store is not swept while it is open,
    whatever the URI says of quotas. With `looking` nothing in a store that `can_only_look` is changed,
    not even what is found to be corrupt, and its directory need not be writable.
    """
    _shared_backend(uri)
    backend = make_backend(_for_a_tool(uri, looking=looking))
    if not backend.capabilities.lists:
        why = _WHY_UNLISTED.get(parse_uri(uri).scheme, "its backend does not list")
        raise ConfigError(
            f"store {shown_store(uri)!r} cannot say what is in it, so this command cannot work"
            f" on it: {why}; stores that can are, for example, file:// and s3://"
        )
    _check_that_there(uri)
    async with _open(backend, uri):
        yield backend


@asynccontextmanager
async def opened_target(uri: str) -> AsyncGenerator[StorageBackend]:
    """Open a store to write to, which is made if it is not there.

    Raises `ConfigError` for one that would be gone, in whole or in part, when this process ends.
    """
    made = _shared_backend(uri)
    parsed = parse_uri(uri)
    if parsed.scheme == "mooncake" and int(parsed.options.get("segment_bytes", 0)):
        raise ConfigError(
            f"store {shown_store(uri)!r} would have its objects in the memory of this command, and "
            "they would be gone when it ends; leave out segment_bytes, and let a process that stays "
            "give the store its memory"
        )
    async with _open(made, uri) as backend:
        yield backend


async def listed(backend: StorageBackend, uri: str) -> AsyncIterator[StoredObject]:
    """Yield what is in the store. Raises `StorageError` where the store does not answer."""
    try:
        async for stored in backend.objects():
            yield stored
    except (OSError, TimeoutError) as error:
        reason = str(error) or "it did not answer in time"
        raise StorageError(f"store {shown_store(uri)!r} could not be listed: {reason}") from error


def run_until_interrupted(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` to its end and return its result.

    The first SIGINT or SIGTERM cancels it, so that it can say what it has done, and raises
    `Interrupted` then; another one ends the process at once, because a store may hang.
    """

    async def watched() -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop() -> None:
            for each in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(each)
                signal.signal(each, signal.SIG_DFL)
            task.cancel()

        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, stop)
        return await work

    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        raise Interrupted from None
    finally:
        raise_on_signals()


def quarantine_extent(directory: Path) -> tuple[int, int]:
    """Return how many files the quarantine of a directory has, and their bytes."""
    files = nbytes = 0
    try:
        with os.scandir(directory / "quarantine") as entries:
            for entry in entries:
                files += 1
                nbytes += entry.stat(follow_symlinks=False).st_size
    except OSError:
        pass
    return files, nbytes


def unsound_extent(uri: str) -> tuple[int, int] | None:
    """Return how many files of a store's directory are no objects, and their bytes.

    None for a store of another kind.
    """
    directory = store_directory(parse_uri(uri))
    if directory is None:
        return None
    files = nbytes = 0
    try:
        for found in unsound_files(directory):
            files += 1
            nbytes += found.nbytes
    except OSError as error:
        raise StorageError(f"store {shown_store(uri)!r} failed: {error}") from error
    return files, nbytes


def _shared_backend(uri: str) -> StorageBackend:
    backend = make_backend(uri)
    if not backend.capabilities.shared:
        raise ConfigError(
            f"store {shown_store(uri)!r} lives in the process that uses it, and other commands"
            " cannot see it; give a store that is shared, for example file:///var/kv"
        )
    return backend


def _check_that_there(uri: str) -> None:
    """Raise `ConfigError` if opening the store would make it."""
    parsed = parse_uri(uri)
    if parsed.scheme not in ("file", "3fs"):
        return
    directory = Path(os.path.normpath(parsed.path))
    if not directory.exists():
        raise ConfigError(
            f"there is no store at {directory}: the directory does not exist; an engine, a replay "
            "or `lockstep store copy` makes it"
        )
    if parsed.scheme == "file" and not (directory / "objects").is_dir():
        raise ConfigError(
            f"there is no store at {directory}: it is no directory with a folder 'objects' in it; "
            "give the directory that engines have in their store's URI"
        )
    kind, _, path = parsed.options.get("index", "").partition("://")
    if parsed.scheme == "3fs" and kind == "sqlite" and not Path(path).is_file():
        raise ConfigError(
            f"there is no store at {directory}: its index {path} does not exist; give the index that"
            " engines have in their store's URI"
        )


def _for_a_tool(uri: str, *, looking: bool) -> str:
    """Return the URI of a store of files as a tool opens it: not to be swept, or not even changed."""
    if not can_only_look(parse_uri(uri)):
        return uri
    head, _, query = uri.partition("?")
    given = query.split("&") if query else []
    left_out = (*_SWEEPING, _READ_ONLY) if looking else _SWEEPING
    kept = [each for each in given if unquote(each.partition("=")[0]) not in left_out]
    if looking:
        kept.append(f"{_READ_ONLY}=1")
    return f"{head}?{'&'.join(kept)}" if kept else head


@asynccontextmanager
async def _open(backend: StorageBackend, uri: str) -> AsyncGenerator[StorageBackend]:
    try:
        await backend.open()
        yield backend
    except (LockstepError, BrokenPipeError):
        raise
    except (OSError, TimeoutError) as error:
        raise StorageError(f"store {shown_store(uri)!r} failed: {error}") from error
    finally:
        await backend.close()
