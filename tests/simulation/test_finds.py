"""Planted bugs: each has happened in some project, and the simulator must find it.

Each bug is planted by building the ranks with one faulty part. Some schedule among the first seeds must
end in a violation whose text names the fault.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from lockstep.coordinator.ballot import Landed, Progress, Quiesced, TransferEnded
from lockstep.coordinator.operation import Outcome
from lockstep.coordinator.verdict import PrefetchArrived
from lockstep.errors import CollectiveTimeout
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.group.member.group_rank import Substitutes
from lockstep.ranks.protocol.answers import Admission, Wait
from lockstep.ranks.protocol.events import Cause, MissReason
from lockstep.ranks.protocol.orders import Cancel, Fetch, Order
from lockstep.ranks.replica.core.pages import PageRun
from lockstep.ranks.replica.device.owned import OwnedDevice
from lockstep.ranks.replica.operations.backing_up import BackingUp
from lockstep.ranks.replica.operations.kinds import Backup, Moving, Operation, Prefetch
from lockstep.ranks.replica.operations.operation_table import OperationTable
from lockstep.ranks.replica.operations.requests import OwnedRequest, Requests
from lockstep.ranks.replica.parts import Parts
from lockstep.ranks.replica.prefetch.prefetching import Prefetching
from lockstep.ranks.replica.tree import prefixes as prefixes_module
from lockstep.ranks.replica.tree import tree as tree_module
from lockstep.ranks.replica.tree.node import DEVICE, HOST, Node
from lockstep.ranks.replica.tree.page_allocator import PageAllocator
from lockstep.ranks.replica.tree.prefixes import Prefixes
from lockstep.ranks.replica.tree.tokens import TOKEN_BYTES
from lockstep.simulation.rank.conditions import Conditions, ObjectPage
from lockstep.simulation.rank.epoch import Build, make_executor
from lockstep.simulation.rank.executor import SimulatedExecutor
from lockstep.simulation.rank.memory import SimulatedStore, SymbolicMemory
from lockstep.simulation.schedule import Schedule
from lockstep.simulation.world.models import LLAMA
from lockstep.simulation.world.world import ENGINE, REPLICA, draw_world
from tests.kit.planted_bugs import SEEDS_MAX, assert_found, making, seeds_from, violations

# Planted bugs of one rank: the replicas diverge.


class _ReversesAFreeList(Cache):
    def open_round(self) -> None:
        super().open_round()
        if self.rank == 1:
            self.inspection.prefixes.allocator.pools[DEVICE][0]._free.reverse()  # pyright: ignore[reportPrivateUsage]


class _LosesReleases(Cache):
    def release(self, request: str) -> None:
        if self.rank != 1:
            super().release(request)


class _LosesAHostPage(Cache):
    """Planted bug: rank 0 loses a host page when its cache is built."""

    def __init__(self, *parts: Any, **others: Any) -> None:
        super().__init__(*parts, **others)
        if self.rank == 0:
            self.inspection.prefixes.allocator.pools[HOST][0]._free.pop()  # pyright: ignore[reportPrivateUsage]


class _LosesPriorities(Cache):
    def load_back(self, *arguments: Any, priority: int = 0, **others: Any) -> Admission | Wait:
        return super().load_back(*arguments, priority=priority if self.rank != 1 else 0, **others)


class _GathersInAStep(Cache):
    def open_round(self) -> None:
        super().open_round()
        with suppress(CollectiveTimeout):
            self._collective.gather(b"", 1.0)


class _CountsTokens(Requests):
    def digest_tokens(self, command: str, name: str, tokens: bytes, *facts: object) -> int:
        self._journal.record("tokens", command, name, len(tokens), *facts)
        return 0


def test_a_free_list_in_another_order_on_one_rank_is_found() -> None:
    found = violations(Build(cache=_ReversesAFreeList))
    assert_found(found, "rank 0 answers", "digests differ")


def test_a_command_that_one_rank_does_not_get_is_found() -> None:
    assert_found(violations(Build(cache=_LosesReleases)), "digests differ")


def test_a_change_that_no_digest_tells_of_is_found() -> None:
    """Without requests, a lost host page shows in no digest, so only invariant 7 can find the bug."""
    world = draw_world(4, ranks=2, steps=100, profile=LLAMA, faults="calm", depth=0, l1=REPLICA)
    schedule = Schedule(replace(world, arrival_rate=0.0), build=Build(cache=_LosesAHostPage))

    violation = schedule.run().violation

    assert violation is not None
    assert violation.finding == "rank 0: invariant 7: 1 host pages have no owner"
    assert violation.step == 7


def test_a_priority_that_one_rank_does_not_hear_of_is_found() -> None:
    assert_found(violations(Build(cache=_LosesPriorities)), "digests differ")


def test_a_time_that_is_not_that_of_the_last_clock_is_found() -> None:
    """Planted bug: the ranks agree on the maximum of their clocks instead of the minimum."""
    clocks: list[Callable[[], int]] = []

    class GoesByTheFirstClock(Cache):
        def __init__(self, *parts: Any, substitutes: Substitutes, **others: Any) -> None:
            assert substitutes.clock_ms is not None
            clocks.append(substitutes.clock_ms)
            latest = clocks[-2:]
            first = replace(substitutes, clock_ms=lambda: max(each() for each in latest))
            super().__init__(*parts, substitutes=first, **others)

    assert_found(violations(Build(cache=GoesByTheFirstClock)), "the agreed time is")


def test_a_rank_that_reads_the_shards_of_another_is_found() -> None:
    made: list[SimulatedExecutor] = []

    class ReadsOfRank0(SimulatedExecutor):
        def _read_object(self, page: ObjectPage) -> int | None:
            return SimulatedExecutor._read_object(made[-2], page)

    def make(
        conditions: Conditions, memory: SymbolicMemory, store: SimulatedStore
    ) -> SimulatedExecutor:
        kind = ReadsOfRank0 if conditions.rank else SimulatedExecutor
        made.append(make_executor(conditions, memory, store, kind=kind))
        return made[-1]

    found = list(violations(Build(make=make), seeds=range(12)))

    matching = [each for each in found if "the tree offers" in each]
    assert matching
    assert all("rank 1: " in each and each.endswith("of rank 0") for each in matching)


def test_a_rank_that_writes_what_another_has_is_found() -> None:
    """Planted bug: both ranks write the same objects, as if object names did not contain the rank."""
    made: list[SimulatedExecutor] = []

    def make(
        conditions: Conditions, memory: SymbolicMemory, store: SimulatedStore
    ) -> SimulatedExecutor:
        made.append(make_executor(conditions, memory, store))
        own, before = made[-1], made[-1 - min(conditions.rank, 1)]
        own.stores.used = before.stores.used
        return own

    assert_found(violations(Build(make=make)), "a persist stores content")


def test_a_second_collective_in_a_step_is_found() -> None:
    assert_found(violations(Build(cache=_GathersInAStep)), "reached 2 collectives")


@pytest.mark.parametrize("l1", [REPLICA, ENGINE])
def test_a_digest_that_counts_tokens_and_does_not_read_them_is_found(l1: str) -> None:
    """Rule R2: a digest over the number of tokens instead of their ids misses diverging samplers."""
    found = violations(Build(parts=Parts(requests=_CountsTokens)), l1=l1)
    assert_found(found, "sampled_apart struck rank")


# Planted bugs of every rank: the replicas stay equal, and all are wrong.


class _SettlesAll(Prefetching):
    def _settle(self, operation: Prefetch, why: MissReason | None) -> None:
        operation.landed = operation.wanted_count
        super()._settle(operation, why)


class _TakesItsCeilingForTheGroups(Prefetching):
    """Planted bug: the number of pages that one rank can read counts as landed on all ranks."""

    def arrived(self, verdict: PrefetchArrived) -> None:
        operation = self.has_slot(verdict.operation)
        if operation is not None and verdict.ceiling is not None:
            operation.landed = verdict.ceiling
        super().arrived(verdict)


class _FreesWhenItStops(OperationTable):
    def stop(self, operation: Operation, outcome: Outcome) -> None:
        super().stop(operation, outcome)
        self.release_locks(operation)
        self._allocator.pools[HOST][0].give_back(operation.owned_pages(HOST, 0))
        if isinstance(operation, Moving):
            operation.owned.clear()
        elif isinstance(operation, Prefetch):
            operation.assign(())


class _EvictsWhatIsLocked(PageAllocator):
    def evictable(self, tier: int, component: int, node: Node) -> bool:
        return node.values[tier][component] is not None and not node.occupied_children[tier]


class _ForgetsOperations(Prefixes):
    def split(self, node: Node, pages: int) -> None:
        self.allocator.was_split(self.tree.split(node, pages))


class _LosesAPage(OwnedDevice):
    def insert(self, request: OwnedRequest, tokens: bytes, *, final: bool) -> int:
        pool = self._allocator.pools[DEVICE][0]
        free = pool.free
        shared = super().insert(request, tokens, final=final)
        if pool.free > free:
            # Planted bug: the insert frees duplicate pages, and one of them is lost.
            pool.take(1)
        return shared


class _KeepsNothing(PageAllocator):
    def take(self, tier: int, counts: Sequence[int]) -> list[PageRun] | None:
        leaving = self.leaving(Cause.RESET)
        while (victim := self.queues[tier][0].next_victim()) is not None:
            self._evict(victim, tier, 0, leaving)
        self.give_back(leaving, tier)
        return super().take(tier, counts)


class _TakesFailuresForBackups(BackingUp):
    def failed(self, operation: Backup) -> None:
        self.settle(operation)


class _WaitsForAll(Prefetching):
    def arrived(self, verdict: PrefetchArrived) -> None:
        operation = self.has_slot(verdict.operation)
        if operation is not None and verdict.pages == operation.wanted_count:
            super().arrived(verdict)


@seeds_from(7)
def test_pages_that_have_not_landed_and_are_offered_are_found(seeds: range) -> None:
    build = Build(parts=Parts(prefetching=_SettlesAll))
    found = violations(build, faults="storage", seeds=seeds)
    assert_found(found, "the tree offers host kv page", "still writes")


@seeds_from(10, among=3 * SEEDS_MAX)
def test_a_count_of_this_rank_taken_for_the_group_is_found(seeds: range) -> None:
    build = Build(parts=Parts(prefetching=_TakesItsCeilingForTheGroups))
    found = violations(build, faults="storage", seeds=seeds)
    assert_found(found, "the tree offers host kv page", "still writes", "but it holds")


@seeds_from(7)
def test_pages_freed_without_waiting_for_quiet_are_found(seeds: range) -> None:
    build = Build(parts=Parts(operation_table=_FreesWhenItStops))
    found = violations(build, faults="storage", seeds=seeds)
    assert_found(found, "still writes it", "still read it")


def test_an_unlocked_prefix_that_is_evicted_under_a_request_is_found() -> None:
    found = violations(Build(parts=Parts(allocator=_EvictsWhatIsLocked)), faults="pressure")
    assert_found(found, "of a request", "page table", "locked", "AssertionError")


def test_keys_that_forget_what_came_before_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: a page key without the prefix serves a page of one prompt to another prompt."""

    def unchained(seed: bytes, tokens: bytes, page_tokens: int) -> list[bytes]:
        step = page_tokens * TOKEN_BYTES
        return [
            sha256(tokens[at : at + step]).digest() for at in range(0, len(tokens) - step + 1, step)
        ]

    for module in (prefixes_module, tree_module):
        monkeypatch.setattr(module, "page_keys", unchained)
    assert_found(violations(), "under the key of content")


def test_a_split_that_forgets_the_operations_of_a_node_is_found() -> None:
    found = violations(Build(parts=Parts(prefixes=_ForgetsOperations)))
    assert_found(found, "pages of another length")


def test_a_leaked_page_is_found() -> None:
    assert_found(violations(Build(parts=Parts(owned=_LosesAPage))), "have no owner")


def test_a_cache_that_never_hits_is_found() -> None:
    found = violations(Build(parts=Parts(allocator=_KeepsNothing)))
    assert_found(found, "never had to leave", "could be evicted")


def test_a_failed_backup_taken_for_a_good_one_is_found() -> None:
    found = violations(Build(parts=Parts(backing_up=_TakesFailuresForBackups)))
    assert_found(found, "the tree offers host kv page", "copies host kv page", "stores")


@seeds_from(14)
def test_a_vote_that_never_ends_is_found(seeds: range) -> None:
    build = Build(parts=Parts(prefetching=_WaitsForAll))
    assert_found(violations(build, faults="storage", seeds=seeds), "has been in TRANSFER")


# Planted bugs of an executor: replicas trust its reports, so only simulated memory contents show them.


class _Impatient(SimulatedExecutor):
    """Planted bug: an executor reports Quiesced as soon as an operation is cancelled."""

    def carry_out(self, orders: Sequence[Order]) -> None:
        super().carry_out(orders)
        for order in orders:
            if isinstance(order, Cancel):
                self.conditions.say(Quiesced(order.operation))


class _Hasty(SimulatedExecutor):
    """Planted bug: an executor reports a page as landed when its read begins."""

    def carry_out(self, orders: Sequence[Order]) -> None:
        super().carry_out(orders)
        for order in orders:
            if isinstance(order, Fetch):
                self.conditions.say(Landed(order.operation, 1))


class _Mute(SimulatedExecutor):
    """Planted bug: an executor never reports the end of a copy or write."""

    def progress(self) -> list[Progress]:
        return [each for each in super().progress() if not isinstance(each, TransferEnded)]


class _Careless(SimulatedExecutor):
    """Planted bug: an executor accepts any content under an object's name, without a checksum."""

    def _read_object(self, page: ObjectPage) -> int | None:
        content = super()._read_object(page)
        return 1_000_000 if content is None else content


@seeds_from(5, among=3 * SEEDS_MAX)
def test_an_executor_that_does_not_wait_for_its_transfers_is_found(seeds: range) -> None:
    found = violations(making(_Impatient), seeds=seeds)
    assert_found(found, "still writes it", "still read it")


@seeds_from(5)
def test_an_executor_that_reports_a_page_too_early_is_found(seeds: range) -> None:
    found = violations(making(_Hasty), seeds=seeds)
    assert_found(found, "the tree offers host kv page", "still writes it", "but it holds")


def test_an_executor_that_never_answers_is_found() -> None:
    assert_found(violations(making(_Mute)), "has been in ISSUED")


def test_a_read_without_a_checksum_is_found() -> None:
    found = violations(making(_Careless), faults="storage")
    assert_found(found, "the tree offers host kv page", "holds content 1000000")


def test_without_a_planted_bug_the_same_seeds_are_clean() -> None:
    assert not list(violations(seeds=range(SEEDS_MAX // 3)))
