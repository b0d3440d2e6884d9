"""Reads objects from a rank's memory with a transfer engine, into staging memory of this process.

A call of the library cannot be cancelled, so the library never writes to the caller's buffers. It
writes to a staging area, on a thread that may stay blocked when its caller stops waiting. The objects
are laid out in the area like in a `ReadReply`. On the event loop's thread the area is copied into the
caller's buffers and verified there. If the rank reused its memory during the read, verification fails
as for any damage. Bytes that arrive after their call has returned are discarded.
"""

import asyncio
import mmap
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Final

from ...errors import StorageError
from ...page_format.object_header import HEADER_BYTES
from ...ranks.protocol.transfer_engine_settings import TransferEngineSettings
from ..buffers import address_of
from ..error_log import LoggedError
from ..threaded_backend import DaemonThreads
from .requests import PartsRead
from .streams import Parser
from .transfer_engine import RemotePiece, TransferEngine, shared_engine
from .wire import LocateReply, ReadReply, State

THREADS: Final = 2
"""Maximum concurrent calls of the library per serving group. Over TCP each waiting call keeps a core
busy."""
_AREA_BYTES_MIN: Final = 256 << 10


class OneSidedReads:
    """Staging areas and threads for reads from one group, used only by the event loop's thread."""

    def __init__(self, settings: TransferEngineSettings) -> None:
        self.settings = settings
        self._threads = DaemonThreads(THREADS, "lockstep-peer", at_end=_nothing)
        self._free: dict[int, list[memoryview]] = {}
        """Free staging areas by size; the size is a power of two, in bytes."""
        self._engine: TransferEngine | None = None
        self.failures: Final = LoggedError()
        """Rate-limited log of failed reads."""
        self._closed = False

    async def start(self, host: str, timeout_s: float) -> None:
        """Start this process's engine for reads; raises `StorageError` if that fails.

        `host` is the address at which other hosts reach this host.
        """
        if self._engine is not None:
            return
        start = partial(shared_engine, self.settings, host)
        started = asyncio.wrap_future(self._threads.submit(start))
        try:
            async with asyncio.timeout(timeout_s):
                self._engine = await started
        except TimeoutError:
            raise StorageError(
                f"Mooncake's transfer engine has not started within {timeout_s:g} s"
            ) from None

    def begin(
        self,
        target: str,
        reading: PartsRead,
        located: LocateReply,
        headers: memoryview,
        came: Callable[["StagedReply"], None],
    ) -> "StagedReply":
        """Start reading the located pages; `came` is called on the event loop when the read has ended.

        `came` must call `end`, which frees the staging area. Raises `StorageError` if no memory can be
        registered.
        """
        assert self._engine is not None
        staged = StagedReply(reading, located, headers, self._area(reading.nbytes))
        loop = asyncio.get_running_loop()

        def ended(_: object) -> None:
            # Ignore the error if the event loop was closed before the library returned.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(came, staged)

        staged.call = self._threads.submit(partial(self._engine.read, target, staged.pieces))
        staged.call.add_done_callback(ended)
        return staged

    def end(self, staged: "StagedReply") -> None:
        """Return the staging area of a finished read to the free areas."""
        self._free[len(staged.area)].append(staged.area)
        if self._closed:
            self._give_back()

    def close(self) -> None:
        """Start no more calls, and unregister all free staging areas. Does not wait for calls."""
        self._closed = True
        self._threads.end()
        self._give_back()

    def _give_back(self) -> None:
        for areas in self._free.values():
            while areas and self._engine is not None:
                self._engine.unregister(areas.pop())

    def _area(self, nbytes: int) -> memoryview:
        """Return a staging area of at least `nbytes`: a free one, or else a new one.

        The area is in use until `end`.
        """
        length = max(_AREA_BYTES_MIN, 1 << (nbytes - 1).bit_length())
        free = self._free.setdefault(length, [])
        if free:
            return free.pop()
        area = memoryview(mmap.mmap(-1, length))
        assert self._engine is not None
        self._engine.register([area])
        return area


class StagedReply:
    """A rank's answer with the addresses of objects, and the staging area to read the objects into.

    The area has the layout of a `ReadReply`.
    """

    def __init__(
        self, reading: PartsRead, located: LocateReply, headers: memoryview, area: memoryview
    ) -> None:
        """Plan the position of each object in the staging area.

        An object with an invalid header gets no bytes. `area` must be large enough for the longest
        possible answer to the request (`PartsRead.nbytes`).
        """
        self.area = area
        self.call: Future[bool] = Future()
        self.pieces: list[RemotePiece] = []
        self._reading = reading
        self._states = bytearray(located.states)
        self._nbytes = 0
        base, taken = address_of(area), 0
        for at, (state, page) in enumerate(zip(located.states, located.pages, strict=True)):
            if state == State.ABSENT:
                continue
            header = headers[taken : taken + HEADER_BYTES]
            taken += HEADER_BYTES
            self._put(header)
            plan = reading.valid_plan(at, bytes(header)) if state == State.WHOLE else None
            if plan is None:
                self._states[at] = State.BARE
                continue
            for run in plan.runs:
                self.pieces.append(RemotePiece(base + self._nbytes, page + run.offset, run.nbytes))
                self._nbytes += run.nbytes

    @property
    def has_come(self) -> bool:
        """Return whether the transfer engine's read has finished and has read all bytes."""
        return not self.call.cancelled() and self.call.exception() is None and self.call.result()

    def give(self) -> None:
        """Copy the staged bytes into the request's buffers, and verify them."""
        pages = ReadReply(0, 0, bytes(self._states))
        fill(self._reading.receive(pages, self._nbytes), self.area)
        self._reading.take(pages)

    def _put(self, header: memoryview) -> None:
        self.area[self._nbytes : self._nbytes + HEADER_BYTES] = header
        self._nbytes += HEADER_BYTES


def fill(parser: Parser, source: memoryview) -> None:
    """Copy the bytes of `source` to the memory that `parser` yields, as a connection would do."""
    at = 0
    for sinks in parser:
        for sink in sinks:
            sink[:] = source[at : at + len(sink)]
            at += len(sink)


def headers_of(reading: PartsRead, located: LocateReply, attached_bytes: int) -> memoryview:
    """Return memory for the object headers that are attached to the answer `located`.

    Raises `StorageError` if the answer does not match the request `reading`.
    """
    states = located.states
    there = len(states) - states.count(State.ABSENT)
    fits = len(states) == len(located.pages) == len(reading.keys) and max(states) <= State.WHOLE
    if not fits or attached_bytes != there * HEADER_BYTES:
        raise StorageError(
            f"locations of {len(states)} objects with {attached_bytes} bytes attached;"
            f" {len(reading.keys)} objects were requested"
        )
    return memoryview(bytearray(attached_bytes))


def _nothing() -> None:
    """Do nothing when the last thread exits: the event loop's thread unregisters the staging areas."""
