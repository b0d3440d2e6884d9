"""A key that hangs in a store: its effect on the other keys of the call, and its log line."""

import logging
from collections.abc import Iterator

import pytest

from lockstep.coordinator.ballot import Answered, Expired, Landed, TransferEnded
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.protocol.orders import KV_POOL, Fetch, LookUp, Need, ObjectTransfer, Put
from lockstep.storage_backends.memory import MemoryBackend, Shelf
from lockstep.storage_backends.wrappers.fault import Fault, FaultBackend, FaultPlan
from tests.kit.ranks.executor_parts import (
    LONG_S,
    fill_host,
    grouped_layout,
    happened,
    includes,
    keys,
    make_executor,
)

SOON_S = 2.0
PAGES = ObjectTransfer(KV_POOL, keys(4), tuple(range(4)))
THIRD_OF_FOUR_HANGS = FaultPlan(seed=9, rates={Fault.TIMEOUT: 0.25})


@pytest.fixture
def executor() -> Iterator[RankExecutor]:
    """An executor whose store has four pages; a call for all four hangs on the third page."""
    shelf = Shelf()
    writer = make_executor(grouped_layout(), backend=MemoryBackend(shelf))
    fill_host(writer.host_pool, 1)
    happened(writer, [Put(1, (PAGES,), LONG_S)], includes(TransferEnded(1, ok=True)))
    writer.close()
    store = FaultBackend(MemoryBackend(shelf), THIRD_OF_FOUR_HANGS)
    made = make_executor(grouped_layout(), backend=store)
    yield made
    made.close()


def test_a_page_that_hangs_does_not_hold_back_those_before_it_past_their_time(
    executor: RankExecutor,
) -> None:
    progress = happened(executor, [Fetch(2, (PAGES,), SOON_S)], includes(Expired(2)))

    assert progress.index(Landed(2, 2)) < progress.index(Expired(2))


def test_a_key_that_hangs_hides_nothing_before_it_and_the_late_call_is_counted_and_told_in_one_line(
    executor: RankExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    look_up = LookUp(2, 0, (Need(KV_POOL, 0, keys(4)),), SOON_S)
    with caplog.at_level(logging.WARNING):
        progress = happened(executor, [look_up], includes(Answered(2, 2)))

    assert progress == [Answered(2, 2)]
    late = executor.counts().storage_late
    assert late.calls == 1
    assert late.waited_s > SOON_S / 2
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert messages[0].startswith("the store times out; calls without an answer in time: 1, ")
