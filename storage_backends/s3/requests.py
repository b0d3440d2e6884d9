"""Requests to one bucket: wraps the S3 client, and classifies its errors.

Every method waits until fewer than the maximum number of requests are in flight, and can be cancelled
at any time. The store may or may not carry out a cancelled request. The client never accesses a
caller's memory: it receives into memory of its own, and sends copies.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from ...errors import ConfigError, StorageError
from .address import S3Address
from .ranges import Fetched, Range
from .refusals import Refusal, RefusalCause, first_line, refusal_of

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Store

_RETRIES_MAX: Final = 2
_BACKOFF: Final = timedelta(milliseconds=50)
_BACKOFF_MAX: Final = timedelta(milliseconds=500)
_RETRY_TIMEOUT: Final = timedelta(seconds=10)
_CONNECT_TIMEOUT: Final = timedelta(seconds=5)
_REQUEST_TIMEOUT: Final = timedelta(seconds=60)
"""Timeout of an S3 request. Calls have earlier deadlines, so the timeout matters only for requests that
no caller waits for any more."""
_LISTED_AT_A_TIME: Final = 256


class RequestFailed(StorageError):
    """The store did not answer a request, or refused it."""

    def __init__(self, message: str, refusal: Refusal | None = None) -> None:
        super().__init__(message)
        self.refusal = refusal or Refusal(RefusalCause.OTHER, message)


class Changed(StorageError):
    """An S3 object was replaced while its ranges were read."""


class Listed(NamedTuple):
    """One S3 object in a listing of the bucket."""

    path: str
    size: int
    written: datetime


class S3Requests:
    """Sends requests for one bucket, below the address's prefix. Used from one event loop.

    All methods raise `RequestFailed` if the store refuses or does not answer.
    """

    def __init__(self, address: S3Address) -> None:
        self._address = address
        self._turns = asyncio.Semaphore(address.concurrency)
        self._client: S3Store | None = None

    def open(self) -> None:
        """Create the client, without sending a request. Raises `ConfigError`."""
        try:
            from obstore.store import S3Store
        except ImportError as error:
            raise ConfigError(
                f"store {self._address}: s3:// needs obstore; pip install 'obstore>=0.12'"
            ) from error
        address = self._address
        config: S3Config = {"conditional_put": "etag", "disable_bulk_delete": True}
        options: ClientConfig = {"connect_timeout": _CONNECT_TIMEOUT, "timeout": _REQUEST_TIMEOUT}
        if address.endpoint is not None:
            config["endpoint"] = address.endpoint
            config["virtual_hosted_style_request"] = False
            options["allow_http"] = address.endpoint.startswith("http:")
        if address.region is not None:
            config["region"] = address.region
        if address.anonymous:
            config["skip_signature"] = True
        retries: RetryConfig = {
            "max_retries": _RETRIES_MAX,
            "backoff": {"init_backoff": _BACKOFF, "max_backoff": _BACKOFF_MAX, "base": 2},
            "retry_timeout": _RETRY_TIMEOUT,
        }
        try:
            self._client = S3Store(
                address.bucket,
                prefix=address.prefix or None,
                config=config,
                client_options=options,
                retry_config=retries,
            )
        except Exception as error:  # noqa: BLE001 - whatever the client dislikes is configuration.
            raise ConfigError(
                f"store {address}: the S3 client cannot be set up: {first_line(error)}"
            ) from None

    def close(self) -> None:
        """Drop the client, which closes its unused connections. Idempotent."""
        self._client = None

    async def size(self, path: str) -> tuple[int, str | None] | None:
        """Return (length, version) of the S3 object, or None if there is no object."""
        import obstore

        async with self._turn("HEAD", path) as client:
            try:
                found = await obstore.head_async(client, path)
            except FileNotFoundError:
                return None
            return found["size"], found["e_tag"]

    async def fetch(self, path: str, ranges: Sequence[Range]) -> Fetched | None:
        """Read ranges (ascending) of an S3 object and return their bytes; None if there is no object.

        A range beyond the object's end is cut off there. Raises `Changed` if the ranges are of
        different versions.
        """
        async with asyncio.TaskGroup() as group:
            # Return failures as values, because the task group would wrap an exception. The first
            # failure is raised after all tasks have ended.
            tasks = [group.create_task(self._kept(path, each)) for each in ranges]
        parts = [task.result() for task in tasks]
        for part in parts:
            if isinstance(part, RequestFailed):
                raise part
        found = [part for part in parts if isinstance(part, Fetched)]
        if not found:
            return None
        if len(found) < len(parts) or len({(each.size, each.e_tag) for each in found}) > 1:
            raise Changed(f"{path} was replaced while it was read")
        pieces = tuple(piece for each in found for piece in each.pieces)
        return Fetched(pieces, found[0].size, found[0].e_tag)

    async def create(self, path: str, content: bytes) -> str | None:
        """Create an S3 object and return its version; None if the path is taken.

        The version is an empty string if the store has no versions.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        async with self._turn("PUT", path) as client:
            try:
                stored = await obstore.put_async(
                    client, path, content, mode="create", use_multipart=False
                )
            except (AlreadyExistsError, PreconditionError):
                return None
            return stored["e_tag"] or ""

    async def replace(self, path: str, content: bytes, e_tag: str | None) -> bool:
        """Replace an S3 object if it still has the version `e_tag`; return whether it was replaced."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        if not e_tag:
            raise RequestFailed(f"{path}: the store gives no versions, so nothing can be replaced")
        async with self._turn("PUT", path) as client:
            try:
                await obstore.put_async(
                    client, path, content, mode={"e_tag": e_tag}, use_multipart=False
                )
            except (AlreadyExistsError, PreconditionError, FileNotFoundError):
                return False
            return True

    async def delete(self, path: str) -> None:
        """Remove the S3 object if it exists."""
        import obstore

        async with self._turn("DELETE", path) as client:
            try:
                await obstore.delete_async(client, path)
            except FileNotFoundError:
                return

    async def listing(self, folder: str) -> AsyncIterator[list[Listed]]:
        """Yield the S3 objects below `folder` in batches."""
        import obstore

        stream = None
        while True:
            async with self._turn("LIST", folder) as client:
                if stream is None:
                    stream = obstore.list(client, folder, chunk_size=_LISTED_AT_A_TIME)
                try:
                    found = await anext(stream)
                except StopAsyncIteration:
                    return
            yield [Listed(each["path"], each["size"], each["last_modified"]) for each in found]

    async def _kept(self, path: str, wanted: Range) -> Fetched | RequestFailed | None:
        try:
            return await self._range(path, wanted)
        except RequestFailed as error:
            return error

    async def _range(self, path: str, wanted: Range) -> Fetched | None:
        import obstore
        from obstore.exceptions import GenericError

        async with self._turn("GET", path) as client:
            try:
                answer = await obstore.get_async(client, path, options={"range": wanted})
                content = await _body(answer, wanted.end - wanted.start)
            except FileNotFoundError:
                return None
            except GenericError as error:
                # The store answers 416 if a range starts beyond the object's end. In this case return
                # the object's length without bytes.
                if "416" not in str(error):
                    raise
            else:
                meta = answer.meta
                return Fetched(((wanted.start, content),), meta["size"], meta["e_tag"])
        found = await self.size(path)
        if found is None:
            return None
        size, e_tag = found
        if size > wanted.start:
            raise RequestFailed(f"GET {path}: the store refuses a range within the file")
        return Fetched((), size, e_tag)

    @asynccontextmanager
    async def _turn(self, verb: str, path: str) -> AsyncGenerator["S3Store"]:
        from obstore.exceptions import BaseError

        if self._client is None:
            raise RequestFailed(f"{verb} {path}: the store is not open")
        async with self._turns:
            try:
                yield self._client
            except (BaseError, OSError, ValueError) as error:
                refusal = refusal_of(error)
                raise RequestFailed(f"{verb} {path}: {refusal.line}", refusal) from error


async def _body(answer: "GetResult", nbytes_max: int) -> memoryview:
    """Return the body of an answer; raise an error if the body is longer than requested.

    The limit protects memory from a server that sends too much.
    """
    content = memoryview(b"")
    # Request chunks of one byte more than the body may have: a body of the requested length arrives as
    # one chunk and is not copied, and a longer body is detected after one byte too many.
    async for chunk in answer.stream(min_chunk_size=nbytes_max + 1):
        content = memoryview(b"".join((content, chunk))) if content.nbytes else memoryview(chunk)
        if content.nbytes > nbytes_max:
            raise ValueError(f"the answer is longer than the {nbytes_max} bytes asked for")
    return content
