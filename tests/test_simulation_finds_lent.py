"""Planted bugs of a cache under an engine's own device pages; see `test_simulation_finds`."""

from collections.abc import Sequence

import pytest
from planted_bugs import assert_found, making, seeds_from, violations

from lockstep.coordinator.ballot import Ended
from lockstep.ranks.host_cache import HostCache
from lockstep.ranks.orders import CopyToDevice, Fence, Order
from lockstep.ranks.replica import state as state_module
from lockstep.ranks.replica.loading_back import LoadingBack
from lockstep.ranks.replica.matching import Missing
from lockstep.ranks.replica.offloading import Offloading
from lockstep.ranks.replica.operations import Copy
from lockstep.ranks.replica.page_keys import namespace_seed
from lockstep.ranks.replica.pages import PageRun
from lockstep.ranks.replica.request import Request
from lockstep.ranks.replica.residence import Residence
from lockstep.ranks.replica.state import ReplicaState
from lockstep.ranks.replica.tree import Node
from lockstep.simulation.epoch import Epoch
from lockstep.simulation.executor import SimulatedExecutor
from lockstep.simulation.world import ENGINE

TOUCHED = "transfer touches"
"""What is said of a page that a copy still uses when nobody expects it."""


def test_pages_that_are_free_while_they_are_loaded_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = Offloading.release

    def release_at_once(self: Offloading, request: Request) -> bool:
        release(self, request)
        self.leaving.pop(request.id, None)
        return True

    monkeypatch.setattr(Offloading, "release", release_at_once)
    assert_found(violations(l1=ENGINE), TOUCHED)


def test_pages_that_are_freed_while_their_copies_quiesce_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take_issued_for_touching(self: Offloading) -> list[str]:
        table = self._state.operations.in_flight  # pyright: ignore[reportPrivateUsage]
        freed = [
            name
            for name, copies in self.leaving.items()
            if all(number not in table or table[number].ending is not None for number in copies)
        ]
        for name in freed:
            del self.leaving[name]
        return freed

    monkeypatch.setattr(Offloading, "take_freed", take_issued_for_touching)
    assert_found(violations(l1=ENGINE), TOUCHED)


def test_a_failed_load_that_is_told_before_it_is_quiet_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load_failed = Offloading.load_failed

    def tell_at_once(self: Offloading, operation: Copy) -> None:
        load_failed(self, operation)
        request = self._state.requests.get(operation.request or "")  # pyright: ignore[reportPrivateUsage]
        if request is not None:
            request.load = None

    monkeypatch.setattr(Offloading, "load_failed", tell_at_once)
    assert_found(violations(l1=ENGINE), TOUCHED)


def test_a_fence_that_orders_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    fence = Offloading.fence

    def fence_nothing(self: Offloading, request: Request) -> None:
        state = self._state  # pyright: ignore[reportPrivateUsage]
        fence(self, request)
        state.orders = [order for order in state.orders if not isinstance(order, Fence)]

    monkeypatch.setattr(Offloading, "fence", fence_nothing)
    assert_found(violations(l1=ENGINE), TOUCHED)


def test_a_fence_that_leaves_copies_waiting_for_the_engine_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A backup of a preempted request begins after the pages belong to another one."""

    def keep(self: HostCache, operations: set[int]) -> None:
        del self, operations

    monkeypatch.setattr(HostCache, "_drop", keep)
    assert_found(violations(l1=ENGINE), TOUCHED, "holds content", "holds nothing")


def test_device_pages_in_the_digest_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = LoadingBack.begin

    def record(
        self: LoadingBack,
        request: Request,
        last: Node,
        missing: Sequence[Missing],
        pages: Sequence[PageRun],
    ) -> int:
        self._state.journal.record("lent", *pages[0])  # pyright: ignore[reportPrivateUsage]
        return begin(self, request, last, missing, pages)

    monkeypatch.setattr(LoadingBack, "begin", record)
    assert_found(violations(l1=ENGINE), "digests differ")


def test_a_dead_tombstone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def prune_nothing(self: Residence, node: Node) -> None:
        del self, node

    monkeypatch.setattr(Residence, "prune", prune_nothing)
    assert_found(violations(l1=ENGINE), "is dead")


@seeds_from(10)
def test_a_hit_after_a_reset_is_found(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    def reset_nothing(self: ReplicaState, weights_version: str | None) -> None:
        self.journal.record("reset", self.generation)

    monkeypatch.setattr(ReplicaState, "reset", reset_nothing)
    assert_found(violations(l1=ENGINE, seeds=seeds), "right after a reset")


def test_keys_that_outlive_a_reset_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What storage has from before the reset would be served after it."""

    def seed_without_generation(model_digest: bytes, namespace: str, *_: object) -> bytes:
        return namespace_seed(model_digest, namespace, 0)

    monkeypatch.setattr(state_module, "namespace_seed", seed_without_generation)
    assert_found(violations(l1=ENGINE), "the tree offers host kv page", "under the key of content")


def test_a_request_that_loads_again_after_a_failure_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hit = Offloading.hit

    def forgive(self: Offloading, request: Request, tokens: bytes, device_tokens: int) -> int:
        failed, request.load_failed = request.load_failed, False
        found = hit(self, request, tokens, device_tokens)
        request.load_failed = failed
        return found

    monkeypatch.setattr(Offloading, "hit", forgive)
    assert_found(violations(l1=ENGINE), "where it failed to load before")


class _HastyLoads(SimulatedExecutor):
    """Says that a load has ended when it begins."""

    def carry_out(self, orders: Sequence[Order]) -> None:
        super().carry_out(orders)
        for order in orders:
            if isinstance(order, CopyToDevice):
                self.conditions.say(Ended(order.operation, ok=True))


class _Unfenced(SimulatedExecutor):
    """Takes a backup for good that was still reading when the engine came to overwrite its pages."""

    def carry_out(self, orders: Sequence[Order]) -> None:
        for order in orders:
            if isinstance(order, Fence):
                for operation in order.operations:
                    self.conditions.say(Ended(operation, ok=True))
        super().carry_out(orders)


def test_a_load_that_is_ready_too_early_is_found() -> None:
    assert_found(
        violations(make=making(_HastyLoads, every_rank=True), l1=ENGINE),
        TOUCHED,
        "is in use and being written",
    )


@seeds_from(12)
def test_a_fenced_backup_that_counts_is_found(seeds: range) -> None:
    found = violations(make=making(_Unfenced, every_rank=True), l1=ENGINE, seeds=seeds)
    assert_found(found, "the tree offers host kv page", "still writes it", "copies host kv page")


@seeds_from(54)
def test_an_executor_that_gives_up_no_device_is_found(seeds: range) -> None:
    """Pages of an engine cannot be quarantined: a copy that hangs has to end the epoch."""

    def quarantine(epoch: Epoch) -> None:
        for executor in epoch.executors:
            executor._give_up = executor.conditions.give_up_quiet  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]

    assert_found(violations(tamper=quarantine, l1=ENGINE, seeds=seeds), "is quarantined")
