"""A group reads what a group of another TP size has on its hosts, through its ranks' storage loops."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import pytest

from lockstep.coordinator.ballot import Answered, Landed
from lockstep.page_format.page_layout import PageLayout, ShardPlace
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.protocol.orders import KV_POOL, Fetch, LookUp, Need
from lockstep.storage_backends.records.shardings import Shardings
from lockstep.storage_backends.registry import make_backend
from tests.kit.ranks.executor_parts import (
    LONG_S,
    NAMESPACE,
    bytes_read,
    happened,
    hashed_keys,
    hashed_objects,
    includes,
    make_executor,
)
from tests.kit.ranks.page_servers import ServedGroup, serving
from tests.kit.ranks.reference_pages import INDEX, LATENT, K, V, reference_page

PAGES = 5
KEYS = hashed_keys(PAGES)
LAYOUT = PageLayout(page_tokens=2, columns=(K, INDEX, V))
REPLICATED = PageLayout(page_tokens=2, columns=(LATENT, INDEX))

Serve = Callable[..., ServedGroup]
Join = Callable[..., list[RankExecutor]]


@pytest.fixture
def serve(stack: ExitStack) -> Serve:
    """Starts a group that offers all of its pages."""

    def start(layout: PageLayout, tp_size: int, absent: Sequence[str] = ()) -> ServedGroup:
        group = stack.enter_context(serving(layout, tp_size, absent, pages=PAGES))
        group.serve(KEYS)
        return group

    return start


@pytest.fixture
def join(stack: ExitStack) -> Join:
    """Starts the executors of a group that reads from another one."""

    def start(
        group: ServedGroup, layout: PageLayout, tp_size: int, absent: Sequence[str] = ()
    ) -> list[RankExecutor]:
        executors: list[RankExecutor] = []
        for rank in range(tp_size):
            place = ShardPlace.of(rank, tp_size)
            executor = make_executor(
                layout.shard(rank, tp_size, absent=absent),
                backend=make_backend(group.uri),
                shardings=Shardings(place, {KV_POOL: layout}, NAMESPACE, absent),
                host_pages=PAGES,
            )
            stack.callback(executor.close)
            executors.append(executor)
        return executors

    return start


def looked_up(executor: RankExecutor) -> int:
    """How many leading pages a rank believes to be there."""
    (progress,) = happened(executor, [LookUp(2, 0, (Need(KV_POOL, 0, KEYS),), LONG_S)], bool)
    assert isinstance(progress, Answered)
    return progress.pages


def fetched(executor: RankExecutor) -> list[bytes]:
    """The pages that a rank has read: all of them."""
    happened(executor, [Fetch(3, hashed_objects(PAGES), LONG_S)], includes(Landed(3, PAGES)))
    return [bytes(executor.host_pool.page(page)) for page in range(PAGES)]


def pages_of(layout: PageLayout, tp_size: int, absent: Sequence[str] = ()) -> list[list[bytes]]:
    places = [ShardPlace.of(rank, tp_size) for rank in range(tp_size)]
    return [
        [reference_page(layout, place, absent, page) for page in range(PAGES)] for place in places
    ]


@pytest.mark.parametrize(
    ("served", "reads"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (8, 1)]
)
def test_ranks_of_any_tp_size_read_their_part_of_what_another_group_serves(
    serve: Serve, join: Join, served: int, reads: int
) -> None:
    group = join(serve(LAYOUT, served), LAYOUT, reads)

    assert [looked_up(executor) for executor in group] == [PAGES] * reads
    assert [fetched(executor) for executor in group] == pages_of(LAYOUT, reads)
    assert [bytes_read(executor) for executor in group] == [
        PAGES * executor.host_pool.layout.page_bytes for executor in group
    ]


@pytest.mark.parametrize(("served", "reads"), [(4, 4), (4, 2), (2, 4), (1, 2)])
def test_what_all_ranks_hold_alike_is_read_from_any_of_them(
    serve: Serve, join: Join, served: int, reads: int
) -> None:
    group = join(serve(REPLICATED, served), REPLICATED, reads)

    assert [looked_up(executor) for executor in group] == [PAGES] * reads
    assert [fetched(executor) for executor in group] == pages_of(REPLICATED, reads)


def test_what_all_ranks_hold_alike_is_read_from_all_of_them(serve: Serve, join: Join) -> None:
    group = serve(REPLICATED, 2)
    (executor,) = join(group, REPLICATED, 1)

    fetched(executor)

    sent = [server.sent().objects for server in group.servers]
    assert sum(sent) == PAGES
    assert min(sent) > 0
