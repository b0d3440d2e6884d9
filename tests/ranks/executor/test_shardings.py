"""Groups of different TP sizes on one store: each reads the others' pages, or gets a miss."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, product
from pathlib import Path
from typing import ClassVar

import pytest
from msgspec import structs

from lockstep.coordinator.ballot import Answered, Capped, Landed, TransferEnded
from lockstep.page_format.object_name import ObjectName
from lockstep.page_format.page_layout import PageLayout, ShardPlace
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.executor.lookup import LOOKUP_KEYS
from lockstep.ranks.executor.storage_transfers import BATCH_PAGES
from lockstep.ranks.executor.writers import WriterShare
from lockstep.ranks.protocol.orders import KV_POOL, Fetch, LookUp, Need, Put
from lockstep.storage_backends.base import Read, ReadOutcome, StorageBackend, Write, WriteOutcome
from lockstep.storage_backends.file.backend import FileBackend, FileOptions
from lockstep.storage_backends.memory import MemoryBackend, Shelf
from lockstep.storage_backends.records.shardings import Shardings
from lockstep.storage_backends.wrappers.base import Call
from tests.kit.ranks.executor_parts import (
    LONG_S,
    NAMESPACE,
    bytes_read,
    happened,
    hashed_keys,
    hashed_objects,
    includes,
    key_outcomes,
)
from tests.kit.ranks.reference_pages import (
    DRAFT,
    INDEX,
    LATENT,
    SIZES,
    K,
    V,
    place_of,
    reference_page,
    unheld,
)
from tests.kit.storage.calls import digest_of

PAGES = 5
KEYS = hashed_keys(PAGES)
LAYOUT = PageLayout(page_tokens=2, columns=(K, INDEX, V))
WITH_DRAFT = PageLayout(page_tokens=2, columns=(K, INDEX, V, DRAFT))
REPLICATED = PageLayout(page_tokens=2, columns=(LATENT, INDEX))

MakeBackend = Callable[[], StorageBackend]
Start = Callable[..., list[RankExecutor]]


class RecordingStore(MemoryBackend):
    """A store in memory that records the names of its calls."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self.queried_names: list[ObjectName] = []
        self.read_names: list[ObjectName] = []
        self.written: list[ObjectName] = []

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        self.queried_names += names
        return await super().exists(names, deadline=deadline)

    async def read(self, reads: Sequence[Read], *, deadline: float) -> list[ReadOutcome]:
        self.read_names += [read.name for read in reads]
        return await super().read(reads, deadline=deadline)

    async def write(self, writes: Sequence[Write], *, deadline: float) -> list[WriteOutcome]:
        self.written += [write.name for write in writes]
        return await super().write(writes, deadline=deadline)


@pytest.fixture
def start(made: Callable[..., RankExecutor]) -> Start:
    def make(
        backend: MakeBackend,
        tp_size: int,
        layout: PageLayout = LAYOUT,
        absent: Sequence[str] = (),
        pages: int = PAGES,
    ) -> list[RankExecutor]:
        return [
            made(
                layout.shard(rank, tp_size, absent=absent),
                backend=backend(),
                writer=WriterShare(rank=rank, world_size=tp_size),
                shardings=Shardings(
                    ShardPlace.of(rank, tp_size), {KV_POOL: layout}, NAMESPACE, absent
                ),
                host_pages=pages,
            )
            for rank in range(tp_size)
        ]

    return make


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def backend(shelf: Shelf) -> MakeBackend:
    return lambda: MemoryBackend(shelf)


@pytest.fixture(params=["memory", "file"])
def stores(request: pytest.FixtureRequest, tmp_path: Path, shelf: Shelf) -> MakeBackend:
    if request.param == "memory":
        return lambda: MemoryBackend(shelf)
    return lambda: FileBackend(tmp_path / "store", FileOptions(threads=2))


def pages_of(
    layout: PageLayout, rank: int, tp_size: int, absent: Sequence[str] = (), pages: int = PAGES
) -> list[bytes]:
    place = place_of(rank, tp_size)
    return [reference_page(layout, place, absent, page) for page in range(pages)]


def pages_by_rank(
    layout: PageLayout, tp_size: int, absent: Sequence[str] = ()
) -> list[list[bytes]]:
    return [pages_of(layout, rank, tp_size, absent) for rank in range(tp_size)]


def persist(
    group: list[RankExecutor], layout: PageLayout = LAYOUT, absent: Sequence[str] = ()
) -> None:
    for rank, executor in enumerate(group):
        count = executor.host_pool.pages
        contents = pages_of(layout, rank, len(group), absent, count)
        for slot, content in enumerate(contents):
            executor.host_pool.page(slot)[:] = content
        happened(
            executor, [Put(1, hashed_objects(count), LONG_S)], includes(TransferEnded(1, ok=True))
        )


def looked_up(executor: RankExecutor) -> int:
    """Return the number of pages that the rank's lookup finds, from the first one on."""
    need = Need(KV_POOL, 0, KEYS)
    (progress,) = happened(executor, [LookUp(2, 0, (need,), LONG_S)], bool)
    assert isinstance(progress, Answered)
    return progress.pages


def fetched(executor: RankExecutor, landed: int = PAGES) -> list[bytes]:
    executor.host_pool.bytes_tensor.zero_()
    expected = [Landed(3, landed)] if landed else []
    ends = [] if landed == PAGES else [Capped(3, landed)]
    happened(executor, [Fetch(3, hashed_objects(PAGES), LONG_S)], includes(*expected, *ends))
    return [bytes(executor.host_pool.page(page)) for page in range(landed)]


@pytest.mark.parametrize(("wrote", "reads"), list(product(SIZES, SIZES)))
def test_what_a_group_wrote_groups_of_any_size_read(
    start: Start, stores: MakeBackend, wrote: int, reads: int
) -> None:
    persist(start(stores, wrote))

    group = start(stores, reads)
    assert [looked_up(executor) for executor in group] == [PAGES] * reads
    assert [fetched(executor) for executor in group] == pages_by_rank(LAYOUT, reads)
    assert {*chain(*(key_outcomes(each, Call.READ) for each in group))} <= {"ok", "missing"}
    assert not any(key_outcomes(each, Call.WRITE)["ok"] for each in group)
    assert [bytes_read(executor) for executor in group] == [
        PAGES * executor.host_pool.layout.page_bytes for executor in group
    ]


@pytest.mark.parametrize(("wrote", "reads"), [(1, 2), (2, 4), (4, 2), (4, 1), (8, 4)])
def test_optional_columns_come_from_other_groups_objects_too(
    start: Start, backend: MakeBackend, wrote: int, reads: int
) -> None:
    theirs, ours = unheld(WITH_DRAFT, wrote), unheld(WITH_DRAFT, reads)
    persist(start(backend, wrote, WITH_DRAFT, theirs), WITH_DRAFT, theirs)

    group = start(backend, reads, WITH_DRAFT, ours)
    found = PAGES if set(theirs) <= set(ours) else 0
    assert [looked_up(executor) for executor in group] == [found] * reads
    assert [fetched(executor, found) for executor in group] == [
        pages[:found] for pages in pages_by_rank(WITH_DRAFT, reads, ours)
    ]


def test_objects_of_another_group_that_lack_a_column_are_a_miss(
    start: Start, backend: MakeBackend
) -> None:
    persist(start(backend, 4, WITH_DRAFT, ["draft"]), WITH_DRAFT, ["draft"])
    (full,) = start(backend, 1, WITH_DRAFT)
    (lean,) = start(backend, 1, WITH_DRAFT, ["draft"])

    assert looked_up(full) == PAGES
    assert fetched(full, 0) == []
    assert key_outcomes(full, Call.READ)["lacking"] > 0
    assert looked_up(lean) == PAGES
    assert fetched(lean) == pages_of(WITH_DRAFT, 0, 1, ["draft"])


def object_of(page: int, shard: str) -> bytes:
    return digest_of(ObjectName(NAMESPACE, KEYS[page].hex(), KV_POOL, shard))


def test_a_page_of_which_one_object_of_the_other_group_is_missing_is_a_miss(
    start: Start, backend: MakeBackend, shelf: Shelf
) -> None:
    persist(start(backend, 4))
    first, second = start(backend, 2)
    del shelf.objects[object_of(3, "l0-4.h2-4")]

    assert looked_up(first) == 3
    assert fetched(first, 3) == pages_of(LAYOUT, 0, 2)[:3]
    assert looked_up(second) == PAGES
    assert fetched(second) == pages_of(LAYOUT, 1, 2)


def test_a_page_of_which_one_object_of_the_other_group_is_corrupt_is_a_miss(
    start: Start, backend: MakeBackend, shelf: Shelf
) -> None:
    persist(start(backend, 2))
    first, second = start(backend, 4)[:2]
    digest = object_of(1, "l0-4.h0-4")
    header, payload = shelf.objects[digest]
    # The flipped byte belongs to the object's last head, which only the second rank reads.
    shelf.objects[digest] = (header, payload[:-1] + bytes([payload[-1] ^ 1]))

    assert looked_up(first) == looked_up(second) == PAGES
    assert fetched(first) == pages_of(LAYOUT, 0, 4)
    assert fetched(second, 1) == pages_of(LAYOUT, 1, 4)[:1]
    assert second.counts().pages_corrupt == 1
    assert looked_up(first) == 1


def test_pages_of_several_groups_make_one_prefix(
    start: Start, backend: MakeBackend, shelf: Shelf
) -> None:
    for tp_size in (1, 2, 8):
        persist(start(backend, tp_size))
    gone = [
        object_of(page, LAYOUT.shard(rank, other).name)
        for page, kept in enumerate((1, 2, 8, 2, 1))
        for other in {1, 2, 8} - {kept}
        for rank in range(other)
    ]
    for digest in gone:
        del shelf.objects[digest]

    group = start(backend, 4)
    assert [looked_up(executor) for executor in group] == [PAGES] * 4
    assert [fetched(executor) for executor in group] == pages_by_rank(LAYOUT, 4)


def test_a_group_leaves_its_mark_once_however_much_it_writes(start: Start, shelf: Shelf) -> None:
    store = RecordingStore(shelf)
    (executor,) = start(lambda: store, 1, pages=4 * BATCH_PAGES)

    persist([executor])
    happened(executor, [Put(2, hashed_objects(9), LONG_S)], includes(TransferEnded(2, ok=True)))

    marks = [name for name in store.written if name.pool == "sharding"]
    assert [name.shard for name in marks] == ["stage0of1.tp1"]
    assert marks[0] == store.written[0]


def test_what_was_read_from_another_groups_objects_is_written_again_only_where_they_are_gone(
    start: Start, shelf: Shelf
) -> None:
    persist(start(lambda: MemoryBackend(shelf), 4))
    store = RecordingStore(shelf)
    (executor,) = start(lambda: store, 1)
    looked_up(executor)
    del shelf.objects[object_of(3, "l0-4.h2-4")]
    (transfer,) = hashed_objects(PAGES)
    order = Put(4, (structs.replace(transfer, stored=True),), LONG_S)

    happened(executor, [order], includes(TransferEnded(4, ok=True)))

    assert [name.key for name in store.written if name.pool == KV_POOL] == [KEYS[3].hex()]


def test_a_store_without_other_groups_is_asked_for_nothing_but_their_marks(
    start: Start, shelf: Shelf
) -> None:
    stores = [RecordingStore(shelf) for _ in range(2)]
    remaining = iter(stores)
    group = start(lambda: next(remaining), 2)

    missed = [looked_up(executor) for executor in group]
    persist(group)
    found = [looked_up(executor) for executor in group]
    for executor in group:
        fetched(executor)

    assert (missed, found) == ([0, 0], [PAGES, PAGES])
    assert [
        [name.shard for name in store.queried_names if name.pool == "sharding"] for store in stores
    ] == [["stage0of1.tp1", "stage0of1.tp4", "stage0of1.tp8"]] * 2
    own = [
        [ObjectName(NAMESPACE, key.hex(), KV_POOL, LAYOUT.shard(rank, 2).name) for key in KEYS]
        for rank in range(2)
    ]
    assert [[name for name in store.queried_names if name.pool == KV_POOL] for store in stores] == [
        names * 2 for names in own
    ]
    assert [Counter(store.read_names) for store in stores] == [Counter(names) for names in own]


def test_groups_whose_pages_are_the_same_on_every_rank_need_no_marks(
    start: Start, shelf: Shelf
) -> None:
    store = RecordingStore(shelf)
    persist(start(lambda: MemoryBackend(shelf), 4, REPLICATED), REPLICATED)
    (executor,) = start(lambda: store, 1, REPLICATED)

    assert looked_up(executor) == PAGES
    assert fetched(executor) == pages_of(REPLICATED, 0, 1)
    assert len(store.queried_names) == len(store.read_names) == len(shelf.objects) == PAGES


@pytest.mark.parametrize("there", [True, False])
def test_one_call_asks_for_a_bounded_number_of_keys_of_other_groups(
    start: Start, shelf: Shelf, *, there: bool
) -> None:
    class Marked(RecordingStore):
        """A store with marks of other groups, and either all of their objects or none."""

        calls: ClassVar[list[int]] = []

        async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
            self.calls.append(len(names))
            await super().exists(names, deadline=deadline)
            return [
                name.pool == "sharding" or (there and name.shard != "l0-4.h0-8") for name in names
            ]

    store = Marked(shelf)
    (executor,) = start(lambda: store, 1)
    need = Need(KV_POOL, 0, hashed_keys(LOOKUP_KEYS))

    (progress,) = happened(executor, [LookUp(2, 0, (need,), LONG_S)], bool)

    assert isinstance(progress, Answered)
    assert progress.pages == (LOOKUP_KEYS if there else 0)
    assert max(store.calls) <= LOOKUP_KEYS
    # A full-attention lookup stops after the first store call that reports a missing page.
    assert there or len(store.calls) <= 1 + 1 + 3
