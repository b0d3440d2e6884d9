"""One reader of another group, as the page server sees it: what it has asked for, and what it is sent.

All of it happens on the server's thread, in short turns. A frame of pages is sent from the pages'
own memory, and the next one is put together only when the kernel has taken the last; so of each
reader's pages no more are held than are in one frame. Pages that it reads by a transfer engine are
held until it says that it is done, or is cut off.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ...errors import StorageError
from ...page_format.object_header import HEADER_BYTES
from ...storage_backends.buffers import address_of
from ...storage_backends.peer.frame_tags import ConnectionTags
from ...storage_backends.peer.streams import FrameHead, Parser, Receiver, Sender
from ...storage_backends.peer.wire import (
    FRAME_BYTES,
    REQUESTS_MAX,
    Done,
    Forget,
    LocateReply,
    LocateRequest,
    LookupReply,
    LookupRequest,
    Message,
    ReadReply,
    ReadRequest,
    State,
    encode,
)
from .offers import Offer
from .served_pages import Begun, ServedPages

_GROUP_BYTES: Final = 1 << 20
"""So much is hashed, if need be, and then sent, while it is still in a core's cache."""
_GROUPS_AT_A_TIME: Final = 4
"""How many of these one reader gets before others have their turn."""


@dataclass(slots=True)
class _Job:
    """A fetch, and how much of it has been answered."""

    fetch: ReadRequest | LocateRequest
    at: int = 0
    is_forgotten: bool = False


class Reader:
    """Sends one reader what it asks for."""

    def __init__(
        self,
        sock: socket.socket,
        tags: ConnectionTags,
        pages: ServedPages,
        ended: Callable[["Reader", str], None],
        *,
        stall_s: float,
    ) -> None:
        """`ended` is told when the connection has ended, and why if somebody has to know.

        The reader may take nothing for `stall_s`.
        """
        self._sock = sock
        self._tags = tags
        self._pages = pages
        self._ended = ended
        self._stall_s = stall_s
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[_Job] = deque()
        self._answers: list[Message] = []
        """Those to questions, which go out between two frames of pages."""
        self._frame: Iterator[Sequence[memoryview | bytes]] = iter(())
        self._held: list[Offer] = []
        """The operations whose pages are in the frame that is being sent."""
        self._located: dict[int, list[Offer]] = {}
        """Those of pages that the reader knows the places of, by the numbers of its requests."""
        self._sender = Sender(sock)
        self._receiver = Receiver(sock, self._requests())
        self._is_writing = False
        self._is_open = True
        self._moved_at = self._loop.time()
        self._stalled: asyncio.TimerHandle | None = None

    def start(self, hello: bytes) -> None:
        """Say hello, which is a frame, and begin to serve."""
        self._loop.add_reader(self._sock.fileno(), self._readable)
        self._sender.put(*self._tagged(hello))
        self._pump()

    def uses_pages_of(self, operation: Offer) -> bool:
        """Say whether a page of this operation is being sent, or read by an engine."""
        return operation in self._held or any(operation in each for each in self._located.values())

    def end(self, why: str = "") -> None:
        """End the connection, and touch no page any more. `why` is a complaint for the log."""
        if not self._is_open:
            return
        self._is_open = False
        self._ended(self, why)
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        if self._stalled is not None:
            self._stalled.cancel()
        self._jobs.clear()
        self._answers.clear()
        self._frame = iter(())
        self._sender.clear()
        self._settle()
        for number in list(self._located):
            self._let_go(number)

    def _readable(self) -> None:
        try:
            self._receiver.receive()
        except OSError:
            # A reader that has gone is nothing to complain of.
            self.end()
        except StorageError as error:
            self.end(str(error))
        else:
            self._pump()

    def _requests(self) -> Parser:
        head = FrameHead(self._tags.received)
        while True:
            yield from head.receive()
            message = head.message
            if head.attached_bytes:
                raise StorageError("a request with something attached")
            match message:
                case LookupRequest():
                    self._answers.append(
                        LookupReply(message.number, self._pages.lookup_reply(message))
                    )
                case ReadRequest():
                    self._jobs.append(_Job(message))
                case LocateRequest() if self._pages.by_engine:
                    self._jobs.append(_Job(message))
                case Done() if message.number in self._located:
                    self._let_go(message.number)
                case Forget():
                    for job in self._jobs:
                        job.is_forgotten |= job.fetch.number == message.number
                case _:
                    raise StorageError(f"a {type(message).__name__} out of place")
            if len(self._jobs) + len(self._answers) + len(self._located) > REQUESTS_MAX:
                raise StorageError(f"it asks for more than {REQUESTS_MAX} things at a time")

    def _pump(self) -> None:
        """Send what the kernel takes, and put frame after frame together."""
        if not self._is_open:
            return
        moved = 0
        try:
            for _ in range(_GROUPS_AT_A_TIME):
                moved += self._sender.send()
                if not self._sender.is_empty():
                    break
                views = next(self._frame, None)
                if views is None:
                    self._settle()
                    if self._answers:
                        for answer in self._answers:
                            self._sender.put(*self._tagged(encode(answer)))
                        self._answers.clear()
                        continue
                    if not self._jobs:
                        break
                    self._frame = self._next_frame()
                    views = next(self._frame)
                self._sender.put(*views)
        except OSError:
            self.end()
            return
        except StorageError as error:
            self.end(str(error))
            return
        self._watch(moved)

    def _settle(self) -> None:
        """Give back what was held for a frame: it was sent whole, or never will be."""
        held, self._held = self._held, []
        for operation in held:
            self._pages.end(operation)

    def _let_go(self, number: int) -> None:
        """Give back what was held for an engine to read."""
        for operation in self._located.pop(number):
            self._pages.end(operation)

    def _watch(self, moved: int) -> None:
        """Be called again when the kernel takes more, and look after readers that take nothing."""
        waits = bool(self._jobs or self._held or self._answers)
        writes = waits or not self._sender.is_empty()
        if writes and not self._is_writing:
            self._loop.add_writer(self._sock.fileno(), self._pump)
        elif self._is_writing and not writes:
            self._loop.remove_writer(self._sock.fileno())
        self._is_writing = writes
        if moved:
            self._moved_at = self._loop.time()
        if writes and self._stalled is None:
            self._stalled = self._loop.call_later(self._stall_s, self._look_whether_stalled)

    def _look_whether_stalled(self) -> None:
        self._stalled = None
        if not self._is_writing:
            return
        since_s = self._loop.time() - self._moved_at
        if since_s >= self._stall_s:
            self.end(f"it has taken nothing for {self._stall_s:g} s")
        else:
            left_s = self._stall_s - since_s
            self._stalled = self._loop.call_later(left_s, self._look_whether_stalled)

    def _next_frame(self) -> Iterator[Sequence[memoryview | bytes]]:
        job = self._jobs[0]
        if isinstance(job.fetch, LocateRequest):
            return self._places_of(job, job.fetch)
        return self._frame_of(job)

    def _places_of(
        self, job: _Job, locate: LocateRequest
    ) -> Iterator[Sequence[memoryview | bytes]]:
        """Hold all that is wanted, and yield where it lies once its checksums are there."""
        if locate.number in self._located:
            raise StorageError("it asks under a number that it has not done with")
        held = self._located[locate.number] = []
        begun: list[Begun | None] = []
        for key in locate.keys:
            one = None if job.is_forgotten else self._pages.begin(locate, key)
            begun.append(one)
            if one is not None:
                held.append(one.operation)
        headers: list[bytes] = []
        hashed_bytes = 0
        for one in begun:
            if one is None:
                continue
            headers.append(one.header())
            hashed_bytes += len(one.page)
            if hashed_bytes >= _GROUP_BYTES:
                yield []
                hashed_bytes = 0
        self._jobs.popleft()
        states = bytes([State.ABSENT if one is None else one.state for one in begun])
        places = tuple([0 if one is None else address_of(one.page) for one in begun])
        located = LocateReply(locate.number, states, places)
        group = self._tagged(encode(located, HEADER_BYTES * len(headers)))
        if headers:
            attached = b"".join(headers)
            group += [attached, self._tags.sent.of(attached)]
        yield group

    def _frame_of(self, job: _Job) -> Iterator[Sequence[memoryview | bytes]]:
        """Begin to send the next objects of a fetch, and yield their bytes, some of them at a time."""
        fetch, first, attached_bytes = job.fetch, job.at, 0
        states = bytearray()
        begun: list[Begun] = []
        while job.at < len(fetch.keys) and attached_bytes < FRAME_BYTES:
            one = None
            if not job.is_forgotten:
                one = self._pages.begin(fetch, fetch.keys[job.at])
            states.append(State.ABSENT if one is None else one.state)
            if one is not None:
                self._held.append(one.operation)
                begun.append(one)
                attached_bytes += one.nbytes
            job.at += 1
        if job.at == len(fetch.keys):
            self._jobs.popleft()
        control = encode(ReadReply(fetch.number, first, bytes(states)), attached_bytes)
        group = self._tagged(control)
        running = self._tags.sent.begin() if attached_bytes else None
        group_bytes = 0
        for one in begun:
            views: list[memoryview | bytes] = [one.header(), *one.wanted]
            if running is not None:
                running.add(views)
            group += views
            group_bytes += one.nbytes
            if group_bytes >= _GROUP_BYTES:
                yield group
                group, group_bytes = [], 0
        if running is not None:
            group.append(running.end())
        yield group

    def _tagged(self, frame: bytes) -> list[memoryview | bytes]:
        """Return a frame, but for what is attached, and its tag, which is to be sent next."""
        return [frame, self._tags.sent.of(frame)]
