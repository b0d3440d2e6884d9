"""Authentication: pages come only from, and go only to, the intended process, unaltered."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from urllib.parse import quote

import pytest

from lockstep.page_format.object_header import HEADER_BYTES, encode_header, part_checksums
from lockstep.page_format.object_name import ObjectName, name_digest
from lockstep.page_format.page_layout import ShardPlace
from lockstep.ranks.page_server.page_server import HostPageServer
from lockstep.ranks.protocol.orders import KV_POOL
from lockstep.storage_backends import error_log
from lockstep.storage_backends.base import ReadOutcome, StorageBackend
from lockstep.storage_backends.handshake import UNPROVEN_S, UnprovenError
from lockstep.storage_backends.peer import group as peer_group
from lockstep.storage_backends.peer.wire import (
    LookupReply,
    LookupRequest,
    Message,
    ReadReply,
    ReadRequest,
    encode,
)
from lockstep.storage_backends.registry import make_backend
from tests.kit.ranks.executor_parts import NAMESPACE, hashed_keys, plain_pages
from tests.kit.ranks.page_servers import ServedGroup, objects_of, pages_of, reads_of, serving_keys
from tests.kit.servers.ports import free_port
from tests.kit.storage.calls import opened_at, soon
from tests.kit.storage.tampering import Alter, Passed, Tampering, Way, tampering, unaltered

SECRET = "sixteen random bytes"  # noqa: S105 - known to the groups of these tests.
OPTIONS = f"?secret={quote(SECRET)}"
PAGE_BYTES = 64 << 10
LAYOUT = plain_pages(PAGE_BYTES)
PAGES = 3
NAMES = [ObjectName(NAMESPACE, key.hex(), KV_POOL, "l0-1.h0-1") for key in hashed_keys(PAGES)]


async def outcomes_of(backend: StorageBackend, group: ServedGroup) -> list[ReadOutcome]:
    """Read all pages; fail if a page read as OK differs from the rank's page."""
    reads, buffers = reads_of(group, PAGES)
    outcomes = await backend.read(reads, deadline=soon())
    assert all(
        buffer == page
        for buffer, page, outcome in zip(buffers, pages_of(group, PAGES), outcomes, strict=True)
        if outcome is ReadOutcome.OK
    )
    return outcomes


@asynccontextmanager
async def on_the_way(alter: Alter) -> AsyncGenerator[tuple[Tampering, ServedGroup]]:
    """A group reached through a relay that alters frames, as a man in the middle could."""
    port, relay_port = free_port(), free_port()
    with ExitStack() as stack:
        group = stack.enter_context(
            serving_keys(
                PAGES, LAYOUT, secret=SECRET, ports=[port], reached_at=f"127.0.0.1:{relay_port}"
            )
        )
        async with tampering(f"127.0.0.1:{port}", alter, relay_port) as (wire, _):
            yield wire, group


def flipped(raw: bytes, at: int) -> bytes:
    changed = bytearray(raw)
    changed[at] ^= 1
    return bytes(changed)


def forged(passed: Passed) -> bytes:
    shape = LAYOUT.shard(0, 1).shape
    plan = shape.plan(shape.present)
    page = memoryview(b"\xee" * PAGE_BYTES)
    checksums = part_checksums(plan.sizes, [page])
    headers = [
        encode_header(name, name_digest(name) or b"", shape.present, plan, checksums)
        for name in NAMES
    ]
    return passed.head + b"".join(each + bytes(page) for each in headers) + passed.attached[-16:]


def only(kind: type[Message], change: Callable[[Passed], list[bytes]]) -> Callable[[], Alter]:
    """Return a factory of an `Alter` that applies `change` to the first message of a kind only."""

    def make() -> Alter:
        left = [kind]

        def alter(passed: Passed) -> list[bytes]:
            if type(passed.message) not in left:
                return [passed.raw]
            left.clear()
            return change(passed)

        return alter

    return make


def swapped(kind: type[Message]) -> Callable[[], Alter]:
    """Return a factory of an `Alter` that sends the first message of a kind after its successor."""

    def make() -> Alter:
        left, held = [kind], list[Passed]()

        def alter(passed: Passed) -> list[bytes]:
            if type(passed.message) in left:
                left.clear()
                held.append(passed)
                return []
            if [each.way for each in held] == [passed.way]:
                return [passed.raw, held.pop().raw]
            return [passed.raw]

        return alter

    return make


ALTERATIONS: dict[str, Callable[[], Alter]] = {
    "a byte of an answer's length": only(ReadReply, lambda p: [flipped(p.head, 4) + p.attached]),
    "a byte of an answer's control": only(ReadReply, lambda p: [flipped(p.head, 14) + p.attached]),
    "a byte of an answer's tag": only(ReadReply, lambda p: [flipped(p.head, -1) + p.attached]),
    "a byte of an object's header": only(ReadReply, lambda p: [p.head + flipped(p.attached, 9)]),
    "a byte of a page": only(ReadReply, lambda p: [p.head + flipped(p.attached, HEADER_BYTES + 9)]),
    "a byte of the pages' tag": only(ReadReply, lambda p: [p.head + flipped(p.attached, -1)]),
    "forged pages": only(ReadReply, lambda p: [forged(p)]),
    "an answer that says nothing is there": only(
        LookupReply, lambda p: [encode(LookupReply(1, bytes(PAGES))) + p.head[-16:]]
    ),
    "an answer twice": only(LookupReply, lambda p: [p.raw, p.raw]),
    "an answer left out": only(LookupReply, lambda p: []),
    "answers in another order": swapped(LookupReply),
    "a byte of a question": only(LookupRequest, lambda p: [flipped(p.head, 14)]),
    "a byte of a fetch": only(ReadRequest, lambda p: [flipped(p.head, -20)]),
    "a question twice": only(LookupRequest, lambda p: [p.raw, p.raw]),
    "a question left out": only(LookupRequest, lambda p: []),
    "questions in another order": swapped(LookupRequest),
}


@pytest.mark.parametrize("make", ALTERATIONS.values(), ids=ALTERATIONS)
async def test_a_frame_that_is_altered_on_its_way_fails_what_was_asked_and_the_next_call_goes_well(
    make: Callable[[], Alter], caplog: pytest.LogCaptureFixture
) -> None:
    async with on_the_way(make()) as (wire, group), opened_at(group.uri + OPTIONS) as backend:
        async with asyncio.TaskGroup() as both:
            there = both.create_task(backend.exists(NAMES, deadline=soon()))
            read = both.create_task(outcomes_of(backend, group))
        later = await outcomes_of(backend, group)

    failed = there.result() == [False] * PAGES or read.result() == [ReadOutcome.FAILED] * PAGES
    assert failed, (there.result(), read.result())
    assert later == [ReadOutcome.OK] * PAGES
    assert wire.connections == 2
    assert "a frame is not authentic" in caplog.text


async def test_pages_come_as_they_are_where_nothing_is_altered() -> None:
    async with on_the_way(unaltered) as (wire, group), opened_at(group.uri + OPTIONS) as backend:
        assert await backend.exists(NAMES, deadline=soon()) == [True] * PAGES
        assert await outcomes_of(backend, group) == [ReadOutcome.OK] * PAGES

    assert wire.connections == 1
    assert bytes(group.objects[0].page_views(KV_POOL, [0])[0]) in wire.sent[Way.SERVER]


async def test_a_relay_at_another_address_is_refused_although_it_passes_on_every_byte(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving_keys(PAGES, LAYOUT, secret=SECRET) as group:
        async with tampering(group.servers[0].address) as (wire, address):
            with pytest.raises(UnprovenError, match=f"{address} is not its address"):
                await make_backend(f"peer://{address}{OPTIONS}").open()

    assert len(wire.sent[Way.SERVER]) == 44 + 33
    assert f"dialled '{address}', which is not an address of this side" in caplog.text


@pytest.mark.parametrize(
    ("bound", "reached_at", "meant"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("127.0.0.1", "", "localhost"),
        ("127.0.0.1", "", "LocalHost"),
        ("127.0.0.1", "prefill.example", "127.0.0.1"),
        ("0.0.0.0", "prefill.example", "127.0.0.1"),  # noqa: S104 - any address is one of its own.
        ("0.0.0.0", "prefill.example", "127.1.2.3"),  # noqa: S104
        ("[::]", "prefill.example", "127.0.0.1"),
        ("[::]", "prefill.example", "[::1]"),
    ],
)
async def test_a_rank_is_read_from_by_each_address_that_is_its_own(
    bound: str, reached_at: str, meant: str
) -> None:
    port = free_port()
    objects = objects_of(LAYOUT, ShardPlace.of(0, 1), pages=1)
    server = HostPageServer(objects, f"{bound}:{port}", secret=SECRET, reached_at=reached_at)
    server.open([server.rank])
    with ExitStack() as stack:
        stack.callback(server.close)
        async with opened_at(f"peer://{meant}:{port}{OPTIONS}") as backend:
            assert await backend.exists(NAMES[:1], deadline=soon()) == [False]


async def test_all_ranks_are_read_from_where_each_is_reached_by_a_forwarded_port() -> None:
    """The first rank, reached by a forwarded port, sends the reader that of the second rank."""
    layout = plain_pages(2 * 64, heads=2)
    async with AsyncExitStack() as stack:
        servers: list[HostPageServer] = []
        for rank in range(2):
            port, forwarded_port = free_port(), free_port()
            await stack.enter_async_context(
                tampering(f"127.0.0.1:{port}", unaltered, forwarded_port)
            )
            objects = objects_of(layout, ShardPlace.of(rank, 2), pages=1)
            servers.append(
                HostPageServer(
                    objects,
                    f"127.0.0.1:{port}",
                    secret=SECRET,
                    reached_at=f"127.0.0.1:{forwarded_port}",
                )
            )
            stack.callback(servers[-1].close)
        group = ServedGroup(servers, ())
        for server in servers:
            server.open([each.rank for each in servers])
        group.serve(hashed_keys(1))
        backend = await stack.enter_async_context(opened_at(group.uri + OPTIONS))
        shards = [dict(each.rank.shards)[KV_POOL] for each in servers]
        names = [NAMES[0]._replace(shard=shard) for shard in shards]

        assert len(set(shards)) == 2
        assert await backend.exists(names, deadline=soon()) == [True, True]


@pytest.mark.parametrize(("left_alone_s", "again"), [(UNPROVEN_S, False), (0.0, True)])
async def test_where_an_impostor_answers_nobody_connects_again_for_a_while(
    left_alone_s: float,
    again: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(peer_group, "UNPROVEN_S", left_alone_s)
    monkeypatch.setattr(error_log, "SAID_AGAIN_S", 0.0)
    port = free_port()
    async with AsyncExitStack() as stack:
        with serving_keys(PAGES, LAYOUT, secret=SECRET, ports=[port]) as group:
            backend = await stack.enter_async_context(opened_at(group.uri + OPTIONS))
            before = await outcomes_of(backend, group)
        with serving_keys(PAGES, LAYOUT, secret=SECRET[::-1], ports=[port]) as group:
            seen = [await outcomes_of(backend, group) for _ in range(4)]

    assert before == [ReadOutcome.OK] * PAGES
    assert seen == [[ReadOutcome.FAILED] * PAGES] * 4
    assert (caplog.text.count("is refused") > 1) is again
