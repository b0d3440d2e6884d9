"""The limit of a store that is reached over the network: a bare connection."""

import socket
import statistics
import threading
import time
from typing import Final

from ..cli.environment import LOOPBACK

_TURNS: Final = 8
_PIECE_BYTES: Final = 1 << 20
_TIMEOUT_S: Final = 10.0


def connect_us(host: str, port: int) -> float:
    """Return what one connection takes, which is one way there and back. Raises `OSError`."""
    took: list[float] = []
    for _ in range(_TURNS):
        began = time.perf_counter()
        with socket.create_connection((host, port), timeout=_TIMEOUT_S):
            took.append((time.perf_counter() - began) * 1e6)
    return statistics.median(took)


def bare_connection_gbps(nbytes: int) -> float:
    """Return how fast so many bytes go over one connection inside this machine."""
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
