"""A wire that changes bytes on their way out of a page server."""

import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress

FAR = "127.0.0.2"
"""Where readers find the wire, which listens at the port of the server itself."""
_CHUNK = 1 << 14


class FlippingWire:
    """Takes connections for a server at 127.0.0.1, and flips a bit of each so many bytes it sends."""

    def __init__(self, port: int, every: int, first: int) -> None:
        """The bytes before `first`, with which a connection begins, stay as they are. 0: so do all."""
        self.flipped = 0
        self._port = port
        self._every = every
        self._first = first
        self._listening = socket.create_server((FAR, port))
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        for each in [self._listening, *self._open]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                reader, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self._open += [reader, server]
                for pair in ((reader, server, False), (server, reader, True)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, flips: bool) -> None:
        sent = 0
        with suppress(OSError):
            while data := bytearray(source.recv(_CHUNK)):
                if flips and self._every:
                    for at in self._places(sent, len(data)):
                        data[at] ^= 1
                        self.flipped += 1
                sent += len(data)
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _places(self, sent: int, count: int) -> Iterator[int]:
        for at in range(count):
            if sent + at >= self._first and not (sent + at) % self._every:
                yield at


@contextmanager
def wires(ports: list[int], *, flips_at: int, every: int, first: int) -> Generator[FlippingWire]:
    """Put a wire before each of these servers; yield the one that flips."""
    with ExitStack() as opened:
        made = [
            FlippingWire(port, every if rank == flips_at else 0, first)
            for rank, port in enumerate(ports)
        ]
        for each in made:
            opened.callback(each.close)
        yield made[flips_at]
