"""Marks that groups leave in a store: which rank writes one, and when a group looks for others."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from lockstep.errors import StorageError
from lockstep.page_format.object_name import ObjectName
from lockstep.page_format.page_layout import PageLayout, ShardPlace
from lockstep.ranks.protocol.orders import KV_POOL
from lockstep.storage_backends.memory import MemoryBackend, Shelf
from lockstep.storage_backends.records.shardings import (
    ANNOUNCE_AGAIN_S,
    LOOK_AGAIN_S,
    OWN,
    Shardings,
)
from tests.kit.ranks.executor_parts import NAMESPACE
from tests.kit.ranks.reference_pages import INDEX, LAYOUTS, NARROW, K, V
from tests.kit.storage.calls import listed, soon

LAYOUT = PageLayout(page_tokens=2, columns=(K, INDEX, V))
LATENT_DRAFT = LAYOUTS["replicated with a draft"]


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


class SlowStore(MemoryBackend):
    """A store in memory whose existence queries block until the test releases them."""

    def __init__(self, shelf: Shelf) -> None:
        super().__init__(shelf)
        self.queries: list[list[ObjectName]] = []
        self.may_answer = asyncio.Event()
        self.began = asyncio.Event()
        self.stopped = 0

    async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
        self.queries.append(list(names))
        self.began.set()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.stopped += 1
            raise
        return await super().exists(names, deadline=deadline)


def shardings_of(
    tp_size: int, layout: PageLayout = LAYOUT, absent: Sequence[str] = ()
) -> Shardings:
    return Shardings(ShardPlace.of(0, tp_size), {KV_POOL: layout}, NAMESPACE, absent)


async def opened_on(shelf: Shelf) -> MemoryBackend:
    backend = MemoryBackend(shelf)
    await backend.open()
    return backend


async def slow_on(shelf: Shelf, *, marks: Sequence[int] = ()) -> SlowStore:
    backend = await opened_on(shelf)
    for size in marks:
        await shardings_of(size).announce(backend, 100.0, soon())
    slow = SlowStore(shelf)
    await slow.open()
    return slow


def look(shardings: Shardings, store: SlowStore) -> asyncio.Task[None]:
    return asyncio.ensure_future(shardings.look(store, 100.0, soon()))


async def test_other_groups_are_looked_for_again_after_a_time(shelf: Shelf) -> None:
    ours, theirs = shardings_of(2), shardings_of(4)
    backend = await opened_on(shelf)
    await ours.look(backend, 100.0, soon())
    await theirs.announce(backend, 100.0, soon())
    await ours.look(backend, 100.0 + LOOK_AGAIN_S / 2, soon())
    assert ours.order(KV_POOL) == [OWN]
    await ours.look(backend, 100.0 + LOOK_AGAIN_S, soon())
    assert ours.order(KV_POOL) == [OWN, 4]
    ours.prefer(KV_POOL, 4)
    assert ours.order(KV_POOL) == [4, OWN]
    (mark,) = await listed(backend)
    assert (mark.name.pool, mark.shape.nbytes) == ("sharding", 1)


async def test_a_mark_that_could_not_be_left_is_left_with_the_next_write(shelf: Shelf) -> None:
    shardings = shardings_of(2)
    backend = MemoryBackend(shelf)
    await shardings.announce(backend, 100.0, soon())
    assert not shelf.objects
    await backend.open()
    await shardings.announce(backend, 100.0, soon())
    assert len(shelf.objects) == 1


async def test_a_mark_that_somebody_removed_is_left_again_after_a_time(shelf: Shelf) -> None:
    shardings = shardings_of(2)
    backend = await opened_on(shelf)
    await shardings.announce(backend, 100.0, soon())
    shelf.objects.clear()
    await shardings.announce(backend, 100.0 + ANNOUNCE_AGAIN_S / 2, soon())
    assert not shelf.objects
    await shardings.announce(backend, 100.0 + ANNOUNCE_AGAIN_S, soon())
    assert len(shelf.objects) == 1


async def test_stages_look_for_groups_with_the_same_stages_only(shelf: Shelf) -> None:
    def shardings(rank: int, world_size: int, stages: int) -> Shardings:
        place = ShardPlace.of(rank, world_size, stages)
        return Shardings(place, {KV_POOL: LAYOUT}, NAMESPACE)

    backend = await opened_on(shelf)
    await shardings(0, 4, 1).announce(backend, 100.0, soon())
    await shardings(3, 8, 2).announce(backend, 100.0, soon())
    found: list[list[int]] = []
    for rank in (0, 2):
        ours = shardings(rank, 4, 2)
        await ours.look(backend, 1.0, soon())
        found.append(ours.order(KV_POOL))
    # Rank 0 is in the first pipeline stage, and finds the mark that was written in that stage. Rank 2
    # is in the second stage, and finds none.
    assert found == [[OWN, 4], [OWN]]


@pytest.mark.parametrize(("heads", "wrote", "reads"), [(1, 1, 2), (3, 1, 4), (3, 1, 8), (2, 2, 8)])
async def test_a_group_whose_draft_no_other_size_divides_leaves_its_mark_for_those_without_it(
    shelf: Shelf, heads: int, wrote: int, reads: int
) -> None:
    layout = PageLayout(page_tokens=2, columns=(K, V, replace(NARROW, heads=heads)))

    backend = await opened_on(shelf)
    await shardings_of(wrote, layout).announce(backend, 100.0, soon())
    ours = shardings_of(reads, layout, ["narrow"])
    await ours.look(backend, 100.0, soon())
    assert ours.order(KV_POOL) == [OWN, wrote]


async def test_groups_of_all_sizes_whose_ranks_hold_all_alike_leave_one_mark(shelf: Shelf) -> None:
    backend = await opened_on(shelf)
    for size in (4, 8):
        await shardings_of(size, LATENT_DRAFT, ["narrow"]).announce(backend, 100.0, soon())
    assert [each.name.shard for each in await listed(backend)] == ["stage0of1.tp.all"]
    found: list[int] = []
    for size in (1, 2, 4, 8):
        ours = shardings_of(size, LATENT_DRAFT, ["narrow"])
        await ours.look(backend, 100.0, soon())
        found.append(len(ours.elsewhere(KV_POOL)))
    # Groups of 4 and 8 ranks use the same object names, so neither has other objects to look for.
    assert found == [1, 1, 0, 0]


async def test_groups_leave_no_mark_where_no_other_size_can_hold_the_pools(shelf: Shelf) -> None:
    one = PageLayout(page_tokens=2, columns=(replace(K, heads=1), INDEX))
    two = PageLayout(page_tokens=2, columns=(replace(K, heads=2), INDEX))

    backend = await opened_on(shelf)
    for pools in ({KV_POOL: one}, {KV_POOL: one, "state": two}):
        ours = Shardings(ShardPlace.of(0, 1), pools, NAMESPACE)
        await ours.announce(backend, 100.0, soon())
    assert not shelf.objects


async def test_a_lookup_that_is_cancelled_does_not_keep_others_from_looking(shelf: Shelf) -> None:
    slow = await slow_on(shelf, marks=[4])
    ours = shardings_of(2)
    first, second = [look(ours, slow) for _ in range(2)]
    await slow.began.wait()
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    slow.may_answer.set()
    await second
    assert ours.order(KV_POOL) == [OWN, 4]
    assert (len(slow.queries), slow.stopped) == (1, 0)


async def test_nobody_looks_for_marks_any_more_once_all_who_asked_are_cancelled(
    shelf: Shelf,
) -> None:
    slow = await slow_on(shelf)
    ours = shardings_of(2)
    lookups = [look(ours, slow) for _ in range(2)]
    await slow.began.wait()
    for each in lookups:
        each.cancel()
    await asyncio.wait(lookups)
    assert slow.stopped == 1
    # The cancelled lookups read no marks, so the next lookup searches again at once.
    slow.may_answer.set()
    await ours.look(slow, 100.0, soon())
    assert len(slow.queries) == 2


async def test_a_lookup_waits_for_marks_no_longer_than_until_its_own_deadline(shelf: Shelf) -> None:
    slow = await slow_on(shelf)
    ours = shardings_of(2)
    patient = look(ours, slow)
    await slow.began.wait()
    await ours.look(slow, 100.0, asyncio.get_running_loop().time())
    assert ours.order(KV_POOL) == [OWN]
    assert not patient.done()
    slow.may_answer.set()
    await patient


async def test_what_the_store_raises_reaches_all_who_wait_and_the_next_one_looks_again(
    shelf: Shelf,
) -> None:
    class Broken(SlowStore):
        async def exists(self, names: Sequence[ObjectName], *, deadline: float) -> list[bool]:
            await super().exists(names, deadline=deadline)
            raise StorageError("broken")

    broken = Broken(shelf)
    await broken.open()
    ours = shardings_of(2)
    lookups = [look(ours, broken) for _ in range(2)]
    broken.may_answer.set()
    raised = await asyncio.gather(*lookups, return_exceptions=True)
    assert [str(each) for each in raised] == ["broken"] * 2
    with pytest.raises(StorageError):
        await ours.look(broken, 100.0, soon())
    assert len(broken.queries) == 2


async def test_groups_that_are_known_stay_known_and_are_not_looked_for_any_more(
    shelf: Shelf,
) -> None:
    backend = await opened_on(shelf)
    store = SlowStore(shelf)
    store.may_answer.set()
    await store.open()
    await shardings_of(4).announce(backend, 100.0, soon())
    ours = shardings_of(2)
    await ours.look(store, 100.0, soon())
    shelf.objects.clear()
    await shardings_of(1).announce(backend, 100.0, soon())
    await ours.look(store, 100.0 + LOOK_AGAIN_S, soon())
    assert ours.order(KV_POOL) == [OWN, 1, 4]
    assert [len(names) for names in store.queries] == [3, 2]
