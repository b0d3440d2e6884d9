"""Bytes in and out of a connection, straight from and into the memory that they belong to.

Both sides work on an event loop's thread, on sockets that do not block. Memory is touched only within
a call of `receive` or `send`: between two calls nobody but the kernel, which has its own copy, has
anything to do with it. So whoever holds the loop's thread can take memory back at any time.
"""

import socket
from collections import deque
from collections.abc import Generator, Sequence
from typing import Final

from .frame_tags import FrameTags
from .wire import CONTROL_BYTES_MAX, MESSAGES, PREFIX_BYTES, Message, decode_prefix

Sinks = Sequence[memoryview]
"""Memory to fill, one view after the other."""
Parser = Generator[Sinks, None, None]
"""Yields what is to be filled next, and goes on once it is; raises `StorageError` for nonsense."""

_VIEWS_MAX: Final = 512
"""The most views of one system call; the kernel takes 1024."""
_TURN_BYTES: Final = 4 << 20
"""How much is moved before others of the same loop have their turn."""
_SCRATCH: Final = memoryview(bytearray(256 << 10))
"""Where bytes go that nobody wants any more; of all connections, and never read."""


class Receiver:
    """Fills what a parser asks for."""

    def __init__(self, sock: socket.socket, parser: Parser) -> None:
        self._sock = sock
        self._parser = parser
        self._sinks: deque[memoryview] = deque()
        self._ask()

    def receive(self) -> int:
        """Receive what has come, up to a bound; return how many bytes that were.

        Raises `OSError` where the connection has broken or ended, and what the parser raises.
        """
        received = 0
        while received < _TURN_BYTES:
            wanted, views = self._next_views()
            try:
                count = (
                    self._sock.recv_into(views[0])
                    if len(views) == 1
                    else self._sock.recvmsg_into(views)[0]
                )
            except (BlockingIOError, InterruptedError):
                break
            if not count:
                raise ConnectionResetError("the other side has hung up")
            received += count
            self._took(count)
            if count < wanted:
                # There was no more: to ask again would only be told so.
                break
        return received

    def divert(self) -> None:
        """Let what is still to come into the present sinks go nowhere; they are not touched again."""
        left = sum(map(len, self._sinks))
        self._sinks = deque(scratch(left))

    def _next_views(self) -> tuple[int, list[memoryview]]:
        views = [self._sinks[at] for at in range(min(len(self._sinks), _VIEWS_MAX))]
        return sum(map(len, views)), views

    def _took(self, count: int) -> None:
        sinks = self._sinks
        while count:
            first = sinks[0]
            if count < len(first):
                sinks[0] = first[count:]
                return
            count -= len(first)
            sinks.popleft()
        if not sinks:
            self._ask()

    def _ask(self) -> None:
        """Have the parser say what comes next, until that is something."""
        while not self._sinks:
            self._sinks.extend(view for view in next(self._parser) if len(view))


def scratch(count: int) -> list[memoryview]:
    """Return sinks for `count` bytes that nobody wants."""
    whole, rest = divmod(count, len(_SCRATCH))
    # An empty view would be received into without end.
    return [_SCRATCH] * whole + [_SCRATCH[:rest]] * bool(rest)


class FrameHead:
    """Receives what each frame begins with, up to the tag of its control."""

    message: Message
    """The content of the last control frame."""
    attached_bytes: int
    """How many bytes are attached to it, and follow."""

    def __init__(self, tags: FrameTags) -> None:
        self._tags = tags
        self._room = memoryview(bytearray(PREFIX_BYTES + CONTROL_BYTES_MAX + tags.nbytes))

    def receive(self) -> Parser:
        """Yield what the next one is to be received into.

        Raises `StorageError` if it is not authentic.
        """
        room = self._room
        yield [room[:PREFIX_BYTES]]
        control_bytes, self.attached_bytes = decode_prefix(room[:PREFIX_BYTES])
        end = PREFIX_BYTES + control_bytes
        yield [room[PREFIX_BYTES : end + self._tags.nbytes]]
        self._tags.require(room[:end], room[end : end + self._tags.nbytes])
        self.message = MESSAGES.decode(room[PREFIX_BYTES:end])


class Sender:
    """Sends views in order, from where they lie."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._views: deque[memoryview] = deque()

    def put(self, *views: memoryview | bytes) -> None:
        """Have these sent after all that was put before; they must stay as they are until then."""
        self._views.extend(memoryview(view) for view in views if len(view))

    def is_empty(self) -> bool:
        """Say whether everything was sent: handed to the kernel, which has its own copy."""
        return not self._views

    def send(self) -> int:
        """Send what the kernel takes, up to a bound; return how many bytes that were.

        Raises `OSError` where the connection has broken.
        """
        sent = 0
        views = self._views
        while views and sent < _TURN_BYTES:
            some = [views[at] for at in range(min(len(views), _VIEWS_MAX))]
            try:
                count = self._sock.send(some[0]) if len(some) == 1 else self._sock.sendmsg(some)
            except (BlockingIOError, InterruptedError):
                break
            sent += count
            while count:
                first = views[0]
                if count < len(first):
                    views[0] = first[count:]
                    break
                count -= len(first)
                views.popleft()
        return sent

    def clear(self) -> None:
        """Send nothing more of what was put."""
        self._views.clear()
