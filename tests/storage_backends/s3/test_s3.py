"""Objects in an S3 bucket: the contract, and failures that only a remote store has."""

import asyncio
import re
import time
from datetime import timedelta

import pytest

from tests.kit.storage.calls import (
    KIB,
    StoreUnderTest,
    get,
    listed,
    object_name,
    opened,
    opened_at,
    page,
    put,
    put_many,
    reading,
    soon,
    writing,
)
from tests.kit.storage.contract import ListingContract, StorageContract

pytest.importorskip("obstore", reason="needs the extra s3")
import obstore

from lockstep.errors import ConfigError, StorageError
from lockstep.page_format.object_header import HEADER_BYTES
from lockstep.page_format.object_shape import ObjectShape, Part
from lockstep.storage_backends.base import ReadOutcome, WriteOutcome
from lockstep.storage_backends.registry import make_backend
from lockstep.storage_backends.s3 import backend as s3
from lockstep.storage_backends.s3 import requests as s3_requests
from tests.kit.storage.s3 import BucketStore, Proxy, existing

HEADERS_BYTES_MAX = 2 * KIB
"""Upper bound in bytes for the headers of one HTTP response."""


@pytest.fixture
def store(bucket: BucketStore) -> StoreUnderTest:
    return bucket


class TestS3Contract(StorageContract, ListingContract):
    # S3 is slow in tests; 150 pages are still several times the limit of requests in flight.
    large_batch = 150
    races = 4


PARTS = ObjectShape(tuple(Part(128 * KIB) for _ in range(8)), tuple(range(8)))


async def test_a_page_from_its_beginning_is_one_request(bucket: BucketStore) -> None:
    async with bucket.behind_proxy() as (backend, proxy):
        await put(backend, object_name(1), page(1, 1 << 20), PARTS)
        assert proxy.requests == ["PUT"]
        proxy.forget()
        assert await get(backend, object_name(1), PARTS) == (ReadOutcome.OK, page(1, 1 << 20))
        assert proxy.requests == ["GET"]
        assert proxy.bytes_back <= HEADER_BYTES + (1 << 20) + HEADERS_BYTES_MAX


async def test_a_read_of_some_parts_moves_their_bytes_and_no_others(bucket: BucketStore) -> None:
    async with bucket.behind_proxy() as (backend, proxy):
        await put(backend, object_name(1), page(1, 1 << 20), PARTS)
        proxy.forget()
        some = ObjectShape(PARTS.parts, (5, 6))
        content = page(1, 1 << 20)[5 * 128 * KIB : 7 * 128 * KIB]
        assert await get(backend, object_name(1), some) == (ReadOutcome.OK, content)
        assert proxy.requests == ["GET", "GET"]
        assert proxy.bytes_back <= HEADER_BYTES + 256 * KIB + 2 * HEADERS_BYTES_MAX


async def test_a_page_that_was_seen_is_looked_at_before_it_is_sent_again(
    bucket: BucketStore,
) -> None:
    async with bucket.behind_proxy() as (backend, proxy):
        await put(backend, object_name(1), page(1))
        proxy.forget()
        assert await backend.exists([object_name(1)], deadline=soon()) == [True]
        assert proxy.requests == []
        assert await put(backend, object_name(1), page(1)) is WriteOutcome.PRESENT
        assert proxy.requests == ["GET"]


async def test_an_endpoint_that_is_down_is_a_failure_and_not_a_wait_and_is_said(
    bucket: BucketStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(s3_requests, "_BACKOFF", timedelta(milliseconds=1))

    proxy = Proxy(bucket.endpoint)
    async with proxy.serving() as endpoint:
        backend = bucket.backend(endpoint)
        await backend.open()
    assert (await get(backend, object_name(1)))[0] is ReadOutcome.FAILED
    assert await put(backend, object_name(1), page(1)) is WriteOutcome.FAILED
    (warning,) = [each for each in caplog.messages if "a request to an s3:// store" in each]
    assert re.search("(GET|HEAD) objects/", warning)
    assert await backend.exists([object_name(1)], deadline=soon()) == [False]
    assert await backend.remove([object_name(1)], deadline=soon()) == [False]
    with pytest.raises(StorageError, match="LIST"):
        await listed(backend)
    await backend.close()


async def test_an_endpoint_that_never_answers_costs_the_deadline(bucket: BucketStore) -> None:
    async with bucket.behind_proxy() as (backend, proxy):
        await put(backend, object_name(1), page(1))
        proxy.hang = True
        names = [object_name(1), object_name(2)]
        buffers = [bytearray(16 * KIB) for _ in names]
        reads = [reading(name, each) for name, each in zip(names, buffers, strict=True)]
        deadline = time.monotonic() + 0.1
        assert await backend.read(reads, deadline=deadline) == [ReadOutcome.TIMED_OUT] * 2
        assert time.monotonic() >= deadline
        writes = [writing(object_name(3), page(3))]
        deadline = time.monotonic() + 0.1
        assert await backend.write(writes, deadline=deadline) == [WriteOutcome.TIMED_OUT]
        deadline = time.monotonic() + 0.1
        assert await backend.exists([object_name(4)], deadline=deadline) == [False]


async def test_a_read_that_was_given_up_drops_its_request(bucket: BucketStore) -> None:
    async with bucket.behind_proxy() as (backend, proxy):
        await put(backend, object_name(1), page(1))
        proxy.hang = True
        proxy.request_arrived.clear()
        proxy.dropped.clear()
        call = asyncio.create_task(
            backend.read([reading(object_name(1), bytearray(16 * KIB))], deadline=soon())
        )
        await proxy.request_arrived.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(60):
            await proxy.dropped.wait()


async def test_closing_ends_what_waits_for_an_answer(bucket: BucketStore) -> None:
    async with bucket.behind_proxy() as (backend, proxy):
        proxy.hang = True
        proxy.request_arrived.clear()
        call = asyncio.create_task(get(backend, object_name(1)))
        await proxy.request_arrived.wait()
        async with asyncio.timeout(60):
            await backend.close()
            assert (await call)[0] is ReadOutcome.TIMED_OUT


async def test_a_listing_that_could_not_read_one_object_is_an_error_and_not_shorter(
    bucket: BucketStore,
) -> None:
    async with bucket.behind_proxy() as (backend, proxy):
        await put_many(backend, range(4))
        bad = existing(object_name(2))
        proxy.refuses = lambda path: bad in path
        with pytest.raises(StorageError, match=f"could not be listed: GET {bad}") as caught:
            await listed(backend)
        assert "\n" not in str(caught.value)
        proxy.refuses = lambda _: False
        assert len(await listed(backend)) == 4


@pytest.mark.parametrize(
    "silent_at", ["list-type=2", existing(object_name(1))], ids=["list", "header"]
)
async def test_closing_ends_a_listing_with_an_error_though_the_server_never_answers(
    bucket: BucketStore, silent_at: str
) -> None:
    async with bucket.behind_proxy() as (backend, proxy):
        await put(backend, object_name(1), page(1))
        silent = proxy.fall_silent_at(silent_at)
        listing = asyncio.create_task(listed(backend))
        await silent.wait()
        # A close must end a hanging listing within these 30 s; the client's own timeouts are longer.
        async with asyncio.timeout(30):
            await backend.close()
            with pytest.raises(StorageError, match="was closed while it was listed"):
                await listing
        assert await listed(backend) == []


async def test_a_bit_that_changes_on_the_way_costs_no_object(bucket: BucketStore) -> None:
    async with bucket.behind_proxy() as (backend, proxy):
        await put(backend, object_name(1), page(1))
        proxy.flips = 1
        assert await get(backend, object_name(1)) == (ReadOutcome.OK, page(1))
        assert not proxy.flips
        assert bucket.paths() == [existing(object_name(1))]


async def test_an_answer_that_is_longer_than_was_asked_for_is_not_taken_into_memory(
    bucket: BucketStore,
) -> None:
    async with bucket.behind_proxy() as (backend, proxy):
        await put(backend, object_name(1), page(1))
        proxy.swells = True
        assert (await get(backend, object_name(1)))[0] is ReadOutcome.FAILED
        # The client stops reading an oversized response early, except for bytes that are already
        # buffered.
        assert proxy.bytes_back < 64 << 20
        proxy.swells = False
        assert await get(backend, object_name(1)) == (ReadOutcome.OK, page(1))


async def test_what_an_opening_process_left_when_it_was_killed_goes_when_it_is_old(
    bucket: BucketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    obstore.put(bucket.client, "trial/0123", b"1")
    async with opened(bucket):
        # A recent trial object is kept, because another process may be using it to open the store.
        assert bucket.paths() == ["trial/0123"]
    monkeypatch.setattr(s3, "_TRIAL_OLD_S", 0.0)
    async with opened(bucket):
        assert bucket.paths() == []


async def test_requests_in_flight_are_bounded(bucket: BucketStore) -> None:
    async with bucket.behind_proxy("&concurrency=3") as (backend, proxy):
        proxy.hang = True
        names = [object_name(number) for number in range(40)]
        await backend.exists(names, deadline=time.monotonic() + 0.2)
        assert len(proxy.requests) <= 3


@pytest.mark.parametrize("kept", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 9, None])
async def test_an_object_of_a_wrong_length_is_a_miss_and_is_removed(
    bucket: BucketStore, kept: int | None
) -> None:
    async with opened(bucket) as backend:
        await put(backend, object_name(1), page(1))
        whole = bucket.content(object_name(1))
        bucket.overwrite(object_name(1), whole + b"x" if kept is None else whole[:kept])
        assert await listed(backend) == []
        assert (await get(backend, object_name(1)))[0] is ReadOutcome.CORRUPT
        assert bucket.paths() == []
        assert (await get(backend, object_name(1)))[0] is ReadOutcome.MISSING


async def test_prefixes_of_one_bucket_are_stores_of_their_own(bucket: BucketStore) -> None:
    uri = f"s3://{bucket.bucket}{{}}?endpoint={bucket.endpoint}"
    async with (
        opened_at(uri.format("/kv/pages/inner")) as inner,
        opened_at(uri.format("")) as whole,
        opened(bucket) as backend,
    ):
        stores = (inner, whole, backend)
        for number, each in enumerate(stores):
            await put(each, object_name(number), page(number))
        listings = [await listed(each) for each in stores]

    assert [[each.name for each in some] for some in listings] == [
        [object_name(n)] for n in range(3)
    ]
    ages = [each.age_s for some in listings for each in some]
    assert all(age_s is not None and 0 <= age_s < 600 for age_s in ages)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("s3://", "names no bucket"),
        ("s3://ab/prefix", "is not a bucket name"),
        ("s3://host:9000/bucket", "endpoint=http://host:port"),
        ("s3://bucket/a/../b", "'..'"),
        ("s3://bucket/a//b", "an empty part"),
        ("s3://bucket/\ud800", "half a character"),
        ("s3://bucket/x?endpoint=host:9000", "must be a URL"),
        ("s3://bucket/x?endpoint=http://", "must be a URL"),
        ("s3://bucket/x?endpoint=http://host:99999", "must be a URL"),
        ("s3://bucket/x?endpoint=http://host%3Fa", "must be a URL"),
        ("s3://bucket/x?region=us%20east", "region"),
        ("s3://bucket/x?concurrency=0", "concurrency"),
        ("s3://bucket/x?read_only=maybe", "read_only is 'maybe', must be true or false"),
        ("s3://bucket/x?threads=4", "there is no option 'threads'"),
    ],
)
def test_a_uri_that_makes_no_sense_is_refused_with_the_remedy(uri: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_backend(uri)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://AKIA:hush@bucket/x",
        "s3://hush@bucket/x",
        "s3://bucket/x?access_key_id=hush",
        "s3://bucket/x?secret_access_key=hush",
        "s3://bucket/x?AWS_SESSION_TOKEN=hush",
        "s3://bucket/x?password=hush",
        "s3://bucket/x?endpoint=http://u:hush@host:9000",
    ],
)
def test_credentials_in_a_uri_are_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(ConfigError, match="credential") as caught:
        make_backend(uri)
    assert "hush" not in str(caught.value)
    assert "AWS_ACCESS_KEY_ID" in str(caught.value)
