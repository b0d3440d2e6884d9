"""Attach and detach: an executor opens and closes stores in the background."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch

from lockstep.coordinator.ballot import Answered, Capped, Quiesced, TransferEnded
from lockstep.coordinator.proposal import Change, Proposal, Readiness
from lockstep.errors import ConfigError, UsageError
from lockstep.page_format.page_layout import ShardPlace
from lockstep.ranks.executor import stores
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.executor.pools import DevicePool, HostPool, TierPools
from lockstep.ranks.executor.stores import CLOSING_MAX, StoreAccess
from lockstep.ranks.executor.writers import EVERYTHING
from lockstep.ranks.protocol.orders import (
    KV_POOL,
    AttachStore,
    Cancel,
    DetachStore,
    Fetch,
    LookUp,
    Need,
    ObjectTransfer,
    Order,
    Put,
)
from lockstep.storage_backends.memory import Shelf
from lockstep.storage_backends.records.shardings import Shardings
from lockstep.storage_backends.wrappers.base import Call
from tests.kit.ranks.executor_parts import (
    LONG_S,
    NAMESPACE,
    PATIENCE_S,
    HeldStore,
    fill_host,
    grouped_layout,
    happened,
    includes,
    key_outcomes,
    keys,
    objects,
    waited,
)
from tests.kit.waiting import wait_for


class SlowToOpen(HeldStore):
    """A store whose open blocks until the test lets it succeed or fail."""

    def __init__(self, *, stubborn: bool = False, shelf: Shelf | None = None) -> None:
        super().__init__(stubborn=stubborn, shelf=shelf)
        self.may_open = asyncio.Event()
        self.complaint: Exception | None = None
        self.opening: asyncio.AbstractEventLoop | None = None

    async def open(self, memory: Sequence[memoryview] = ()) -> None:
        self.opening = asyncio.get_running_loop()
        await self.may_open.wait()
        if self.complaint is not None:
            raise self.complaint
        await super().open(memory)

    def let_open(self) -> None:
        wait_for(lambda: self.opening is not None)
        assert self.opening is not None
        self.opening.call_soon_threadsafe(self.may_open.set)


def to_attach(uri: str) -> Proposal:
    return Proposal(Change.ATTACH, uri)


PAGE_BYTES = grouped_layout().page_bytes


class Rank:
    """An executor without a store, and the stores that it can attach by URI."""

    def __init__(self, inflight_bytes: int = 64 << 20) -> None:
        self.known: dict[str, HeldStore] = {}
        layout = grouped_layout()
        pair = TierPools(
            DevicePool(layout, 2, torch.device("cpu")), HostPool(layout, 8, pinned=False)
        )
        self.executor = RankExecutor(
            {KV_POOL: pair},
            connect=self._connect,
            inflight_bytes=inflight_bytes,
            close_timeout_s=PATIENCE_S,
        )

    def _connect(self, uri: str) -> StoreAccess:
        if uri not in self.known:
            raise ConfigError(f"store {uri!r}: there is none")
        return StoreAccess(
            kind="memory",
            make_backend=lambda: self.known[uri],
            namespace=NAMESPACE,
            writer=EVERYTHING,
            shardings=Shardings(ShardPlace.of(0, 1), {}, NAMESPACE),
        )

    def readiness(self, uri: str) -> Readiness | str:
        return self.executor.readiness(to_attach(uri))

    def attach(self, uri: str, store: HeldStore) -> None:
        self.known[uri] = store
        self.executor.stage(to_attach(uri))
        wait_for(lambda: self.readiness(uri) is Readiness.READY)
        self.executor.carry_out([AttachStore(to_attach(uri).digest)])


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.executor.close()


@pytest.fixture
def tight_rank() -> Iterator[Rank]:
    made = Rank(inflight_bytes=4 * PAGE_BYTES)
    yield made
    made.executor.close()


def test_a_store_opens_in_the_background_and_is_used_once_it_is_attached(rank: Rank) -> None:
    store = rank.known["a"] = SlowToOpen()
    fill_host(rank.executor.host_pool, 1)
    rank.executor.stage(to_attach("a"))
    assert rank.readiness("a") is Readiness.STAGED

    store.let_open()
    wait_for(lambda: rank.readiness("a") is Readiness.READY)
    happened(rank.executor, [Put(1, objects(2), LONG_S)], includes(TransferEnded(1, ok=False)))
    rank.executor.carry_out([AttachStore(to_attach("a").digest)])
    happened(rank.executor, [Put(2, objects(2), LONG_S)], includes(TransferEnded(2, ok=True)))

    rank.executor.carry_out([DetachStore()])
    assert store.closed.wait(PATIENCE_S)
    need = Need(KV_POOL, 0, keys(2))
    orders: list[Order] = [LookUp(3, 0, (need,), LONG_S), Fetch(4, objects(2), LONG_S)]
    happened(rank.executor, orders, includes(Answered(3, 0), Capped(4, 0)))
    assert key_outcomes(rank.executor, Call.WRITE)["ok"] == 2


def test_what_was_ordered_before_the_store_changes_goes_to_the_store_before(rank: Rank) -> None:
    shelf = Shelf()
    rank.attach("a", HeldStore(shelf=shelf))
    fill_host(rank.executor.host_pool, 1)
    second = rank.known["b"] = HeldStore()
    rank.executor.stage(to_attach("b"))
    wait_for(lambda: rank.readiness("b") is Readiness.READY)

    happened(rank.executor, [Put(1, objects(3), LONG_S)], includes(TransferEnded(1, ok=True)))
    change: list[Order] = [DetachStore(), AttachStore(to_attach("b").digest)]
    happened(rank.executor, [*change, Fetch(2, objects(3), LONG_S)], includes(Capped(2, 0)))

    assert len(shelf.objects) == 3
    assert not second.shelf.objects


def test_a_store_that_is_being_closed_still_says_when_it_is_quiet(rank: Rank) -> None:
    store = HeldStore(stubborn=True)
    rank.attach("a", store)
    fill_host(rank.executor.host_pool, 1)
    happened(rank.executor, [Put(1, objects(2), LONG_S)], includes(TransferEnded(1, ok=True)))
    store.hold(*keys(1))
    rank.executor.carry_out([Fetch(2, objects(2), LONG_S)])
    # Wait for the store's second call, which is the fetch. The first call was the persist.
    store.next_entered()
    store.next_entered()
    rank.executor.carry_out([Cancel(2, LONG_S), DetachStore()])
    shelf = Shelf()
    rank.attach("b", HeldStore(shelf=shelf))
    happened(rank.executor, [Put(3, objects(1), LONG_S)], includes(TransferEnded(3, ok=True)))
    assert len(shelf.objects) == 1

    store.let_go(*keys(1))

    waited(rank.executor, includes(Quiesced(2)))
    assert store.closed.wait(PATIENCE_S)


def hung_in(rank: Rank, pages: int) -> HeldStore:
    """Attach a store, let a fetch of `pages` pages hang in it, and detach it."""
    store = HeldStore(stubborn=True)
    rank.attach("hung", store)
    store.hold(*keys(pages))
    rank.executor.carry_out([Fetch(1, objects(pages), LONG_S)])
    store.next_entered()
    rank.executor.carry_out([Cancel(1, LONG_S), DetachStore()])
    return store


def test_a_store_that_was_let_go_of_and_the_next_one_share_the_bound_on_bytes(
    tight_rank: Rank,
) -> None:
    hung, second = hung_in(tight_rank, 2), HeldStore(stubborn=True)
    tight_rank.attach("second", second)
    second.hold(*keys(4, 4))
    fetches: list[Order] = [
        Fetch(2 + at, (ObjectTransfer(KV_POOL, keys(1, 4 + at), (4 + at,)),), LONG_S)
        for at in range(4)
    ]
    look_up = LookUp(6, 0, (Need(KV_POOL, 0, keys(1)),), LONG_S)

    tight_rank.executor.carry_out(fetches)
    began = [second.next_entered() for _ in range(2)]
    # Orders start in sequence. Once the lookup is answered, all earlier fetches within the byte bound
    # have therefore called the store.
    happened(tight_rank.executor, [look_up], includes(Answered(6, 0)))
    assert second.bytes_running == 2 * PAGE_BYTES
    hung.let_go()

    began += [second.next_entered() for _ in range(2)]
    assert began == [(key.hex(),) for key in keys(4, 4)]
    second.let_go()


def test_where_stores_that_were_let_go_of_hold_most_of_the_bytes_no_other_is_staged(
    tight_rank: Rank,
) -> None:
    hung = hung_in(tight_rank, 3)
    tight_rank.known["second"] = HeldStore()
    tight_rank.executor.stage(to_attach("second"))

    assert f"hold {3 * PAGE_BYTES} of the {4 * PAGE_BYTES} bytes" in str(
        tight_rank.readiness("second")
    )
    hung.let_go()
    assert hung.closed.wait(PATIENCE_S)
    wait_for(lambda: _is_staged(tight_rank, "second"))


def test_a_store_that_does_not_open_is_a_refusal_with_its_own_words(rank: Rank) -> None:
    store = rank.known["a"] = SlowToOpen()
    store.complaint = ConfigError("store a: nobody answers; start it")
    rank.executor.stage(to_attach("a"))
    store.let_open()
    wait_for(lambda: rank.readiness("a") is not Readiness.STAGED)

    assert rank.readiness("a") == "store a: nobody answers; start it"
    assert rank.executor.trouble() is None


def test_a_store_that_never_opens_is_a_refusal_in_time(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "OPEN_TIMEOUT_S", 0.05)
    store = rank.known["a"] = SlowToOpen()
    rank.executor.stage(to_attach("a"))
    wait_for(lambda: rank.readiness("a") is not Readiness.STAGED)
    assert "did not open within 0.05 s" in str(rank.readiness("a"))

    rank.executor.unstage(to_attach("a"))
    store.let_open()
    assert store.closed.wait(PATIENCE_S)


def test_stores_that_do_not_end_are_bounded(rank: Rank) -> None:
    """Rule R10: the number of closing stores is bounded, because each keeps a thread and memory."""
    slow = {f"slow {number}": SlowToOpen() for number in range(CLOSING_MAX)}
    one_too_many = SlowToOpen()
    rank.known |= {**slow, "one too many": one_too_many}
    for uri in slow:
        rank.executor.stage(to_attach(uri))
        rank.executor.unstage(to_attach(uri))

    rank.executor.stage(to_attach("one too many"))

    assert "do not end their last calls" in str(rank.readiness("one too many"))
    rank.executor.unstage(to_attach("one too many"))
    for store in slow.values():
        store.let_open()
    wait_for(lambda: all(store.closed.is_set() for store in slow.values()))
    one_too_many.may_open.set()
    wait_for(lambda: _is_staged(rank, "one too many"))


def _is_staged(rank: Rank, uri: str) -> bool:
    rank.executor.stage(to_attach(uri))
    return not isinstance(rank.readiness(uri), str)


def test_to_refuse_a_uri_asks_no_store_and_imports_no_client() -> None:
    """`attach_store` refuses an invalid URI without I/O or imports: engine threads must not block."""
    lines = (
        "import sys, lockstep",
        "from lockstep.ranks.group.opening import store_access",
        "columns = (lockstep.Column(name='k', layers=1, heads=2, elements=2),)",
        "layout = lockstep.PageLayout(page_tokens=4, columns=columns)",
        "config = lockstep.CacheConfig(model='m', layout=layout, device_pages=2, host_pages=2)",
        "for uri in ('mooncake://127.0.0.1:1', '3fs:///nowhere?index=sqlite:///nowhere/index',",
        "            's3://bucket/x?endpoint=http://127.0.0.1:1', 'file:///proc/nowhere'):",
        "    store_access(config, 0, 1, uri)",
        "clients = {'mooncake', 'obstore', 'hf3fs_fuse'}",
        "print(sorted(clients.intersection(sys.modules)))",
    )

    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )

    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr


def test_an_executor_that_knows_of_no_stores_attaches_none() -> None:
    layout = grouped_layout()
    pair = TierPools(DevicePool(layout, 1, torch.device("cpu")), HostPool(layout, 1, pinned=False))
    executor = RankExecutor({KV_POOL: pair}, close_timeout_s=PATIENCE_S)

    with pytest.raises(UsageError, match="no store can be attached"):
        executor.stage(to_attach("a"))
    executor.stage(Proposal(Change.DETACH))
    assert executor.readiness(Proposal(Change.DETACH)) is Readiness.READY
    executor.close()
