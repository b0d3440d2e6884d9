"""One connection to one rank of the serving group: sends requests and receives the answers.

Everything runs on the event loop's thread. The rank answers requests in the order of sending. An
abandoned request therefore stays in the queue, until its late answer was received and discarded.
"""

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec import structs

from ...errors import ConfigError, StorageError
from ...ranks.protocol.allowed_sources import AllowedSources
from ...ranks.protocol.host_port import is_loopback, split_address
from .frame_tags import ConnectionTags
from .handshake import greet_server, receive_exactly
from .one_sided import OneSidedReads, StagedReply, headers_of
from .requests import LookupQuestion, PartsRead, PeerRequest
from .streams import FrameHead, Parser, Receiver, Sender
from .wire import (
    REQUESTS_MAX,
    Done,
    Forget,
    Hello,
    LocateReply,
    LocateRequest,
    LookupReply,
    Message,
    ReadReply,
    ReadRequest,
    encode,
)

SILENT_S: Final = 5.0
"""If a request times out, and nothing was received for this number of seconds while requests were
unanswered, the connection is closed."""


async def connect(
    address: str,
    secret: bytes,
    store: str,
    *,
    inflight_bytes: int,
    broke: Callable[[str], None],
    allowed: AllowedSources,
) -> "Connection":
    """Connect to the rank at `address`; return the connection once the rank has sent `Hello`.

    Raises `ConfigError` for an address that is not allowed, another version or secret, or a missing
    secret if the rank is on another host. Raises `StorageError` or `OSError` for temporary failures.
    `store` is the rank's name in error messages. If the connection breaks, `broke` is called with the
    reason, or with an empty text if no request was waiting.
    """
    loop = asyncio.get_running_loop()
    host, port = split_address(address)
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, place = found[0]
    allowed.require(host, str(place[0]))
    if not (secret or is_loopback(str(place[0]))):
        raise ConfigError(
            f"store {store!r} is at {place[0]}, which is not a loopback address, and has no secret to"
            " prove its identity; give both groups the same secret"
        )
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        await loop.sock_connect(sock, place)
        tags = await greet_server(sock, secret, store, address)
        head = FrameHead(tags.received)
        for sinks in head.receive():
            for sink in sinks:
                await receive_exactly(sock, sink)
        hello = head.message
        if not isinstance(hello, Hello) or head.attached_bytes:
            raise StorageError(f"store {store!r} did not send Hello first")
        return Connection(sock, tags, hello, inflight_bytes, broke)
    except BaseException:
        sock.close()
        raise


class Connection:
    """Sends requests to one rank, several at a time."""

    def __init__(
        self,
        sock: socket.socket,
        tags: ConnectionTags,
        hello: Hello,
        inflight_bytes: int,
        broke: Callable[[str], None],
    ) -> None:
        self.hello = hello
        self.is_open = True
        self._sock = sock
        self._tags = tags
        self._loop = asyncio.get_running_loop()
        self._inflight_bytes_max = inflight_bytes
        self._broke = broke
        self._waiting: deque[PeerRequest] = deque()
        self._sent: dict[int, PeerRequest] = {}
        """Unanswered requests in the order of sending."""
        self._one_sided: OneSidedReads | None = None
        self._target = ""
        self._staged: dict[int, StagedReply] = {}
        """Answers whose objects a transfer engine is reading now, by request number."""
        self._number = 0
        self._inflight_bytes = 0
        self._heard_at = 0.0
        self._receiving: PartsRead | None = None
        self._sender = Sender(sock)
        self._is_writing = False
        self._receiver = Receiver(sock, self._frames())
        self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def host(self) -> str:
        """Return this host's address on the route to the rank."""
        return str(self._sock.getsockname()[0])

    def read_by(self, one_sided: OneSidedReads, target: str) -> None:
        """Use a transfer engine for later reads; `target` is the address of the rank's engine."""
        self._one_sided, self._target = one_sided, target

    def submit(self, request: PeerRequest) -> None:
        """Queue the request, and send it when the limit of bytes in flight permits.

        On a closed connection the request finishes at once, without an answer.
        """
        if not self.is_open:
            request.finish()
            return
        self._waiting.append(request)
        self._send_waiting()

    def abandon(self, request: PeerRequest) -> None:
        """Stop touching the request's buffers at once, and ask the rank not to send the rest.

        Closes the connection if nothing was received from the rank for `SILENT_S`.
        """
        if not self.is_open or request.done.done():
            return
        if request in self._waiting:
            self._waiting.remove(request)
            return
        number = next(number for number, each in self._sent.items() if each is request)
        request.abandon()
        if self._receiving is request:
            self._receiver.discard_rest()
        if number in self._staged:
            # If the engine's read is still queued, it is cancelled here. A running read continues until
            # the library returns.
            self._staged[number].call.cancel()
        if time.monotonic() - self._heard_at >= SILENT_S:
            self.close(f"nothing was received for {SILENT_S:g} s")
            return
        self._send(Forget(number))

    def close(self, why: str = "") -> None:
        """Close the connection and finish all requests.

        If `why` (the reason) is not empty, calls `broke`. The argument is `why` if requests are
        waiting, otherwise an empty text. A connection that breaks without waiting requests is not an
        error, because a serving group that shuts down closes its connections.
        """
        if not self.is_open:
            return
        self.is_open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._sender.clear()
        left = (*self._sent.values(), *self._waiting)
        for request in left:
            request.finish()
        self._sent.clear()
        self._waiting.clear()
        if why:
            self._broke(why if left else "")

    def _send_waiting(self) -> None:
        while self._waiting and len(self._sent) < REQUESTS_MAX:
            request = self._waiting[0]
            room = self._inflight_bytes_max - self._inflight_bytes
            if self._inflight_bytes and request.nbytes > room:
                return
            if not self._sent:
                self._heard_at = time.monotonic()
            self._waiting.popleft()
            self._number += 1
            self._sent[self._number] = request
            self._inflight_bytes += request.nbytes
            message: Message = request.message(self._number)
            if self._one_sided is not None and isinstance(message, ReadRequest):
                message = LocateRequest(*structs.astuple(message))
            self._send(message)
            if not self.is_open:
                return

    def _send(self, message: Message) -> None:
        frame = encode(message)
        self._sender.put(frame, self._tags.sent.of(frame))
        self._writable()

    def _writable(self) -> None:
        try:
            self._sender.send()
        except OSError as error:
            self.close(str(error))
            return
        writes = not self._sender.is_empty()
        if writes and not self._is_writing:
            self._loop.add_writer(self._sock.fileno(), self._writable)
        elif self._is_writing and not writes:
            self._loop.remove_writer(self._sock.fileno())
        self._is_writing = writes

    def _readable(self) -> None:
        try:
            self._receiver.receive()
        except (OSError, StorageError) as error:
            self.close(str(error))
            return
        self._heard_at = time.monotonic()
        self._send_waiting()

    def _frames(self) -> Parser:
        """Parse the received frames one after the other."""
        head = FrameHead(self._tags.received)
        while True:
            yield from head.receive()
            message, attached_bytes = head.message, head.attached_bytes
            match message:
                case LookupReply() if not attached_bytes:
                    question = self._sent.get(message.number)
                    if not isinstance(question, LookupQuestion):
                        raise StorageError("an answer without a request")
                    question.answer(message.there)
                    self._answered(message.number)
                case ReadReply():
                    reading = self._sent.get(message.number)
                    if not isinstance(reading, PartsRead) or message.number in self._staged:
                        raise StorageError("objects that were not requested")
                    self._receiving = reading
                    yield from self._receive_pages(reading, message, attached_bytes)
                    self._receiving = None
                    reading.take(message)
                    if reading.is_answered:
                        self._answered(message.number)
                case LocateReply():
                    reading = self._sent.get(message.number)
                    if not isinstance(reading, PartsRead) or message.number in self._staged:
                        raise StorageError("locations that were not requested")
                    headers = headers_of(reading, message, attached_bytes)
                    yield [headers]
                    if headers:
                        tag = self._tags.received.room()
                        yield [tag]
                        self._tags.received.require(headers, tag)
                    self._read(reading, message, headers)
                case _:
                    raise StorageError(f"unexpected message {type(message).__name__}")

    def _receive_pages(self, reading: PartsRead, pages: ReadReply, attached_bytes: int) -> Parser:
        """Receive the bytes attached to the frame `pages`, and verify the frame's authentication tag.

        If the read was abandoned, the bytes are discarded without verification.
        """
        running = self._tags.received.begin() if attached_bytes else None
        for sinks in reading.receive(pages, attached_bytes):
            yield sinks
            if running is not None and not reading.is_abandoned():
                running.add(sinks)
        if running is not None:
            tag = self._tags.received.room()
            yield [tag]
            if not reading.is_abandoned():
                running.require(tag)

    def _read(self, reading: PartsRead, located: LocateReply, headers: memoryview) -> None:
        """Start the transfer engine's read from the memory addresses that the rank returned."""
        number = located.number
        if self._one_sided is None or reading.is_abandoned():
            self._done(number)
            return
        came = partial(self._came, self._one_sided, number)
        try:
            self._staged[number] = self._one_sided.begin(
                self._target, reading, located, headers, came
            )
        except StorageError as error:
            self._engine_failed(self._one_sided, str(error))
            self._done(number)

    def _came(self, one_sided: OneSidedReads, number: int, staged: StagedReply) -> None:
        """Pass the result of an engine's read to its request, if the request still waits for it."""
        if self.is_open:
            self._heard_at = time.monotonic()
            del self._staged[number]
            if staged.has_come:
                if not self._sent[number].is_abandoned():
                    staged.give()
            elif not staged.call.cancelled():
                self._engine_failed(one_sided, "a read has failed")
            self._done(number)
            self._send_waiting()
        one_sided.end(staged)

    def _done(self, number: int) -> None:
        self._answered(number)
        self._send(Done(number))

    def _engine_failed(self, one_sided: OneSidedReads, why: str) -> None:
        """Log that the engine failed, and read over the connection from now on.

        If the settings insist on the engine, later reads still use the engine.
        """
        if not one_sided.settings.insists:
            self._one_sided = None
        one_sided.failures.warn(
            "pages at %s cannot be read by Mooncake's transfer engine (%s)%s",
            self._target,
            why,
            "" if self._one_sided else "; they come over the connection from now on",
        )

    def _answered(self, number: int) -> None:
        request = self._sent.pop(number)
        self._inflight_bytes -= request.nbytes
        request.finish()
