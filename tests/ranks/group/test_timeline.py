"""Timeline events of a cache: steps, rounds (failed ones, too), copies, calls, operations."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch
from msgspec import structs

from lockstep import Cache, CacheConfig, Column, HostCacheConfig, PageLayout, StopPolicy, StopRule
from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.errors import PeerLost
from lockstep.ranks.executor.engine_pages import EnginePages
from lockstep.ranks.group.host_cache import HostCache
from lockstep.ranks.protocol.timed_events import (
    OperationBegan,
    OperationEnded,
    PagesCopied,
    RequestReleased,
    RoundHeld,
    StepHalf,
    StoreCalled,
    TimedEvent,
)
from tests.kit.ranks.serving_alone import served

LAYOUT = PageLayout(page_tokens=4, columns=(Column(name="k", layers=1, heads=2, elements=1),))


def opened(depth: int, events: list[TimedEvent]) -> Cache:
    config = CacheConfig(
        model="m", layout=LAYOUT, device_pages=8, host_pages=8, pipeline_depth=depth
    )
    return Cache.open(config, InProcessGroup(1).member(0), timeline=events.append)


def test_a_pipelined_step_has_two_halves_and_the_round_of_the_step_before_in_the_first() -> None:
    events: list[TimedEvent] = []
    with closing(opened(1, events)) as cache:
        cache.step()
        cache.step()

    rows = [(type(each).__name__, *structs.astuple(each)[:2]) for each in events[:5]]
    round_ = next(each for each in events if isinstance(each, RoundHeld))
    second = next(e for e in events if isinstance(e, StepHalf) and e.step == 2)

    assert [each[:2] for each in rows] == [
        ("StepHalf", 1),
        ("StepHalf", 1),
        ("RoundHeld", 1),
        ("StepHalf", 2),
        ("StepHalf", 2),
    ]
    assert [each[2] for each in rows if each[0] == "StepHalf"] == [False, True, False, True]
    assert second.began_s <= round_.awaited_s <= round_.ended_s <= second.ended_s
    assert round_.voted_s < second.began_s


def test_a_step_that_waits_for_its_own_round_is_in_one_piece() -> None:
    events: list[TimedEvent] = []
    with closing(opened(0, events)) as cache:
        cache.step()

    assert [type(each) for each in events[:2]] == [RoundHeld, StepHalf]
    assert [each for each in events if isinstance(each, StepHalf) and not each.launches] == []


def test_a_round_that_ends_the_epoch_is_told_with_the_time_that_it_took() -> None:
    events: list[TimedEvent] = []
    group = InProcessGroup(2)
    config = CacheConfig(model="m", layout=LAYOUT, device_pages=8, host_pages=8)
    with ThreadPoolExecutor(2) as threads:
        begun = [
            threads.submit(
                Cache.open, config, group.member(rank), timeline=events.append if not rank else None
            )
            for rank in range(2)
        ]
        caches = [each.result(60) for each in begun]
    caches[1].abandon()
    caches[0].step()

    with pytest.raises(PeerLost):
        caches[0].step()

    caches[0].close()
    assert [each.number for each in events if isinstance(each, RoundHeld)] == [1]


def test_copies_and_calls_are_told_with_their_operation_and_add_up_to_what_was_moved() -> None:
    events: list[TimedEvent] = []
    config = CacheConfig(
        model="m",
        layout=LAYOUT,
        device_pages=8,
        host_pages=8,
        store="memory://timeline",
        stop_policy=StopPolicy(rule=StopRule.WAIT_COMPLETE),
    )
    with closing(Cache.open(config, InProcessGroup(1).member(0))) as before:
        assert served(before, "r", range(4)) == 0
    member = InProcessGroup(1).member(0)
    with closing(Cache.open(config, member, timeline=events.append)) as cache:
        assert served(cache, "r", range(6)) == 4
        moved = cache.stats().bytes_moved

    kinds = {e.operation: e.kind for e in events if isinstance(e, OperationBegan)}
    calls = [each for each in events if isinstance(each, StoreCalled)]
    copies = [each for each in events if isinstance(each, PagesCopied)]
    assert {(kinds[each.operation], each.call) for each in calls} == {
        ("prefetch", "exists"),
        ("prefetch", "read"),
        ("persist", "write"),
    }
    assert {kinds[each.operation] for each in copies} == {"backup", "load_back"}
    assert sum(each.nbytes for each in copies) == moved.l1_to_l2 + moved.l2_to_l1
    assert sum(e.nbytes for e in calls if e.call == "read") == moved.l3_to_l2
    timed: list[PagesCopied | StoreCalled] = [*copies, *calls]
    assert [each for each in timed if each.ended_s < each.began_s] == []
    assert kinds.keys() == {e.operation for e in events if isinstance(e, OperationEnded)}


def test_a_cache_under_an_engine_s_own_pages_tells_the_same() -> None:
    events: list[TimedEvent] = []
    config = HostCacheConfig(model="m", layout=LAYOUT, host_pages=4, pipeline_depth=0)
    columns = {"k": [torch.ones(4, 2, 4, 1, dtype=torch.bfloat16)]}
    pages = EnginePages(LAYOUT.shard(0, 1), columns)
    member = InProcessGroup(1).member(0)
    with closing(HostCache.open(config, pages, member, timeline=events.append)) as cache:
        cache.back_up("r", list(range(16)), range(4))
        assert cache.flush()
        assert cache.release("r")

    (copied,) = [each for each in events if isinstance(each, PagesCopied)]
    assert (copied.pages, copied.nbytes, copied.ok) == (4, cache.stats().bytes_moved.l1_to_l2, True)
    assert [each.request for each in events if isinstance(each, RequestReleased)] == ["r"]
