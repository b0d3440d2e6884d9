"""Storage of several pools: one page sequence spans all pools, and lookups query only relevant keys."""

import asyncio
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.coordinator.ballot import Answered, Capped, Expired, Landed, Quiesced, TransferEnded
from lockstep.page_format.object_name import ObjectName
from lockstep.page_format.object_shape import ObjectShape
from lockstep.page_format.page_layout import ShardLayout, ShardPlace
from lockstep.ranks.executor import pace
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.executor.lookup import LOOKUP_KEYS, StoreLookUp
from lockstep.ranks.executor.pools import HostPool
from lockstep.ranks.executor.restorable import restorable
from lockstep.ranks.executor.storage_transfers import BATCH_PAGES, RankObjects
from lockstep.ranks.executor.writers import EVERYTHING
from lockstep.ranks.protocol.orders import KV_POOL, Cancel, Fetch, LookUp, Need, ObjectTransfer, Put
from lockstep.storage_backends.base import Write
from lockstep.storage_backends.memory import MemoryBackend
from lockstep.storage_backends.records.shardings import Shardings
from tests.kit.ranks.executor_parts import (
    COMPONENTS,
    LONG_S,
    NAMESPACE,
    HeldStore,
    fill_host,
    grouped_layout,
    happened,
    includes,
    keys,
    make_executor,
    plain_layout,
)

SOON_S = 0.02
ONE_CALL_BYTES = 4 << 20
HOST_PAGES = BATCH_PAGES + 32

Start = Callable[..., RankExecutor]


@pytest.fixture
def start(made: Start, monkeypatch: pytest.MonkeyPatch) -> Start:
    # Fix the size of a call, because the tests count the store's calls.
    monkeypatch.setattr(pace, "CALL_BYTES_MAX", ONE_CALL_BYTES)

    def make(store: HeldStore, layout: ShardLayout | None = None) -> RankExecutor:
        pages = layout or grouped_layout()
        return made(pages, components=COMPONENTS, backend=store, host_pages=HOST_PAGES)

    return make


def objects(pool: str, count: int, *, first_key: int = 0, first_page: int = 0) -> ObjectTransfer:
    pages = tuple(range(first_page, first_page + count))
    return ObjectTransfer(pool, keys(count, first_key), pages)


def persist(executor: RankExecutor, *transfers: ObjectTransfer) -> None:
    happened(executor, [Put(1000, transfers, LONG_S)], includes(TransferEnded(1000, ok=True)))


def need(pool: str, count: int, *, first: int = 0, span: int | None = None) -> Need:
    """Return a `Need` of `count` pages of a pool, from position `first` on, for a lookup."""
    return Need(pool, first, keys(count, first), span)


def queried_keys(store: HeldStore, pool: str) -> list[int]:
    return [int(name.key, 16) for name in store.queried_names if name.pool == pool]


def test_a_fetch_of_several_pools_brings_back_the_bytes_that_a_persist_wrote(start: Start) -> None:
    executor = start(HeldStore())
    content = {name: fill_host(pool, 7) for name, pool in executor.host_pools.items()}
    persist(executor, objects(KV_POOL, 40), objects("window", 3), objects("state", 1, first_page=9))
    transfers = (
        objects(KV_POOL, 40, first_page=50),
        objects("window", 3, first_page=20),
        objects("state", 1, first_page=5),
    )

    progress = happened(executor, [Fetch(2, transfers, LONG_S)], includes(Landed(2, 44)))

    assert all(isinstance(each, Landed) for each in progress)
    hosts = executor.host_pools
    assert [bytes(hosts[KV_POOL].page(50 + page)) for page in range(40)] == content[KV_POOL][:40]
    assert [bytes(hosts["window"].page(20 + page)) for page in range(3)] == content["window"][:3]
    assert bytes(hosts["state"].page(5)) == content["state"][9]


def test_a_missing_state_caps_a_fetch_behind_all_pages_of_the_pools_before_it(
    start: Start,
) -> None:
    executor = start(HeldStore())
    persist(executor, objects(KV_POOL, 5), objects("window", 2))
    transfers = (objects(KV_POOL, 5), objects("window", 2), objects("state", 1))

    progress = happened(
        executor, [Fetch(2, transfers, LONG_S)], includes(Landed(2, 7), Capped(2, 7))
    )

    assert Landed(2, 7) in progress
    assert max(each.pages for each in progress if isinstance(each, Landed)) == 7


def test_what_lands_behind_a_page_that_is_missing_does_not_count(start: Start) -> None:
    executor = start(HeldStore())
    persist(executor, objects(KV_POOL, 1), objects("window", 2), objects("state", 1))
    transfers = (objects(KV_POOL, 2), objects("window", 2), objects("state", 1))

    progress = happened(executor, [Fetch(2, transfers, LONG_S)], includes(Capped(2, 1)))
    progress += happened(executor, [Cancel(2, LONG_S)], includes(Quiesced(2)))

    assert set(progress) == {Landed(2, 1), Capped(2, 1), Quiesced(2)}


def test_a_fetch_that_lacks_one_pool_still_expires_and_a_whole_one_does_not(start: Start) -> None:
    executor = start(HeldStore())
    persist(executor, objects(KV_POOL, 3), objects("state", 1))
    whole = (objects(KV_POOL, 3), objects("state", 1))
    short = (*whole, objects("window", 1))

    happened(
        executor,
        [Fetch(2, whole, LONG_S), Fetch(3, short, SOON_S)],
        includes(Landed(2, 4), Landed(3, 4), Expired(3)),
    )

    assert executor._flights.next_deadline() is None  # pyright: ignore[reportPrivateUsage]


def test_calls_to_the_store_never_mix_pools_and_are_bounded_by_each_pool_s_own_pages(
    start: Start,
) -> None:
    store = HeldStore()
    executor = start(store, plain_layout(ONE_CALL_BYTES))
    transfers = (
        objects(KV_POOL, 2),
        objects("window", BATCH_PAGES + 1, first_key=100),
        objects("state", 2, first_key=200),
    )

    persist(executor, *transfers)

    last = 100 + BATCH_PAGES
    calls = [[int(key, 16) for key in store.next_entered()] for _ in range(5)]
    assert store.entered.empty()
    assert sorted(calls) == [[0], [1], [*range(100, last)], [200, 201], [last]]


def test_a_lookup_of_several_pools_answers_with_the_lengths_that_all_can_restore(
    start: Start,
) -> None:
    """Rule R4: a lookup returns the lengths that every pool can restore, not the MIN of the maxima."""
    executor = start(HeldStore())
    persist(
        executor,
        objects(KV_POOL, 7),
        objects("window", 3),
        objects("window", 4, first_key=4, first_page=4),
        objects("state", 1, first_key=1),
        objects("state", 1, first_key=3, first_page=1),
        objects("state", 1, first_key=5, first_page=2),
    )
    order = LookUp(
        2, 0, (need(KV_POOL, 9), need("window", 9, span=2), need("state", 9, span=1)), LONG_S
    )

    assert happened(executor, [order], bool) == [Answered(2, 0, (2, 6))]


def test_a_lookup_asks_other_pools_only_for_what_a_restorable_length_could_need(
    start: Start,
) -> None:
    store = HeldStore()
    executor = start(store)
    persist(executor, objects(KV_POOL, 8))
    window = Need("window", 2, (*keys(4, 2), b"", *keys(13, 7)), 3, frozenset({4}))
    order = LookUp(2, 4, (need(KV_POOL, 20), window, need("state", 20, span=1)), LONG_S)

    happened(executor, [order], bool)

    assert queried_keys(store, KV_POOL) == list(range(20))
    assert queried_keys(store, "window") == [2, 3, 5, 7]
    assert queried_keys(store, "state") == [4, 5, 6, 7]


def test_a_key_that_could_not_be_read_before_is_not_asked_for_and_nothing_behind_it(
    start: Start,
) -> None:
    store = HeldStore()
    executor = start(store)
    persist(executor, objects(KV_POOL, 6))
    known = keys(6)

    order = LookUp(2, 0, (Need(KV_POOL, 0, (*known[:3], b"", *known[4:])),), LONG_S)

    assert happened(executor, [order], bool) == [Answered(2, 3)]
    assert queried_keys(store, KV_POOL) == [0, 1, 2]


def test_a_lookup_goes_on_with_the_next_call_where_all_keys_are_there(start: Start) -> None:
    store = HeldStore()
    executor = start(store, plain_layout(1))
    parts = range(0, LOOKUP_KEYS + 50, HOST_PAGES)
    persist(executor, *(objects(KV_POOL, HOST_PAGES, first_key=first) for first in parts))

    order = LookUp(2, 0, (need(KV_POOL, 3 * LOOKUP_KEYS),), LONG_S)

    assert happened(executor, [order], bool) == [Answered(2, len(parts) * HOST_PAGES)]
    assert store.exists_calls == 2


class FaultyPool(MemoryBackend):
    """A store that raises for one pool, although the contract forbids exceptions."""

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        if names[0].pool == "state":
            raise ValueError("a bug of the store's")
        return await super().exists(names, deadline=deadline)


def test_a_pool_that_the_store_cannot_tell_of_is_missing() -> None:
    """Rule R9: a page is a miss, never an error, if the store cannot say whether the page exists."""
    executor = make_executor(grouped_layout(), components=COMPONENTS, backend=FaultyPool())
    persist(executor, objects(KV_POOL, 4))
    order = LookUp(2, 0, (need(KV_POOL, 4), need("state", 4, span=1)), LONG_S)

    progress = happened(executor, [order, LookUp(3, 0, (need(KV_POOL, 4),), LONG_S)], includes_two)

    executor.close()
    assert set(progress) == {Answered(2, 0, ()), Answered(3, 4)}


def includes_two(progress: Sequence[object]) -> bool:
    return len(progress) == 2


OBJECTS = RankObjects(
    pools={
        name: HostPool(plain_layout(1), 0, pinned=False) for name in (KV_POOL, "window", "state")
    },
    namespace=NAMESPACE,
    writer=EVERYTHING,
    shardings=Shardings(ShardPlace.of(0, 1), {}, NAMESPACE),
)
PAGES = 8


@st.composite
def drawn_lookups(draw: st.DrawFn) -> tuple[LookUp, list[list[bool]]]:
    """Draw a lookup for a hybrid model, and whether the store has each key of each need."""
    floor = draw(st.integers(min_value=0, max_value=3))
    span = draw(st.integers(min_value=1, max_value=4))
    all_needs: list[Need] = []
    for pool, length in ((KV_POOL, None), ("window", span), ("state", 1)):
        first = floor if length is None else max(0, floor + 1 - length)
        named = [
            draw(st.sampled_from([key, key, key, b""]))
            for key in keys(PAGES + floor - first, first)
        ]
        held = draw(st.frozensets(st.integers(min_value=0, max_value=floor + PAGES)))
        all_needs.append(
            Need(pool, first, tuple(named), length, frozenset() if length is None else held)
        )
    stored = [[draw(st.booleans()) or draw(st.booleans()) for _ in n.keys] for n in all_needs]
    return LookUp(1, floor, tuple(all_needs), LONG_S), stored


@given(drawn_lookups())
def test_what_a_lookup_does_not_ask_for_makes_no_difference_to_its_answer(
    drawn: tuple[LookUp, list[list[bool]]],
) -> None:
    order, stored = drawn
    asked_for: list[ObjectName] = []

    class Recording(MemoryBackend):
        async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
            asked_for.extend(names)
            return await super().exists(names, deadline=deadline)

    async def answered() -> Answered:
        backend = Recording()
        await backend.open()
        deadline = time.monotonic() + LONG_S
        names = [
            name
            for each, has in zip(order.needs, stored, strict=True)
            for name, there in zip(OBJECTS.names(each.pool, each.keys), has, strict=True)
            if name.key and there
        ]
        written = [Write(name, (memoryview(b"x"),), ObjectShape.whole(1)) for name in names]
        await backend.write(written, deadline=deadline)
        lookup = StoreLookUp(order, backend, OBJECTS)
        await lookup.ask(time.monotonic(), deadline)
        return lookup.answer()

    assert asyncio.run(answered()) == Answered(1, *restorable(order, stored))
    assert len(set(asked_for)) == len(asked_for)
    assert not any(name.key == "" for name in asked_for)
    spared = {(each.pool, position) for each in order.needs for position in each.on_host}
    assert spared.isdisjoint((name.pool, int(name.key, 16)) for name in asked_for)
