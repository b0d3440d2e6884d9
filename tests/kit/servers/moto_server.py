"""An S3 server on loopback that implements S3 with moto, in a separate process.

python -m tests.kit.servers.moto_server: prints its port, and serves until its standard input closes

Moto's bundled server creates a connection, a thread and a log line for each request, which costs more
than the request. This server keeps connections open, as real stores do. It runs one moto request at a
time, because moto's conditional write first checks for the object and then stores it. Real stores do
both atomically.
"""

import asyncio
import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache, partial
from importlib import import_module
from io import BytesIO
from typing import Any
from urllib.parse import unquote_to_bytes
from urllib.request import Request, urlopen

from tests.kit.programs import program

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

KEYS = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "tests",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""Environment variables for the S3 client. Moto accepts any credentials, but requests must be signed.
"""
_ROOM_BYTES = 1 << 20
"""Number of bytes of a request that the server buffers before it stops reading from the connection."""


@lru_cache(maxsize=1)
def serve() -> str:
    """Start the server process, which ends with this process; return the server's URL."""
    command = program(__spec__.name)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(process.kill)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the S3 server did not start"
    return f"http://127.0.0.1:{json.loads(line)['port']}"


def make_bucket(endpoint: str, bucket: str) -> None:
    with urlopen(Request(f"{endpoint}/{bucket}", method="PUT"), timeout=30):  # noqa: S310 - loopback.
        pass


def environ_of(head: str) -> dict[str, Any]:
    """Return a request's line and headers as a WSGI environment without the body."""
    line, *headers = head.rstrip("\r\n").split("\r\n")
    verb, target, protocol = line.split(" ")
    path, _, query = target.partition("?")
    environ: dict[str, Any] = {
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": False,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
        "REQUEST_METHOD": verb,
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),
        "QUERY_STRING": query,
        "REQUEST_URI": target,
        "RAW_URI": target,
        "REMOTE_ADDR": "127.0.0.1",
        "SERVER_NAME": "127.0.0.1",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": protocol,
    }
    for header in headers:
        name, _, value = header.partition(":")
        key = name.upper().replace("-", "_")
        plain = key in ("CONTENT_TYPE", "CONTENT_LENGTH")
        environ[key if plain else f"HTTP_{key}"] = value.strip()
    return environ


def answer(application: Application, environ: dict[str, Any]) -> bytes:
    """Return the WSGI application's response as the bytes of an HTTP response."""
    from werkzeug.test import run_wsgi_app

    content, status, headers = run_wsgi_app(application, environ, buffered=True)
    body = b"".join(content)
    if "Content-Length" not in headers:
        headers["Content-Length"] = str(len(body))
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers), "\r\n"]
    return "\r\n".join(lines).encode("latin-1") + body


async def converse(
    application: Application, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer the requests of a connection in order until the client disconnects."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            environ = environ_of((await reader.readuntil(b"\r\n\r\n")).decode("latin-1"))
            body = await reader.readexactly(int(environ.get("CONTENT_LENGTH", 0)))
            writer.write(answer(application, environ | {"wsgi.input": BytesIO(body)}))
            await writer.drain()
    writer.close()


async def serve_here() -> None:
    # Moto has no type annotations for this function. The argument "s3" saves moto from detecting the
    # service of each request.
    application = import_module("moto.moto_server.werkzeug_app").create_backend_app("s3")
    server = await asyncio.start_server(
        partial(converse, application), "127.0.0.1", 0, limit=_ROOM_BYTES
    )
    sys.stdout.write(json.dumps({"port": server.sockets[0].getsockname()[1]}) + "\n")
    sys.stdout.flush()
    await server.serve_forever()


def end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    asyncio.run(serve_here())
