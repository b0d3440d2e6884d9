"""Moves bytes between a socket and their final memory without copies.

Runs on an event loop's thread, with non-blocking sockets. Memory is touched only during a call of
`receive` or `send`, so code on the loop's thread can release memory at any time.
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
"""A generator that yields the memory to fill next, and is resumed once the memory is full. Raises
`StorageError` for invalid input."""

_VIEWS_MAX: Final = 512
"""Maximum views per system call; the kernel allows 1024."""
_TURN_BYTES: Final = 4 << 20
"""Maximum bytes per call of `receive` or `send`, so that other tasks on the event loop are not delayed.
"""
_SCRATCH: Final = memoryview(bytearray(256 << 10))
"""Memory into which the discarded bytes of all connections are received; never read."""


class Receiver:
    """Receives bytes from a socket into the memory that a parser yields."""

    def __init__(self, sock: socket.socket, parser: Parser) -> None:
        self._sock = sock
        self._parser = parser
        self._sinks: deque[memoryview] = deque()
        self._ask()

    def receive(self) -> int:
        """Receive the available bytes, up to a limit; return their number.

        Raises `OSError` if the connection has broken or ended, and the errors of the parser.
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
                raise ConnectionResetError("the other side has closed the connection")
            received += count
            self._took(count)
            if count < wanted:
                # Return without another call, which would only return EAGAIN: the socket has no more
                # bytes.
                break
        return received

    def discard_rest(self) -> None:
        """Stop writing to the memory that the parser yielded, and discard the bytes meant for it."""
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
        """Advance the parser until it yields memory that is not empty."""
        while not self._sinks:
            self._sinks.extend(view for view in next(self._parser) if len(view))


def scratch(count: int) -> list[memoryview]:
    """Return memory for the next `count` bytes, which are discarded."""
    whole, rest = divmod(count, len(_SCRATCH))
    # Leave out empty views: receiving into one would never end.
    return [_SCRATCH] * whole + [_SCRATCH[:rest]] * bool(rest)


class FrameHead:
    """Receives the first part of each frame: the lengths, the control and the control's tag.

    The control is the encoded message.
    """

    message: Message
    """The message decoded from the last received control."""
    attached_bytes: int
    """Number of bytes attached to the last received message."""

    def __init__(self, tags: FrameTags) -> None:
        self._tags = tags
        self._room = memoryview(bytearray(PREFIX_BYTES + CONTROL_BYTES_MAX + tags.nbytes))

    def receive(self) -> Parser:
        """Yield the memory for the lengths, the control and the control's tag of the next frame.

        Raises `StorageError` if the tag is invalid.
        """
        room = self._room
        yield [room[:PREFIX_BYTES]]
        control_bytes, self.attached_bytes = decode_prefix(room[:PREFIX_BYTES])
        end = PREFIX_BYTES + control_bytes
        yield [room[PREFIX_BYTES : end + self._tags.nbytes]]
        self._tags.require(room[:end], room[end : end + self._tags.nbytes])
        self.message = MESSAGES.decode(room[PREFIX_BYTES:end])


class Sender:
    """Sends queued views in order, without copies."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._views: deque[memoryview] = deque()

    def put(self, *views: memoryview | bytes) -> None:
        """Queue views to send. The caller must not change the memory of a view until it is sent."""
        self._views.extend(memoryview(view) for view in views if len(view))

    def is_empty(self) -> bool:
        """Return whether the kernel has a copy of all queued bytes."""
        return not self._views

    def send(self) -> int:
        """Send as much as the kernel accepts, up to a limit; return the number of bytes.

        Raises `OSError` if the connection has broken.
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
        """Remove from the queue all views that are not sent yet."""
        self._views.clear()
