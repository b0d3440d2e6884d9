"""Opening an unusable `s3://` store: the error names the store, the reason and the remedy."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from tests.kit.storage.calls import run

pytest.importorskip("obstore", reason="needs the extra s3")
from lockstep.errors import ConfigError
from lockstep.storage_backends.registry import make_backend
from lockstep.storage_backends.s3 import backend as s3
from tests.kit.storage.s3 import BucketStore, Proxy

WRONG = "the server refuses the credentials of this process (403 Forbidden, InvalidAccessKeyId); "
NONE = "the server refuses requests without credentials (403 Forbidden, InvalidAccessKeyId); "


@asynccontextmanager
async def answering(status: str, body: bytes = b"") -> AsyncGenerator[str]:
    """Run a server that gives every request the same answer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %s\r\nConnection: close\r\n" % status.encode())
        writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def refused_opening(uri: str) -> str:
    with pytest.raises(ConfigError) as caught:
        await make_backend(uri).open()
    return str(caught.value)


@pytest.mark.parametrize("options", ["", "&read_only=1"])
def test_a_bucket_that_does_not_exist_is_said_to_be_so_when_it_is_opened(
    s3_endpoint: str, options: str
) -> None:
    message = run(refused_opening(f"s3://bucket-none/kv?endpoint={s3_endpoint}{options}"))
    assert message == (
        f"store s3://bucket-none/kv cannot be used: bucket 'bucket-none' does not exist at "
        f"{s3_endpoint}; create it, or give another"
    )


@pytest.mark.parametrize("options", ["", "&read_only=1"])
def test_a_server_that_is_down_is_said_to_be_so_when_it_is_opened(options: str) -> None:
    endpoint = "http://127.0.0.1:1"
    message = run(refused_opening(f"s3://bucket/kv?endpoint={endpoint}{options}"))
    assert message == (
        f"store s3://bucket/kv cannot be used: nothing answers at {endpoint} (connection refused); "
        "start the server, or correct endpoint="
    )


def test_a_process_without_credentials_is_told_how_to_get_some(
    bucket: BucketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    # Without keys, the client requests a role from this endpoint, which refuses connections.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    message = run(refused_opening(bucket.uri()))
    assert message == (
        f"store s3://{bucket.bucket}/{bucket.prefix} cannot be used: no credentials were found; set "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, give the machine a role, or add anonymous=1"
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("", f"{WRONG}give some that may read and write the bucket"),
        ("&read_only=1", f"{WRONG}give some that may list and read the bucket"),
        (
            "&anonymous=1",
            f"{NONE}leave anonymous=1 out, and give credentials that may read and write the bucket",
        ),
    ],
)
async def test_wrong_credentials_are_said_to_be_wrong(
    bucket: BucketStore, options: str, problem: str
) -> None:
    body = b'<?xml version="1.0"?>\n<Error><Code>InvalidAccessKeyId</Code><Message>No</Message></Error>'

    async with answering("403 Forbidden", body) as endpoint:
        message = await refused_opening(bucket.uri(endpoint, options))

    assert message == f"store s3://{bucket.bucket}/{bucket.prefix} cannot be used: {problem}"


async def test_a_server_that_is_silent_is_refused_when_it_is_opened(
    bucket: BucketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_OPEN_TIMEOUT_S", 0.1)

    proxy = Proxy(bucket.endpoint)
    proxy.hang = True
    async with proxy.serving() as endpoint:
        with pytest.raises(ConfigError, match="did not answer"):
            await bucket.backend(endpoint).open()


async def test_a_server_that_ignores_conditions_is_refused(bucket: BucketStore) -> None:
    async with answering('200 OK\r\nETag: "1"') as endpoint:
        with pytest.raises(ConfigError, match="If-None-Match"):
            await bucket.backend(endpoint).open()
