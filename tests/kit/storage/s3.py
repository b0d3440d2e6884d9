"""Helpers for tests of `s3://`: a store in a bucket, and a proxy that injects failures."""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from urllib.parse import urlsplit

import obstore
from obstore.store import S3Store

from lockstep.page_format.object_header import HEADER_BYTES
from lockstep.page_format.object_name import ObjectName
from lockstep.storage_backends.s3.backend import S3Backend, from_uri
from lockstep.storage_backends.s3.objects import path_of
from lockstep.storage_backends.uri import parse_uri
from tests.kit.servers.moto_server import make_bucket
from tests.kit.storage.calls import using

_SWELLING = bytes(1 << 20)
_SWELLINGS = 256


class BucketStore:
    """An S3 store under the key prefix `prefix`, in a bucket that no other test uses."""

    def __init__(self, endpoint: str, bucket: str, prefix: str = "kv/pages") -> None:
        make_bucket(endpoint, bucket)
        self.endpoint = endpoint
        self.bucket = bucket
        self.prefix = prefix

    @cached_property
    def client(self) -> S3Store:
        """Return a client with direct access to the bucket, created at its first use."""
        return S3Store(
            self.bucket,
            prefix=self.prefix,
            config={"endpoint": self.endpoint, "virtual_hosted_style_request": False},
            client_options={"allow_http": True},
        )

    def uri(self, endpoint: str | None = None, options: str = "") -> str:
        return f"s3://{self.bucket}/{self.prefix}?endpoint={endpoint or self.endpoint}{options}"

    def backend(self, endpoint: str | None = None, options: str = "") -> S3Backend:
        return from_uri(parse_uri(self.uri(endpoint, options)))

    @asynccontextmanager
    async def behind_proxy(self, options: str = "") -> AsyncGenerator[tuple[S3Backend, "Proxy"]]:
        """Open a backend behind a proxy; yield both. The requests of the opening are not recorded."""
        proxy = Proxy(self.endpoint)
        async with (
            proxy.serving() as endpoint,
            using(self.backend(endpoint, options)) as backend,
        ):
            proxy.forget()
            yield backend, proxy

    def content(self, name: ObjectName) -> bytes:
        return bytes(obstore.get(self.client, existing(name)).bytes())

    def overwrite(self, name: ObjectName, content: bytes) -> None:
        obstore.put(self.client, existing(name), content)

    def spoil(self, name: ObjectName, at: int = 0) -> None:
        content = bytearray(self.content(name))
        content[HEADER_BYTES + at] ^= 8
        self.overwrite(name, bytes(content))

    def pass_off(self, name: ObjectName, other: ObjectName) -> None:
        self.overwrite(other, self.content(name))

    def paths(self) -> list[str]:
        return sorted(each["path"] for some in obstore.list(self.client) for each in some)


def existing(name: ObjectName) -> str:
    path = path_of(name)
    assert path is not None
    return path


class Proxy:
    """An HTTP proxy that records requests, and drops all responses while `hang` is True."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        assert parts.hostname is not None
        assert parts.port is not None
        self._upstream = (parts.hostname, parts.port)
        self._links: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.requests: list[str] = []
        """The HTTP method of each request, in order."""
        self.bytes_back = 0
        self.hang = False
        self.refuses: Callable[[str], bool] = lambda _: False
        """Predicate on the path and query of a GET. If it is true, the proxy answers with an error."""
        self.flips = 0
        """Number of further responses of more than 4096 bytes in which the proxy flips one bit."""
        self.swells = False
        """Whether the proxy appends 256 MiB to each long response."""
        self.request_arrived = asyncio.Event()
        """Event that is set whenever a request arrives."""
        self.dropped = asyncio.Event()
        """Event that is set when a client closes a connection."""

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[str]:
        """Run the proxy during the block; yield its URL."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for writer in list(self._links):
                writer.close()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def drop(self) -> None:
        for writer in list(self._links):
            writer.close()

    def fall_silent_at(self, words: str) -> asyncio.Event:
        """From the first GET whose path contains `words`, drop the responses to all requests.

        Return an event that is set when this GET arrives.
        """
        silent = asyncio.Event()

        def hear(path: str) -> bool:
            if words in path:
                self.hang = True
                silent.set()
            return False

        self.refuses = hear
        return silent

    def forget(self) -> None:
        self.requests.clear()
        self.bytes_back = 0

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._link(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(*self._upstream)
        self._links |= {writer, there_writer}
        back = asyncio.create_task(self._give_back(there_reader, writer))
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                verb = data.split(b" ", 1)[0]
                if verb in (b"GET", b"PUT", b"HEAD", b"DELETE", b"POST"):
                    self.requests.append(verb.decode())
                    self.request_arrived.set()
                if verb == b"GET" and self.refuses(data.split(b" ", 2)[1].decode()):
                    writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
                    continue
                there_writer.write(data)
                await there_writer.drain()
        self.dropped.set()
        there_writer.close()
        await back
        writer.close()
        self._links -= {writer, there_writer}

    async def _give_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if self.hang:
                    continue
                if self.flips and len(data) > 4096:
                    self.flips -= 1
                    data = data[:-1] + bytes([data[-1] ^ 1])
                if self.swells:
                    length = re.search(rb"Content-Length: ([0-9]{4,})", data)
                    if length is not None:
                        swollen = b"%d" % (int(length[1]) + len(_SWELLING) * _SWELLINGS)
                        data = data[: length.start(1)] + swollen + data[length.end(1) :]
                self.bytes_back += len(data)
                writer.write(data)
                await writer.drain()
                if self.swells and len(data) > 4096:
                    for _ in range(_SWELLINGS):
                        writer.write(_SWELLING)
                        await writer.drain()
                        self.bytes_back += len(_SWELLING)
        if not self.hang:
            writer.close()
