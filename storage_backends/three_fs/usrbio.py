"""Transfers through USRBIO, the I/O rings of 3FS, with the client that is installed with 3FS.

The client (`hf3fs_fuse.io` over the extension `hf3fs_py_usrbio`) is built with 3FS and is in no package
index, so it is imported only if it is installed. Payloads are copied between the caller's buffers and
shared memory that the node's 3FS daemon maps too. If a ring is stuck, its late I/O requests access that
shared memory, never a caller's buffer.

This module observes the rules of the client. Slices of the shared memory have step one and are in one
block (block_size is 0, so all memory is one block). A descriptor is deregistered before it is closed,
because otherwise, if a new file gets the same descriptor, I/O to it would go to the old file. A wait
never demands more completions than I/O requests were submitted, because it would hang. Submitted I/O
requests cannot be cancelled, so an abandoned ring is used again only after all of them have completed.
"""

import errno
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, cast

from ..error_log import ErrorLog
from ..threaded_backend import Stop
from .transfers import Extent, MovedObject, Preadv, Transfers

ENTRIES: Final = 128
"""Maximum I/O requests in a ring. No object needs that many (see `PARTS_MAX`)."""
_STAGING_BYTES: Final = 16 << 20
"""Bytes of shared memory per ring, or the size of one slot if that is larger."""
_POLL_S: Final = 0.05
"""Seconds after which a wait for completions checks again whether it should stop."""
_DRAIN_S: Final = 1.0
"""Seconds that `close` waits for a ring whose I/O requests do not complete."""

_SHARED: Final = Path("/dev/shm")  # noqa: S108 - where the daemon looks for shared memory.
_TIMED_OUT: Final = frozenset({errno.ETIMEDOUT, errno.EAGAIN})
"""The errnos with which a wait reports that no I/O request completed before its timeout."""


class SharedSegment:
    """Named shared memory with the two attributes that the client uses: `name` and `buf`.

    The memory is freed with its last view. The standard library's class is not used, because it reports
    an error if it is garbage-collected while a view exists.
    """

    def __init__(self, nbytes: int) -> None:
        self.name = f"lockstep-{secrets.token_hex(16)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(_SHARED / self.name, flags, 0o600)
        try:
            os.ftruncate(fd, nbytes)
            self.buf = memoryview(mmap.mmap(fd, nbytes))
        except BaseException:
            self.unlink()
            raise
        finally:
            os.close(fd)

    def unlink(self) -> None:
        """Remove the name of the memory, which is freed when no process maps it. Idempotent."""
        with suppress(FileNotFoundError):
            (_SHARED / self.name).unlink()


class UsrbioClient(Protocol):
    """The functions and classes of `hf3fs_fuse.io` that this module uses."""

    def make_iovec(
        self, shm: "SharedSegment", hf3fs_mount_point: str, block_size: int = 0, numa: int = -1
    ) -> Any: ...

    def make_ioring(
        self, hf3fs_mount_point: str, entries: int, for_read: bool = True, io_depth: int = 0
    ) -> Any: ...

    def register_fd(self, fd: int) -> None: ...

    def deregister_fd(self, fd: int) -> None: ...

    def extract_mount_point(self, path: str) -> str | None: ...


def load_client() -> UsrbioClient | None:
    """Return the 3FS client, or None if it is not installed or cannot be loaded."""
    try:
        return cast(UsrbioClient, import_module("hf3fs_fuse.io"))
    except (ImportError, OSError):
        return None


def choose_transfers(directory: Path, slot_bytes: int, complaints: ErrorLog) -> Transfers:
    """Return USRBIO if its client is installed and `directory` is on a mounted 3FS, else `Preadv`.

    The shared memory of each ring holds at least one slot of `slot_bytes`. Failures of transfers are
    logged through `complaints`.
    """
    client = load_client()
    if client is None:
        return Preadv("the USRBIO client (hf3fs_py_usrbio) is not installed", complaints)
    mount = None
    with suppress(OSError):
        mount = client.extract_mount_point(str(directory))
    if mount is None:
        return Preadv(f"{directory} is not on a mounted 3FS", complaints)
    return UsrbioTransfers(client, mount, slot_bytes, complaints)


class UsrbioTransfers:
    """A `Transfers` in which each thread has one ring for reads and one for writes."""

    lets_go = False
    objects_at_a_time = ENTRIES

    def __init__(
        self, client: UsrbioClient, mount: str, slot_bytes: int, complaints: ErrorLog
    ) -> None:
        self.text = f"USRBIO rings on {mount}"
        self._client = client
        self._mount = mount
        self._memory_bytes = -(-_STAGING_BYTES // slot_bytes) * slot_bytes
        self._complaints = complaints
        self._own = threading.local()
        self._lock = threading.Lock()
        self._registered: set[int] = set()
        self._rings: list[UsrbioRing] = []

    def register(self, fd: int) -> None:
        with self._lock:
            self._client.register_fd(fd)
            self._registered.add(fd)

    def deregister(self, fd: int) -> None:
        with self._lock:
            if fd in self._registered:
                self._registered.remove(fd)
                self._client.deregister_fd(fd)

    def move(
        self,
        objects: Sequence[Sequence[Extent]],
        stop: Stop,
        deadline: float,
        *,
        reads: bool,
        arrived: Callable[[int], None] | None = None,
    ) -> list[MovedObject]:
        moved = [MovedObject.LATE] * len(objects)
        try:
            ring = self._ring(reads=reads)
        except OSError as error:
            self._complaints.say(f"no ring: {error}", "no ring could be made: %s", error)
            return [MovedObject.FAILED] * len(objects)
        for wave in _waves(objects, ring):
            if stop.due() or not ring.drain(deadline):
                break
            try:
                one = _Wave(ring, objects, wave, moved, arrived, reads=reads)
                one.run(stop, deadline)
                for number in one.failures:
                    kind = "reads" if reads else "writes"
                    self._complaints.log_failure(f"{kind} of slots fail", number)
            except OSError as error:
                self._complaints.say(f"ring: {error}", "a ring failed and was discarded: %s", error)
                # The objects in the failed ring keep the outcome LATE, because the ring may still
                # complete their I/O.
                self._discard(ring, reads=reads)
                break
        return moved

    def close(self) -> None:
        with self._lock:
            rings, self._rings = self._rings, []
        for ring in rings:
            # Wait for the I/O in flight, because the caller deregisters the files next.
            ring.drain(time.monotonic() + _DRAIN_S)
            ring.close()

    def _ring(self, *, reads: bool) -> "UsrbioRing":
        name = "reading" if reads else "writing"
        ring: UsrbioRing | None = getattr(self._own, name, None)
        if ring is None:
            ring = self._make_ring(reads=reads)
            setattr(self._own, name, ring)
            with self._lock:
                self._rings.append(ring)
        return ring

    def _make_ring(self, *, reads: bool) -> "UsrbioRing":
        """Return a new ring and its shared memory. Raises OSError."""
        shared = SharedSegment(self._memory_bytes)
        try:
            iovec = self._client.make_iovec(shared, self._mount)
            ring = self._client.make_ioring(self._mount, ENTRIES, for_read=reads, io_depth=0)
        except BaseException:
            shared.unlink()
            raise
        return UsrbioRing(shared, iovec, ring, reads=reads)

    def _discard(self, ring: "UsrbioRing", *, reads: bool) -> None:
        delattr(self._own, "reading" if reads else "writing")
        with self._lock:
            self._rings.remove(ring)
        with suppress(OSError):
            ring.drain(time.monotonic())
            ring.close()


class Completion(NamedTuple):
    """The completion of one I/O request of a ring."""

    token: int
    """The token that was passed to `prepare` for this I/O request."""
    result: int
    """Number of bytes moved, or a negative errno. A number below the requested one means that the file
    ended or had a hole."""


class UsrbioRing:
    """A 3FS ring for reads or for writes; one thread prepares, submits and awaits its I/O requests.

    The daemon may start an I/O request as soon as it is prepared, and starts it at the latest when it
    is submitted. Completions arrive in any order.
    """

    def __init__(self, shared: SharedSegment, iovec: Any, ring: Any, *, reads: bool) -> None:
        self.memory = shared.buf
        """Shared memory of the ring. The caller owns the ranges that no I/O request uses."""
        self._shared: SharedSegment | None = shared
        self._iovec: Any = iovec
        self._ring: Any = ring
        self._reads = reads
        self._prepared = 0
        self._submitted = 0

    @property
    def pending(self) -> int:
        """Return the number of prepared I/O requests whose completion `wait` has not returned yet."""
        return self._prepared + self._submitted

    def prepare(self, part: slice, fd: int, offset: int, token: int) -> None:
        """Prepare an I/O request that moves bytes between a range of `memory` and a registered file.

        `offset` is the position in the file. The ring owns the range until the request has completed.
        Raises OSError.
        """
        self._ring.prepare(self._iovec[part], self._reads, fd, offset, userdata=token)
        self._prepared += 1

    def submit(self) -> None:
        """Submit the prepared I/O requests to the daemon."""
        self._ring.submit()
        self._submitted += self._prepared
        self._prepared = 0

    def wait(self, least: int, deadline: float) -> list[Completion]:
        """Wait for at least `least` completions, and return all that have arrived by then.

        Returns fewer at the deadline. Raises OSError if the ring itself fails.
        """
        # Wait only for submitted I/O requests, because others may never complete.
        least = min(least, self._submitted)
        if not least:
            return []
        left_s = max(0.0, deadline - time.monotonic())
        try:
            done = self._ring.wait(
                max_results=self.pending, min_results=least, timeout=timedelta(seconds=left_s)
            )
        except OSError as error:
            if error.errno in _TIMED_OUT or time.monotonic() >= deadline:
                return []
            raise
        ended = [Completion(int(each.userdata), int(each.result)) for each in done]
        # Completions beyond the number of submitted I/O requests belong to prepared ones, because the
        # daemon may complete an I/O request before it is submitted.
        early = max(0, len(ended) - self._submitted)
        self._submitted -= len(ended) - early
        self._prepared -= early
        return ended

    def drain(self, deadline: float) -> bool:
        """Wait until all I/O requests have completed; return whether they have by the deadline.

        If they have not, the ring must not be used again.
        """
        try:
            if self._prepared:
                self.submit()
            while self.pending and time.monotonic() < deadline:
                self.wait(self.pending, deadline)
        except OSError:
            return False
        return not self.pending

    def close(self) -> None:
        """Free this process's mapping of the ring's memory; the daemon's mapping stays. Idempotent."""
        shared, self._shared = self._shared, None
        if shared is None:
            return
        self.memory = memoryview(b"")
        # Delete the client's objects, so that the client releases the ring and its link to the memory.
        with suppress(OSError):
            self._ring = None
            self._iovec = None
        shared.unlink()


class _Wave:
    """A group of objects whose I/O requests are in the ring at the same time.

    The outcome of each object is stored in `moved`.
    """

    def __init__(
        self,
        ring: UsrbioRing,
        objects: Sequence[Sequence[Extent]],
        wave: range,
        moved: list[MovedObject],
        arrived: Callable[[int], None] | None,
        *,
        reads: bool,
    ) -> None:
        self._ring = ring
        self._arrived = arrived
        self._reads = reads
        self._moved = moved
        self._extents = [(at, extent) for at in wave for extent in objects[at]]
        self._staged: list[memoryview] = []
        self._left = {at: len(objects[at]) for at in wave}
        self._worst = dict.fromkeys(wave, MovedObject.WHOLE)
        self.failures: set[int] = set()
        """The errnos of failed I/O requests."""

    def run(self, stop: Stop, deadline: float) -> None:
        """Move the extents (byte ranges) of all objects. Raises OSError if the ring fails."""
        ring, at = self._ring, 0
        try:
            for token, (_, extent) in enumerate(self._extents):
                part = slice(at, at + extent.nbytes)
                staged, at = ring.memory[part], part.stop
                if not self._reads:
                    _copy(extent.views, staged, into=True)
                self._staged.append(staged)
                ring.prepare(part, extent.fd, extent.offset, token)
            ring.submit()
            while ring.pending and not stop.due() and time.monotonic() < deadline:
                for token, result in ring.wait(1, min(deadline, time.monotonic() + _POLL_S)):
                    self._note(token, result)
        finally:
            ring.drain(0.0)

    def _note(self, token: int, result: int) -> None:
        at, extent = self._extents[token]
        if result < 0:
            self._worst[at] = MovedObject.FAILED
            self.failures.add(-result)
        elif result != extent.nbytes:
            self._worst[at] = max(self._worst[at], MovedObject.SHORT)
        elif self._reads:
            _copy(extent.views, self._staged[token], into=False)
        self._left[at] -= 1
        if not self._left[at]:
            self._moved[at] = self._worst[at]
            if self._arrived is not None and self._worst[at] is MovedObject.WHOLE:
                self._arrived(at)


def _waves(objects: Sequence[Sequence[Extent]], ring: UsrbioRing) -> Iterator[range]:
    """Divide the objects into consecutive groups that fit into the ring and its shared memory."""
    start = operations = nbytes = 0
    for at, extents in enumerate(objects):
        more = sum(each.nbytes for each in extents)
        full = operations + len(extents) > ENTRIES or nbytes + more > len(ring.memory)
        if full and at > start:
            yield range(start, at)
            start, operations, nbytes = at, 0, 0
        operations += len(extents)
        nbytes += more
    if start < len(objects):
        yield range(start, len(objects))


def _copy(views: Sequence[memoryview], staged: memoryview, *, into: bool) -> None:
    at = 0
    for view in views:
        part = staged[at : at + len(view)]
        if into:
            part[:] = view
        else:
            view[:] = part
        at += len(view)
