"""Checks of a store: O_DIRECT, free space, latency and bandwidth.

The checks write real objects through the store's backend, under unique names, and remove them again.
Each result is compared with a limit that is measured in the same run. For a store of files, plain file
calls give the limit; for a store on the network, a plain connection gives it.
"""

import asyncio
import mmap
import os
import secrets
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from ...benchmarks.storage import (
    IN_DIRECTORIES,
    StorageSizes,
    limit_directory,
    no_directories_left,
)
from ...benchmarks.storage import run as measure_speed
from ...errors import LockstepError, StorageError
from ...page_format.object_name import ObjectName
from ...page_format.object_shape import ObjectShape
from ...ranks.protocol.host_port import split_address
from ...storage_backends.base import Read, ReadOutcome, StorageBackend, Write, WriteOutcome
from ...storage_backends.file.backend import FileOptions
from ...storage_backends.registry import make_backend
from ...storage_backends.uri import RANK, StoreUri, parse_uri
from ..cli.amounts import bytes_in_words, shown_store
from ..cli.environment import LOOPBACK
from ..store.store_opening import call_deadline, for_a_tool
from .finding import CheckResult, advice, problem, well

PAGE_BYTES: Final = 1 << 20
TOTAL_BYTES: Final = 64 << 20
SMALL_BYTES: Final = 4096
TURNS: Final = 32
SLOW_US: Final = 20_000.0
LOW_RATIO: Final = 0.5
_CONNECTIONS: Final = 8
_PIECE_BYTES: Final = 1 << 20
_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Direct:
    """Whether the store's directory allows files with O_DIRECT, and whether the URI requests it."""

    directory: str
    failure: str
    wanted: bool


@dataclass(frozen=True, slots=True)
class Answers:
    """Median times in us of a small read: through the store, and without the store (the limit)."""

    store: str
    read_us: float = 0.0
    limit_us: float | None = None
    limit: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Speed:
    """Read and write bandwidth of the store and of its hardware limit, in GB/s."""

    read_gbps: float = 0.0
    limit_read_gbps: float = 0.0
    write_gbps: float = 0.0
    limit_write_gbps: float = 0.0
    limit: str = ""
    failure: str = ""


def of_rank_0(uri: str) -> str:
    """Return the URI of the store to test: the store of rank 0 if each rank has its own."""
    return for_a_tool(uri.replace(RANK, "0"))


def probe_direct(uri: str) -> Direct | None:
    """Test O_DIRECT in a file store's directory, or in the nearest parent that exists.

    Returns None for a store that is not a directory.
    """
    parsed = parse_uri(uri)
    if parsed.scheme not in IN_DIRECTORIES:
        return None
    directory = limit_directory(parsed)
    while not directory.is_dir() and directory != directory.parent:
        directory = directory.parent
    wanted = parsed.options.get("direct") == "1"
    return Direct(str(directory), _direct_failure(directory), wanted)


def _direct_failure(directory: Path) -> str:
    path = directory / f".lockstep-doctor-{secrets.token_hex(8)}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    except OSError as error:
        # Remove the file, because the failed open has possibly created it. On a read-only
        # filesystem, the removal also fails.
        with suppress(OSError):
            path.unlink()
        return error.strerror or str(error)
    try:
        path.unlink()
        # Use an anonymous mapping, because its memory has the alignment that O_DIRECT needs.
        with mmap.mmap(-1, SMALL_BYTES) as block:
            os.pwrite(fd, block, 0)
            os.preadv(fd, [block], 0)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(fd)
    return ""


def judge_direct(direct: Direct) -> CheckResult:
    """Judge the O_DIRECT test; a failure is a problem only if the URI has direct=1."""
    name = "O_DIRECT"
    if not direct.failure:
        return well(name, f"files in {direct.directory} can bypass the page cache (direct=1)")
    seen = f"not available in {direct.directory}: {direct.failure}"
    if direct.wanted:
        return problem(name, seen, "leave direct=1 out, or put the store on another filesystem")
    return well(name, f"{seen}; I/O uses the page cache")


def judge_room(uri: str, directory: str) -> list[CheckResult]:
    """Judge whether a writable `file://` store has a quota; return no finding for other stores."""
    backend = make_backend(uri.replace(RANK, "0"))
    if parse_uri(uri).scheme != "file" or not backend.capabilities.writes:
        return []
    limits, place = parse_uri(uri).read(FileOptions).limits, Path(directory)
    seen = f"the store may hold {limits.in_words(place)}"
    if limits.quota(place, 0) is None:
        return [advice("store room", seen, "set a quota (quota_gib=N)")]
    return [well("store room", seen)]


def probe_answers(uri: str) -> Answers:
    """Time reads of small test objects, through the store and without it; remove the objects."""
    parsed, shown = parse_uri(uri), shown_store(uri)
    peer = _where(parsed)
    try:
        if not make_backend(uri).capabilities.writes:
            took = None if peer is None else _connect_us(*peer)
            return Answers(shown, limit_us=took, limit="connecting to it")
        directory = limit_directory(parsed)
        namespace = secrets.token_hex(16)
        tidied = no_directories_left(directory, namespace)
        with tidied if parsed.scheme == "file" else nullcontext():
            read_us = asyncio.run(_answers_us(make_backend(uri), namespace))
            if peer is not None:
                return Answers(shown, read_us, _connect_us(*peer), "connecting to it")
            limit_us = _bare_read_us(directory)
        return Answers(shown, read_us, limit_us, "open, pread and close of a file")
    except (LockstepError, OSError) as error:
        return Answers(shown, failure=str(error))


async def _answers_us(backend: StorageBackend, namespace: str) -> float:
    shape = ObjectShape.whole(SMALL_BYTES)
    names = [ObjectName(namespace, secrets.token_hex(32), "kv", "l0-1.h0-8") for _ in range(TURNS)]
    source, target = memoryview(bytearray(SMALL_BYTES)), memoryview(bytearray(SMALL_BYTES))
    source[:16] = os.urandom(16)
    took: list[float] = []
    try:
        await backend.open()
        writes = [Write(name, (source,), shape) for name in names]
        written = await backend.write(writes, deadline=call_deadline())
        if set(written) != {WriteOutcome.OK}:
            raise StorageError(f"the write failed: {_outcomes(written)}")
        for name in names:
            began = time.perf_counter()
            read = await backend.read([Read(name, (target,), shape)], deadline=call_deadline())
            took.append((time.perf_counter() - began) * 1e6)
            if read != [ReadOutcome.OK] or source != target:
                raise StorageError(f"the read did not return what was written: {_outcomes(read)}")
    finally:
        with suppress(LockstepError, OSError):
            await backend.remove(names, deadline=call_deadline())
        await backend.close()
    return statistics.median(took)


def _outcomes(outcomes: list[ReadOutcome] | list[WriteOutcome]) -> str:
    return ", ".join(sorted({each.name for each in outcomes}))


def _bare_read_us(directory: Path) -> float:
    took: list[float] = []
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        file.write(bytes(2 * SMALL_BYTES))
        file.flush()
        target = bytearray(2 * SMALL_BYTES)
        for _ in range(TURNS):
            began = time.perf_counter()
            fd = os.open(file.name, os.O_RDONLY)
            os.preadv(fd, [target], 0)
            os.close(fd)
            took.append((time.perf_counter() - began) * 1e6)
    return statistics.median(took)


def judge_answers(answers: Answers) -> CheckResult:
    """Judge the latency of a small read; a request with a hit waits until its first page is read."""
    name = "store answers"
    if answers.failure:
        remedy = "see docs/storage.md, and try the same URI with `lockstep store stat`"
        return problem(name, f"{answers.store} failed: {answers.failure}", remedy)
    limit = "" if answers.limit_us is None else f"{answers.limit} takes {answers.limit_us:,.0f} us"
    if not answers.read_us:
        return well(
            name, f"{answers.store} is read-only, so nothing was tested; {limit}".rstrip("; ")
        )
    seen = f"{answers.store} reads 4 KiB in {answers.read_us:,.0f} us"
    if answers.limit_us:
        seen += f"; {limit}: ratio {answers.read_us / answers.limit_us:,.1f}"
    if answers.read_us > SLOW_US:
        remedy = (
            "prefetches hide this latency while requests queue; use a nearer store to reduce it"
        )
        return advice(name, seen, remedy)
    return well(name, seen)


def probe_speed(
    uri: str, say: Callable[[str], None], total_bytes: int = TOTAL_BYTES
) -> Speed | None:
    """Measure the store's bandwidth for 1 MiB pages, and the hardware limit.

    Returns None if the store is read-only.
    """
    parsed = parse_uri(uri)
    if not make_backend(uri).capabilities.writes:
        return None
    threads = parsed.options.get("threads", "1") if parsed.scheme == "file" else "1"
    sizes = StorageSizes(
        store=uri, page_bytes=PAGE_BYTES, threads=int(threads), total_bytes=total_bytes
    )
    try:
        found = measure_speed(sizes, lambda what: say(f"measuring the store: {what}"))
        limits = (found["limit_read_gbps"], found["limit_write_gbps"])
        limit = "bare preadv and pwrite"
        if parsed.scheme not in IN_DIRECTORIES and _where(parsed) is not None:
            limits = (_bare_connection_gbps(total_bytes),) * 2
            limit = "a bare connection inside this machine"
    except (LockstepError, OSError) as error:
        return Speed(failure=str(error))
    return Speed(found["read_gbps"], limits[0], found["write_gbps"], limits[1], limit)


def judge_speed(speed: Speed) -> CheckResult:
    """Judge the store's bandwidth by its ratio to the hardware limit."""
    name = "store speed"
    if speed.failure:
        return problem(name, speed.failure, "see docs/storage.md for what this store needs")
    read, write = (
        speed.read_gbps / speed.limit_read_gbps,
        speed.write_gbps / speed.limit_write_gbps,
    )
    seen = (
        f"pages of {bytes_in_words(PAGE_BYTES)}: read {speed.read_gbps:.2f} GB/s,"
        f" {read:.2f} of {speed.limit}; written {speed.write_gbps:.2f} GB/s, {write:.2f} of that"
    )
    if min(read, write) < LOW_RATIO:
        remedy = (
            "add threads to the URI, or measure with `lockstep bench storage` on an idle machine"
        )
        return advice(name, seen, remedy)
    return well(name, seen)


def _where(uri: StoreUri) -> tuple[str, int] | None:
    """Return a store's (host, port); None for a store that is not on the network."""
    if uri.scheme in IN_DIRECTORIES:
        return None
    with suppress(LockstepError, ValueError):
        endpoint = urlsplit(uri.options.get("endpoint", ""))
        if endpoint.hostname is not None:
            return endpoint.hostname, endpoint.port or (443 if endpoint.scheme == "https" else 80)
        return split_address(uri.host)
    return None


def _connect_us(host: str, port: int) -> float:
    """Return the median time to open a connection (one round trip), in us. Raises `OSError`."""
    took: list[float] = []
    for _ in range(_CONNECTIONS):
        began = time.perf_counter()
        with socket.create_connection((host, port), timeout=_TIMEOUT_S):
            took.append((time.perf_counter() - began) * 1e6)
    return statistics.median(took)


def _bare_connection_gbps(nbytes: int) -> float:
    """Return the bandwidth in GB/s of one TCP connection within this machine."""
    with socket.create_server((LOOPBACK, 0)) as server:
        sender = threading.Thread(target=_send, args=(server.getsockname()[1], nbytes))
        sender.start()
        connection, _ = server.accept()
        with connection:
            into, left = memoryview(bytearray(_PIECE_BYTES)), nbytes
            began = time.perf_counter()
            while left > 0 and (got := connection.recv_into(into)):
                left -= got
            took = time.perf_counter() - began
        sender.join()
    return nbytes / took / 1e9


def _send(port: int, nbytes: int) -> None:
    piece = bytes(_PIECE_BYTES)
    with socket.create_connection((LOOPBACK, port), timeout=_TIMEOUT_S) as connection:
        for start in range(0, nbytes, _PIECE_BYTES):
            connection.sendall(piece[: nbytes - start])
