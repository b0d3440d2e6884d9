"""How a reader finds a group, and the errors of a reader that finds none."""

import logging

import pytest

from lockstep.errors import ConfigError, UsageError
from lockstep.page_format.object_name import ObjectName
from lockstep.ranks.protocol.orders import KV_POOL
from lockstep.storage_backends.base import ReadOutcome, WriteOutcome
from lockstep.storage_backends.handshake import greeting
from lockstep.storage_backends.peer.handshake import MAGIC
from lockstep.storage_backends.registry import make_backend
from tests.kit.ranks.executor_parts import NAMESPACE, hashed_keys, plain_pages
from tests.kit.ranks.page_servers import serving, serving_keys
from tests.kit.storage.calls import (
    get,
    listed,
    object_name,
    opened_at,
    page,
    soon,
    writing,
)
from tests.kit.storage.peer_impostors import Behave, Impostor, impostor

LAYOUT = plain_pages(64)
SHARED = "s3kr1t"


def name_of(key: bytes, namespace: str = NAMESPACE) -> ObjectName:
    return ObjectName(namespace, key.hex(), KV_POOL, "l0-1.h0-1")


async def refusal(uri: str) -> str:
    with pytest.raises(ConfigError) as refused:
        await make_backend(uri).open()
    return str(refused.value)


@pytest.mark.parametrize(("theirs", "ours"), [(SHARED, "another"), (SHARED, ""), ("", SHARED)])
async def test_another_secret_is_refused_by_name_of_the_remedy_and_told_to_nobody(
    theirs: str, ours: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(LAYOUT, secret=theirs) as group:
        message = await refusal(f"{group.uri}?secret={ours}")

    assert "has another secret; give both the same one (secret=)" in message
    assert "is refused: the other side has another secret; give both the same one" in caplog.text
    assert SHARED not in message + caplog.text


async def test_without_a_secret_nobody_is_read_from_who_is_not_on_this_host() -> None:
    """Without a secret, only loopback peers are allowed: others could forge pages and checksums."""
    assert "192.0.2.1, which is not a loopback address" in await refusal("peer://192.0.2.1:7001")


NO_ARRAY = b"\1\0\0\0" + bytes(8) + b"\xc0"


async def no_greeting(reader: Impostor) -> None:
    """Send no greeting, so that the bytes under test are the first that the reader receives."""


@pytest.mark.parametrize(
    ("begin", "reply", "why"),
    [
        (
            no_greeting,
            greeting(MAGIC, 99),
            "speaks version 99 of the protocol, and this one 3; run the same version",
        ),
        (
            no_greeting,
            b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
            "is not a peer of the expected kind; check host and port",
        ),
        (
            Impostor.greet,
            NO_ARRAY,
            "cannot be used: a message of 1 bytes cannot be read",
        ),
    ],
    ids=["another version", "no rank at all", "no hello"],
)
async def test_who_says_something_else_than_a_rank_does_is_refused_by_what_it_says(
    begin: Behave, reply: bytes, why: str
) -> None:
    async def strange(reader: Impostor) -> None:
        await begin(reader)
        await reader.say(reply)
        await reader.hung_up()

    async with impostor(strange) as address:
        assert why in await refusal(f"peer://{address}")


async def test_where_nobody_listens_the_store_is_refused() -> None:
    async def unused(reader: Impostor) -> None:
        raise AssertionError("nobody connects here")

    async with impostor(unused) as address:
        gone = address
    message = await refusal(f"peer://{gone}")

    assert "check that the serving group runs" in message


async def test_who_never_greets_is_given_up_in_time() -> None:
    async with impostor(Impostor.hung_up) as address:
        message = await refusal(f"peer://{address}?connect_s=0.05")

    assert "no answer within 0.05 s" in message


async def test_pages_of_another_namespace_are_missing_and_the_log_says_why_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving_keys(1, LAYOUT) as group:
        async with opened_at(group.uri) as backend:
            theirs = name_of(hashed_keys(1)[0], "cd" * 32)
            seen = [await get(backend, theirs, 64) for _ in range(3)]
            assert [outcome for outcome, _ in seen] == [ReadOutcome.MISSING] * 3
            assert await backend.exists([theirs], deadline=soon()) == [False]

    warnings = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "give both groups the same model, weights, page layout and tenant" in warnings[0]


async def test_it_writes_nothing_removes_nothing_and_lists_nothing() -> None:
    with serving_keys(1, LAYOUT) as group:
        async with opened_at(group.uri) as backend:
            writes = [writing(object_name(1), page(1))]
            assert await backend.write(writes, deadline=soon()) == [WriteOutcome.FAILED]
            assert await backend.remove([name_of(hashed_keys(1)[0])], deadline=soon()) == [False]
            with pytest.raises(UsageError, match="asked for pages by their names only"):
                await listed(backend)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("peer://host", "must name a rank as peer://host:port"),
        ("peer://::1:7", "an IPv6 address as peer://[address]:port"),
        ("peer://host:1/path", "has a path; write peer://host:port"),
        ("peer://host:1?threads=3", "there is no option 'threads'; known: allow_sources,"),
        ("peer://host:1?connect_s=0", "connect_s is '0', must be at least 0.01"),
        ("peer://host:1?transfer=nixl", "transfer is 'nixl', must be one of tcp, mooncake"),
        (
            "peer://host:1?transfer=mooncake&protocol=udp",
            "protocol is 'udp', must be one of tcp, rdma",
        ),
        ("peer://host:1?device=mlx5_0", "device and insists need transfer=mooncake"),
        (f"peer://host?secret={SHARED}", "peer://host?secret=***"),
    ],
)
def test_a_uri_that_makes_no_sense_is_refused(uri: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_backend(uri)

    assert message in str(refused.value)
    assert SHARED not in str(refused.value)
