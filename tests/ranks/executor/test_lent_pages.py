"""Copies of engine-owned pages wait for the engine's stream, and end before pages are overwritten."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec import structs

from lockstep.coordinator.ballot import Quiesced, QuiesceExpired, TransferEnded
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.executor import cuda_copies
from lockstep.ranks.executor.copies import CpuCopies
from lockstep.ranks.executor.engine_pages import EnginePages
from lockstep.ranks.executor.executor import RankExecutor
from lockstep.ranks.executor.pools import HostPool, TierPools
from lockstep.ranks.protocol.orders import (
    KV_POOL,
    Cancel,
    CopyToDevice,
    CopyToHost,
    Direction,
    Fence,
)
from tests.kit.devices import DEVICES
from tests.kit.ranks.executor_parts import (
    LONG_S,
    PATIENCE_S,
    happened,
    includes,
    to_device,
    to_host,
    waited,
)


@pytest.fixture(params=DEVICES)
def executor(request: pytest.FixtureRequest) -> Iterator[RankExecutor]:
    """An executor over an engine's pages. The engine's pages hold ones, and the host pages zeros."""
    device: str = request.param
    column = Column(name="kv", layers=1, heads=2, elements=5, dtype="float32")
    layout = PageLayout(page_tokens=4, columns=(column,)).shard(0, 1)
    pages = EnginePages(layout, {"kv": [torch.ones(6, 2, 4, 5, device=device)]})
    pools = TierPools(pages, HostPool(layout, 6, pinned=device == "cuda"))
    executor = RankExecutor({KV_POOL: pools}, close_timeout_s=PATIENCE_S)
    yield executor
    executor.close()


def begin(executor: RankExecutor, order: CopyToHost | CopyToDevice) -> None:
    executor.carry_out([order])
    executor.begin_copies(order.direction)


class Gate:
    """Blocks copies until the gate is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self._hold(monkeypatch, CpuCopies, "_copy")
        self._hold(monkeypatch, cuda_copies._Way, "_launch_transfer")  # pyright: ignore[reportPrivateUsage]

    def _hold(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        copy = getattr(owner, name)

        def held(*arguments: Any) -> None:
            self.opened.wait(PATIENCE_S)
            copy(*arguments)

        monkeypatch.setattr(owner, name, held)


@pytest.mark.parametrize("operations", [(1, 99), None], ids=["named", "all"])
def test_a_fence_waits_for_copies_that_end_in_time(
    executor: RankExecutor, operations: tuple[int, ...] | None
) -> None:
    begin(executor, to_host(1, [0], [0]))

    executor.carry_out([Fence(operations, LONG_S)])

    assert executor.progress() == [TransferEnded(1, ok=True)]


def test_a_copy_that_outlives_its_fence_has_failed_even_if_it_ends_well(
    executor: RankExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule R3: a copy that outlives its fence has failed: it may have read overwritten pages."""
    gate = Gate(monkeypatch)

    begin(executor, to_host(1, [0], [0]))

    executor.carry_out([Fence((1,), 0.01)])
    progress = executor.progress()
    gate.opened.set()
    progress += happened(executor, [Cancel(1, LONG_S)], includes(Quiesced(1)))

    assert progress == [TransferEnded(1, ok=False), Quiesced(1)]
    assert executor.trouble() is None


def test_a_load_into_an_engine_s_pages_that_never_ends_is_the_end_of_the_rank(
    executor: RankExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank with a hanging load is lost: Lockstep cannot quarantine the engine's pages."""
    gate = Gate(monkeypatch)
    begin(executor, structs.replace(to_device(1, [0], [0]), timeout_s=0.01))
    waited(executor, includes(TransferEnded(1, ok=False)))

    happened(executor, [Cancel(1, 0.01)], includes(QuiesceExpired(1)))

    trouble = executor.trouble()
    gate.opened.set()
    assert trouble is not None
    assert "does not end; the device is taken for lost" in trouble


def test_copies_begin_in_the_direction_that_the_engine_says(executor: RankExecutor) -> None:
    executor.carry_out([to_host(1, [0], [0]), to_device(2, [1], [1]), to_host(3, [2], [2])])

    executor.begin_copies(Direction.TO_DEVICE)
    assert waited(executor, bool) == [TransferEnded(2, ok=True)]
    executor.begin_copies(Direction.TO_HOST)
    done = includes(TransferEnded(3, ok=True))
    assert waited(executor, done) == [TransferEnded(1, ok=True), TransferEnded(3, ok=True)]


def test_a_copy_s_time_begins_with_the_copy(
    executor: RankExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    executor.carry_out([structs.replace(to_host(1, [0], [0]), timeout_s=0.0)])
    assert executor.progress() == []

    executor.begin_copies(Direction.TO_HOST)

    assert executor.progress() == [TransferEnded(1, ok=False)]
    gate.opened.set()


@pytest.mark.parametrize("timeout_s", [0.0, LONG_S])
def test_a_copy_that_is_fenced_before_it_begins_has_failed_and_never_begins(
    executor: RankExecutor, timeout_s: float
) -> None:
    executor.carry_out([to_host(1, [0], [0]), to_host(2, [1], [1]), Fence((1,), timeout_s)])
    assert executor.progress() == [TransferEnded(1, ok=False)]

    executor.begin_copies(Direction.TO_HOST)

    assert waited(executor, bool) == [TransferEnded(2, ok=True)]
    assert not executor.host_pool.bytes_tensor[0].any()
    assert executor.host_pool.bytes_tensor[1].any()
    executor.carry_out([Cancel(1, LONG_S)])
    assert executor.progress() == [Quiesced(1)]


def test_a_copy_that_is_cancelled_before_it_begins_ends_and_is_quiet(
    executor: RankExecutor,
) -> None:
    executor.carry_out([to_device(1, [0], [0]), to_device(2, [1], [1]), Cancel(1, LONG_S)])
    assert executor.progress() == [TransferEnded(1, ok=False), Quiesced(1)]

    executor.begin_copies(Direction.TO_DEVICE)

    assert waited(executor, bool) == [TransferEnded(2, ok=True)]
    assert executor.counts().bytes_moved.l2_to_l1 == executor.host_pool.layout.page_bytes


def test_nobody_waits_for_a_copy_that_waits_for_the_engine(executor: RankExecutor) -> None:
    executor.carry_out([to_host(1, [0], [0])])

    started = time.monotonic()
    executor.wait(PATIENCE_S)

    assert time.monotonic() - started < PATIENCE_S / 2
    assert executor.progress() == []


def test_what_has_not_begun_when_the_executor_closes_never_begins(executor: RankExecutor) -> None:
    executor.carry_out([to_host(1, [0], [0])])

    executor.close()
    executor.begin_copies(Direction.TO_HOST)

    assert executor.progress() == []
    assert executor.counts().bytes_moved.l1_to_l2 == 0
