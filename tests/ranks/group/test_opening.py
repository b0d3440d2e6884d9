"""A cache opens on every rank or on none, and every rank raises the same reason."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from msgspec import structs

from lockstep import Cache, CacheConfig, Column, ConfigError, PageLayout, Timeouts
from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.coordinator.proposal import Change, Proposal
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.executor.writers import EVERYTHING, WriterShare
from lockstep.ranks.group.opening import store_access
from lockstep.ranks.protocol.config import Recurrent, SlidingWindow
from lockstep.storage_backends.uri import parse_uri

LAYOUT = PageLayout(page_tokens=4, columns=(Column(name="k", layers=1, heads=4, elements=1),))
CONFIG = CacheConfig(
    model="m", layout=LAYOUT, device_pages=8, host_pages=8, timeouts=Timeouts(open_s=20.0)
)

WINDOW = SlidingWindow(window_tokens=8, layout=LAYOUT, device_pages=6, host_pages=6)
STATE = Recurrent(
    checkpoint_tokens=8, layout=replace(LAYOUT, page_tokens=1), device_pages=4, host_pages=4
)
HYBRID = replace(CONFIG, components=(WINDOW, STATE))
LATENT = replace(
    CONFIG,
    layout=PageLayout(
        page_tokens=4,
        columns=(Column(name="latent", layers=1, heads=1, elements=8, replicated=True),),
    ),
)


def open_on(
    configs: list[CacheConfig],
    devices: list[str] | None = None,
) -> list[Future[Cache]]:
    group = InProcessGroup(len(configs))
    devices = devices or ["cpu"] * len(configs)
    with ThreadPoolExecutor(len(configs)) as threads:
        return [
            threads.submit(Cache.open, config, group.member(rank), device=device)
            for rank, (config, device) in enumerate(zip(configs, devices, strict=True))
        ]


def executors(futures: list[Future[Cache]]) -> list[RankExecutor]:
    """Close the caches' executors and return them; their pools and counters can still be read."""
    found: list[RankExecutor] = []
    for future in futures:
        executor = future.result().inspection.executor
        assert isinstance(executor, RankExecutor)
        executor.close()
        found.append(executor)
    return found


def problems(futures: list[Future[Cache]]) -> set[str]:
    messages: set[str] = set()
    for future in futures:
        with pytest.raises(ConfigError) as raised:
            future.result()
        messages.add(str(raised.value))
    return messages


@pytest.mark.parametrize(
    ("store", "named"),
    [
        ("3fs:///kv/{0}?index=redis://:hunter2@db/0", "'3fs:///kv/1?index=redis://***@db/0'"),
        ("3fs:///kv/0?index=redis://:hunter2{0}@db/0", "equal except for a secret"),
    ],
    ids=["in the path", "in the password"],
)
def test_stores_that_differ_are_named_without_their_secrets(store: str, named: str) -> None:
    (message,) = problems(open_on([replace(CONFIG, store=store.format(rank)) for rank in (0, 1)]))

    assert message == (
        "the ranks were started with different settings: store is"
        f" '3fs:///kv/0?index=redis://***@db/0' on rank 0, {named} on rank 1"
    )


def test_settings_are_printed_without_the_store_s_secrets() -> None:
    store = "peer://127.0.0.1:1?secret=hunter2-hunter2-hunter2"

    assert "hunter2" not in repr(replace(CONFIG, store=store))
    assert "hunter2" not in repr(Proposal(Change.ATTACH, store))
    assert "hunter2" not in repr(parse_uri(store))


def test_a_store_that_one_rank_cannot_use_stops_all(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a directory")

    (message,) = problems(open_on([replace(CONFIG, store=f"file://{in_the_way}")] * 2))

    assert str(in_the_way) in message


def test_a_rank_that_fails_in_an_unforeseen_way_is_still_heard_by_the_others() -> None:
    """If a rank fails with any error, such as out of memory, all ranks raise, and none waits."""
    (message,) = problems(open_on([CONFIG, CONFIG], ["cpu", "mps:0"]))

    assert message.startswith("rank 1: ")


def test_each_start_of_a_group_has_an_epoch_that_its_ranks_share_and_no_other_has() -> None:
    """Rule R2: each start of a group has a new epoch, so ranks of different starts cannot mix."""
    starts = [[each.result() for each in open_on([CONFIG] * 2)] for _ in range(3)]

    epochs = [{cache.inspection.epoch for cache in caches} for caches in starts]
    for cache in chain.from_iterable(starts):
        cache.close(flush=False)
    assert [len(each) for each in epochs] == [1, 1, 1]
    assert len(set(chain.from_iterable(epochs))) == 3


def test_of_each_pool_s_sizes_the_smallest_is_used() -> None:
    smaller_window = structs.replace(WINDOW, device_pages=5, host_pages=9)
    smaller_state = structs.replace(STATE, device_pages=9, host_pages=3)
    other = replace(CONFIG, components=(smaller_window, smaller_state), host_pages=7)

    opened = executors(open_on([HYBRID, other]))

    assert [
        {name: pool.pages for name, pool in executor.device_pools.items()} for executor in opened
    ] == [{"kv": 8, "window": 5, "state": 4}] * 2
    assert [
        {name: pool.pages for name, pool in executor.host_pools.items()} for executor in opened
    ] == [{"kv": 7, "window": 6, "state": 3}] * 2


@pytest.mark.parametrize(
    ("device_pages", "host_pages"),
    [((1 << 31) - 1, 1), (2, (1 << 31) - 1)],
    ids=["device pages", "host pages"],
)
def test_memory_that_the_machine_does_not_have_is_refused_before_it_is_taken_for_any_pool(
    device_pages: int, host_pages: int
) -> None:
    column = Column(name="conv", layers=1, heads=2, elements=1 << 16)
    layout = PageLayout(page_tokens=1, columns=(column,))
    large = structs.replace(STATE, layout=layout, device_pages=device_pages, host_pages=host_pages)

    (message,) = problems(open_on([replace(CONFIG, components=(WINDOW, large))] * 2))

    assert "GiB is available" in message


@pytest.mark.parametrize(
    ("store", "share"),
    [
        ("file:///kv", WriterShare(rank=1, world_size=2)),
        ("file:///kv/{rank}", EVERYTHING),
    ],
    ids=["one store", "a store for each rank"],
)
def test_ranks_share_out_replicated_pages_only_where_they_share_a_store(
    store: str, share: WriterShare
) -> None:
    assert store_access(LATENT, 1, 2, store).writer == share


def test_a_store_that_has_the_model_with_other_components_is_refused_by_the_pool_s_name(
    tmp_path: Path,
) -> None:
    store = f"file://{tmp_path}?durability=none"
    executors(open_on([replace(HYBRID, store=store)] * 2))

    (message,) = problems(open_on([replace(CONFIG, store=store)] * 2))

    assert "the store keeps the pool 'state', which is not configured here" in message
