"""One rank's server of its host pages, for readers of other groups (`peer://`).

It has a thread of its own with an event loop, which alone touches sockets and offers. The engine's
thread hands in what may be read and what no longer, and never waits. A page is touched only between
`serve` and the call of `on_quiet` that answers `withdraw`: the caller keeps the pages as they are for
so long. A page whose slot is written again before that is not sent, because its generation has changed.
"""

import asyncio
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from ...errors import ConfigError, StorageError, UsageError
from ...storage_backends.error_log import LoggedError
from ...storage_backends.peer.handshake import greet_reader
from ...storage_backends.peer.transfer_engine import TransferEngine
from ...storage_backends.peer.wire import Hello, PeerRank, encode
from ..executor.storage_transfers import RankObjects
from ..protocol.host_port import (
    joined_address,
    split_address,
    split_host,
)
from ..protocol.orders import ObjectTransfer
from .offers import Offer, OfferedPage, Offers, OnQuiet
from .reader import Reader
from .served_pages import Sent, ServedPages

_log = logging.getLogger(__name__)

_BACKLOG: Final = 128
_ACCEPT_AGAIN_S: Final = 0.1
"""After an accept that failed, as it does without free file descriptors."""
CLOSE_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerBounds:
    """Limits on what readers may cost a rank."""

    readers: int = 256
    """The most readers at a time; each has a connection."""
    quiet_s: float = 3.0
    """After so long a reader is cut off that still reads a page which is withdrawn."""
    stall_s: float = 30.0
    """After so long a reader is cut off that takes nothing of what it has asked for."""
    greetings: int = 64
    """The most at a time who have not shown yet that they know the secret."""
    greeting_s: float = 5.0
    """How long each of them may take to show it."""


class HostPageServer:
    """Serves host pages of one rank while they are offered; see `executor.base.HostPageServer`.

    Its methods are for one thread.
    """

    def __init__(
        self,
        objects: RankObjects,
        address: str = "127.0.0.1:0",
        *,
        secret: str = "",
        reached_at: str = "",
        bounds: ServerBounds | None = None,
        make_engine: Callable[[str], TransferEngine | None] = lambda _: None,
    ) -> None:
        """Bind `address`, a host:port whose port may be 0; readers wait until `open`.

        `reached_at` is the host, or host:port, by which readers reach it, if that is another one; with
        that host `make_engine` makes the transfer engine by which they may read pages. Raises
        `ConfigError` if the address cannot be bound, or can be reached from other hosts and there is no
        secret; and what `make_engine` raises.
        """
        self._objects = objects
        self._secret = secret.encode()
        self._bounds = bounds or ServerBounds()
        self.offers = Offers()
        """The pages that readers can read now; only the server's thread may change them."""
        self._readers: set[Reader] = set()
        self._greetings: dict[asyncio.Task[None], None] = {}
        """Of readers who have not shown yet that they know the secret, the oldest first."""
        self._accepts, self._refusals, self._cuts = (LoggedError(_log) for _ in range(3))
        self._hello = b""
        self._trouble: str | None = None
        self._sock, port = _bind(address, secret, reached_at)
        host, given_port = split_host(reached_at or address)
        try:
            self._engine = make_engine(host)
            if self._engine is not None:
                self._engine.register(objects.memory())
        except BaseException:
            self._sock.close()
            raise
        self._pages = ServedPages(objects, self.offers, by_engine=self._engine is not None)
        engine = "" if self._engine is None else self._engine.address
        advertised_address = joined_address(host, given_port or port)
        self.rank = PeerRank(advertised_address, self._pages.shards, engine)
        """This rank's address and shards, which `open` sends to the other ranks of the group."""
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._lock = threading.Lock()
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="lockstep-pages", daemon=True)

    @property
    def address(self) -> str:
        return self.rank.address

    def open(self, ranks: Sequence[PeerRank]) -> None:
        """Begin to serve, and tell readers that these are the ranks of the group; does not wait.

        Raises `UsageError` if this rank is none of them, and `ConfigError` if they are too many.
        """
        if self.rank not in ranks:
            raise UsageError(f"the ranks that serve pages lack this one, {self.address}")
        hello = Hello(ranks.index(self.rank), self._objects.namespace, tuple(ranks))
        try:
            self._hello = encode(hello)
        except StorageError as error:
            raise ConfigError(f"{len(ranks)} ranks cannot serve pages together: {error}") from None
        self._thread.start()

    def serve(self, operation: int, transfers: Sequence[ObjectTransfer]) -> None:
        """May come several times for one operation, and one object may be under several."""
        offered = [
            OfferedPage((transfer.pool, key.hex()), lease)
            for transfer in transfers
            for key, lease in zip(
                transfer.keys, self._objects.leases(transfer.pool, transfer.pages), strict=True
            )
        ]
        self._hand_in(partial(self.offers.serve, operation, offered))

    def withdraw(self, operation: int, on_quiet: Callable[[int], None]) -> None:
        """Call `on_quiet` from the server's thread, after `bounds.quiet_s` at the latest.

        At once if the server has ended.
        """
        if not self._hand_in(partial(self._withdraw, operation, on_quiet)):
            on_quiet(operation)

    def sent(self) -> Sent:
        """Return how much was sent since the server was made."""
        return self._pages.sent

    def trouble(self) -> str | None:
        return self._trouble

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Cut all readers off and end; say whether that is so in time. Idempotent."""
        if self._thread.ident is None:
            # It was never opened, and what was handed in is still to be answered.
            self._thread.start()
        self._hand_in(self._stopping.set)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self._engine is not None:
            self._engine.close()
        return True

    def _hand_in(self, work: Callable[[], None]) -> bool:
        """Have something done on the server's thread; False if that has ended."""
        with self._lock:
            if self._has_ended:
                return False
            self._loop.call_soon_threadsafe(work)
            return True

    def _withdraw(self, number: int, on_quiet: OnQuiet) -> None:
        operation = self.offers.withdraw(number, partial(_tell, on_quiet))
        if operation is not None:
            self._loop.call_later(self._bounds.quiet_s, self._cut_off, operation)

    def _cut_off(self, operation: Offer) -> None:
        for reader in [each for each in self._readers if each.uses_pages_of(operation)]:
            reader.end(f"it still reads what was withdrawn {self._bounds.quiet_s:g} s ago")

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._live())
            except BaseException as error:  # noqa: BLE001 - the rank must know.
                self._trouble = f"the page server has ended: {error!r}"
                _log.error("%s", self._trouble)

    async def _live(self) -> None:
        accepting = asyncio.create_task(self._accept())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([accepting, stopping], return_when=asyncio.FIRST_COMPLETED)
            if accepting.done():
                accepting.result()
        finally:
            for task in (accepting, stopping, *self._greetings):
                task.cancel()
            await asyncio.wait([accepting, stopping, *self._greetings])
            self._sock.close()
            for reader in list(self._readers):
                reader.end()
            with self._lock:
                self._has_ended = True
            # What was handed in before is still done, in the loop's next turn.
            await asyncio.sleep(0)
            self.offers.withdraw_all()

    async def _accept(self) -> None:
        while True:
            try:
                sock, place = await self._loop.sock_accept(self._sock)
            except OSError as error:
                self._accepts.warn("no reader can connect: %s", error)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            if len(self._greetings) >= self._bounds.greetings:
                # Whoever knows the secret shows it at once: strangers keep nobody out by waiting.
                oldest = next(iter(self._greetings))
                del self._greetings[oldest]
                oldest.cancel()
            task = self._loop.create_task(self._greet(sock, joined_address(*place[:2])))
            self._greetings[task] = None
            task.add_done_callback(partial(self._greeted, sock))

    def _greeted(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._greetings.pop(task, None)
        if task.cancelled():
            # One that was cancelled before its first turn has not closed it.
            sock.close()

    async def _greet(self, sock: socket.socket, place: str) -> None:
        """Let a reader show that it may read, and serve it from then on."""
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            full = len(self._readers) >= self._bounds.readers
            async with asyncio.timeout(self._bounds.greeting_s):
                tags = await greet_reader(sock, self._secret, self.address, full=full)
        except BaseException as error:
            sock.close()
            if isinstance(error, StorageError):
                self._refusals.warn("a reader at %s is refused: %s", place, error)
            elif not isinstance(error, OSError):
                raise
            return
        left = partial(self._left, place)
        reader = Reader(sock, tags, self._pages, left, stall_s=self._bounds.stall_s)
        self._readers.add(reader)
        reader.start(self._hello)

    def _left(self, place: str, reader: Reader, why: str) -> None:
        self._readers.discard(reader)
        if why:
            self._cuts.warn("the reader at %s is cut off: %s", place, why)


def _bind(address: str, secret: str, reached_at: str) -> tuple[socket.socket, int]:
    """Return a socket that listens at `address`, and its port."""
    try:
        host, port = split_address(address)
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (ConfigError, OSError, UnicodeError) as error:  # `idna` refuses names.
        raise ConfigError(
            f"pages cannot be served at {address!r}: {error}; give an address or a name of this host"
        ) from None
    found = ipaddress.ip_address(str(place[0]).partition("%")[0])
    if not (secret or found.is_loopback):
        raise ConfigError(
            f"pages are to be served at {address!r}, which other hosts can reach, and there is no"
            " secret; give both groups the same one, or serve at 127.0.0.1"
        )
    if found.is_unspecified and not reached_at:
        raise ConfigError(
            f"pages are to be served at {address!r}, which is no address that readers could be told;"
            " say by which host they reach it"
        )
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(_BACKLOG)
        return sock, int(sock.getsockname()[1])
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"pages cannot be served at {address!r}: {error.strerror or error}; give another"
            " address, or port 0 for any that is free"
        ) from None


def _tell(on_quiet: OnQuiet, operation: int) -> None:
    try:
        on_quiet(operation)
    except Exception:  # noqa: BLE001 - a stranger's function must not end the server.
        _log.exception("nobody could be told that operation %d is quiet", operation)
