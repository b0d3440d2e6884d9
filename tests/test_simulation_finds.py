"""Planted bugs: each is one that has happened somewhere, and the simulator must find it.

A bug is planted from outside, by replacing one step of the code under test. The claim is that some
schedule among the first seeds ends in a violation, and that the violation says what is wrong.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256

import pytest
from planted_bugs import SEEDS_MAX, assert_found, making, seeds_from, violations

from lockstep.coordinator.ballot import Ended, Landed, Progress, Quiesced
from lockstep.coordinator.operation import Kind, Outcome
from lockstep.coordinator.verdict import Arrived
from lockstep.ranks.cache import Cache
from lockstep.ranks.orders import Cancel, Fetch, Order
from lockstep.ranks.replica import page_keys as keys_module
from lockstep.ranks.replica import state as state_module
from lockstep.ranks.replica import tree as tree_module
from lockstep.ranks.replica.backing_up import BackingUp
from lockstep.ranks.replica.operations import Copy, Operation, Prefetch
from lockstep.ranks.replica.pages import PageRun
from lockstep.ranks.replica.prefetching import Prefetching
from lockstep.ranks.replica.request import Request
from lockstep.ranks.replica.residence import Residence
from lockstep.ranks.replica.serving import Serving
from lockstep.ranks.replica.state import ReplicaState
from lockstep.ranks.replica.tokens import TOKEN_BYTES
from lockstep.ranks.replica.tree import DEVICE, HOST, Node
from lockstep.simulation.epoch import Epoch
from lockstep.simulation.executor import SimulatedExecutor
from lockstep.simulation.world import ENGINE, REPLICA

# Bugs of one rank: the replicas part ways.


def test_a_free_list_in_another_order_on_one_rank_is_found() -> None:
    def reverse_free_list(epoch: Epoch) -> None:
        epoch.caches[1].replica.state.pools[DEVICE][0]._free.reverse()  # pyright: ignore[reportPrivateUsage]

    assert_found(violations(tamper=reverse_free_list), "rank 0 answers", "digests differ")


def test_pages_given_back_on_local_evidence_are_found() -> None:
    """One rank settles a load back when its own copy has ended, as in sglang#33442."""

    def settle_alone(epoch: Epoch) -> None:
        cache = epoch.caches[1]
        report = cache.executor.progress

        def progress() -> list[Progress]:
            reports = report()
            for each in reports:
                operation = cache.replica.state.operations.in_flight.get(each.operation)
                if isinstance(each, Ended) and isinstance(operation, Copy) and each.ok:
                    cache.replica.state.pools[operation.fills][0].give_back(
                        operation.owned_pages(operation.fills, 0)[:0]
                        or operation.segments[0].pages[:1]
                    )
            return reports

        cache.executor.progress = progress  # type: ignore[method-assign]

    assert_found(violations(tamper=settle_alone), "belongs to", "digests differ")


def test_a_command_that_one_rank_does_not_get_is_found() -> None:
    def lose_a_release(epoch: Epoch) -> None:
        cache = epoch.caches[1]
        assert isinstance(cache, Cache)
        cache.release = lambda request: None  # type: ignore[method-assign]

    assert_found(violations(tamper=lose_a_release), "digests differ")


def test_a_rank_that_skips_the_round_when_it_is_idle_is_found() -> None:
    """A collective behind an early return, as in sglang#30760."""

    def skip_when_idle(epoch: Epoch) -> None:
        cache = epoch.caches[1]
        vote = cache.open_round

        def open_round() -> None:
            if not cache.replica.idle:
                vote()

        cache.open_round = open_round  # type: ignore[method-assign]

    found = violations(tamper=skip_when_idle)
    assert_found(found, "reached 0 collectives", "ends the epoch for no reason")


def test_a_second_collective_in_a_step_is_found() -> None:
    def vote_twice(epoch: Epoch) -> None:
        for cache, collective in zip(epoch.caches, epoch.cluster.collectives, strict=True):
            vote = cache.open_round

            def open_round(
                vote: Callable[[], None] = vote, reached: list[tuple[str, int]] = collective.reached
            ) -> None:
                vote()
                reached.append(("int64", 1))

            cache.open_round = open_round  # type: ignore[method-assign]

    assert_found(violations(tamper=vote_twice), "reached 2 collectives")


@pytest.mark.parametrize("l1", [REPLICA, ENGINE])
def test_a_digest_that_counts_tokens_and_does_not_read_them_is_found(
    l1: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule R2: engines that have sampled apart are told so in the round after."""
    monkeypatch.setattr(ReplicaState, "witness_tokens", _witness_the_count)

    assert_found(violations(l1=l1), "sampled_apart struck rank")


def _witness_the_count(self: ReplicaState, command: str, name: str, tokens: bytes) -> None:
    self.journal.record("tokens", command, name, len(tokens))


# Bugs of every rank alike: the replicas stay equal, and all of them are wrong.


@seeds_from(7)
def test_pages_that_have_not_landed_and_are_offered_are_found(
    monkeypatch: pytest.MonkeyPatch, seeds: range
) -> None:
    settle = Prefetching.settle

    def settle_all(self: Prefetching, operation: Prefetch) -> None:
        operation.landed = operation.wanted_count
        settle(self, operation)

    monkeypatch.setattr(Prefetching, "settle", settle_all)
    assert_found(
        violations(faults="storage", seeds=seeds), "the tree offers host kv page", "still writes"
    )


@seeds_from(10, among=3 * SEEDS_MAX)
def test_a_count_of_this_rank_taken_for_the_group_is_found(
    monkeypatch: pytest.MonkeyPatch, seeds: range
) -> None:
    """The ceiling of one rank is read as what has landed."""
    arrived = Prefetching.arrived

    def arrived_up_to_ceiling(self: Prefetching, verdict: Arrived) -> None:
        operation = self.active.get(verdict.operation)
        if operation is not None and verdict.ceiling is not None:
            operation.landed = verdict.ceiling
        arrived(self, verdict)

    monkeypatch.setattr(Prefetching, "arrived", arrived_up_to_ceiling)
    found = violations(faults="storage", seeds=seeds)
    assert_found(found, "the tree offers host kv page", "still writes", "holds")


@seeds_from(7)
def test_pages_freed_without_waiting_for_quiet_are_found(
    monkeypatch: pytest.MonkeyPatch, seeds: range
) -> None:
    def stop_at_once(self: ReplicaState, operation: Operation, outcome: Outcome) -> None:
        self.orders.append(Cancel(operation.id, self.config.timeouts.quiesce_s))
        for receipt in operation.receipts:
            self.residence.holds.release(receipt)
        operation.receipts.clear()
        self.pools[HOST][0].give_back(operation.owned_pages(HOST, 0))
        if isinstance(operation, Copy):
            operation.owned.clear()
        elif isinstance(operation, Prefetch):
            operation.wanted = ()
        stop(self, operation, outcome)

    stop = ReplicaState.stop
    monkeypatch.setattr(ReplicaState, "stop", stop_at_once)
    assert_found(violations(faults="storage", seeds=seeds), "still writes it", "still read it")


def test_an_unlocked_prefix_that_is_evicted_under_a_request_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def evictable(self: Residence, tier: int, component: int, node: Node) -> bool:
        del self
        return node.values[tier][component] is not None and not node.occupied_children[tier]

    monkeypatch.setattr(Residence, "evictable", evictable)
    assert_found(
        violations(faults="pressure"), "of a request", "page table", "locked", "AssertionError"
    )


def test_keys_that_forget_what_came_before_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of a page's own tokens serves one prefix's page to another."""

    def unchained(seed: bytes, tokens: bytes, page_tokens: int) -> list[bytes]:
        step = page_tokens * TOKEN_BYTES
        return [
            sha256(tokens[at : at + step]).digest() for at in range(0, len(tokens) - step + 1, step)
        ]

    for module in (keys_module, state_module, tree_module):
        monkeypatch.setattr(module, "page_keys", unchained)
    assert_found(violations(), "under the key of content")


def test_a_split_that_forgets_the_operations_of_a_node_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def split(self: ReplicaState, node: Node, pages: int) -> None:
        self.tree.split(node, pages)

    monkeypatch.setattr(ReplicaState, "split", split)
    assert_found(violations(), "pages of another length")


def test_a_leaked_page_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = Serving._publish  # pyright: ignore[reportPrivateUsage]

    def publish_and_lose(self: Serving, request: Request, node: Node) -> None:
        duplicate = node.values[DEVICE][0] is not None
        publish(self, request, node)
        if duplicate:
            self._state.pools[DEVICE][0].take(1)  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(Serving, "_publish", publish_and_lose)
    assert_found(violations(), "belong to nobody")


def test_a_cache_that_never_hits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Safe, and useless: nothing wrong is served, because nothing is."""
    take = Residence.take

    def take_all(self: Residence, tier: int, counts: Sequence[int]) -> list[PageRun] | None:
        self.evict_everything(tier)
        return take(self, tier, counts)

    monkeypatch.setattr(Residence, "take", take_all)
    assert_found(violations(), "never had to leave", "could be evicted")


def test_a_failed_backup_taken_for_a_good_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = ReplicaState.stop

    def believe(self: ReplicaState, operation: Operation, outcome: Outcome) -> None:
        if isinstance(operation, Copy) and operation.kind is Kind.BACKUP:
            BackingUp(self).backed_up(operation)
        else:
            stop(self, operation, outcome)

    monkeypatch.setattr(ReplicaState, "stop", believe)
    assert_found(violations(), "the tree offers host kv page", "copies host kv page", "stores")


@seeds_from(14)
def test_a_vote_that_never_ends_is_found(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    """Nobody applies the deadline of a prefetch."""
    arrived = Prefetching.arrived

    def arrived_complete_only(self: Prefetching, verdict: Arrived) -> None:
        operation = self.active.get(verdict.operation)
        if operation is not None and verdict.pages == operation.wanted_count:
            arrived(self, verdict)

    monkeypatch.setattr(Prefetching, "arrived", arrived_complete_only)
    assert_found(violations(faults="storage", seeds=seeds), "stands in TRANSFER")


# Bugs of an executor: the replica believes what it is told, so the memory must tell.


class _Impatient(SimulatedExecutor):
    """Says that it is quiet as soon as it is told to stop."""

    def carry_out(self, orders: Sequence[Order]) -> None:
        super().carry_out(orders)
        for order in orders:
            if isinstance(order, Cancel):
                self.conditions.say(Quiesced(order.operation))


class _Hasty(SimulatedExecutor):
    """Says that a page has landed when its read begins."""

    def carry_out(self, orders: Sequence[Order]) -> None:
        super().carry_out(orders)
        for order in orders:
            if isinstance(order, Fetch):
                self.conditions.say(Landed(order.operation, 1))


class _Mute(SimulatedExecutor):
    """Never says that a copy or write has ended."""

    def progress(self) -> list[Progress]:
        return [each for each in super().progress() if not isinstance(each, Ended)]


class _Careless(SimulatedExecutor):
    """Takes whatever lies under a name for the object: no checksum."""

    def _read_object(self, page: object) -> int | None:
        content = super()._read_object(page)  # type: ignore[arg-type]
        return 1_000_000 if content is None else content


@seeds_from(5, among=3 * SEEDS_MAX)
def test_an_executor_that_does_not_wait_for_its_transfers_is_found(seeds: range) -> None:
    found = violations(make=making(_Impatient), seeds=seeds)
    assert_found(found, "still writes it", "still read it")


@seeds_from(5)
def test_an_executor_that_reports_a_page_too_early_is_found(seeds: range) -> None:
    found = violations(make=making(_Hasty), seeds=seeds)
    assert_found(found, "the tree offers host kv page", "still writes it", "holds")


def test_an_executor_that_never_answers_is_found() -> None:
    assert_found(violations(make=making(_Mute)), "stands in ISSUED")


def test_a_read_without_a_checksum_is_found() -> None:
    found = violations(make=making(_Careless), faults="storage")
    assert_found(found, "the tree offers host kv page", "holds content 1000000")


@pytest.mark.parametrize(
    "seeds",
    [range(SEEDS_MAX // 3), pytest.param(range(SEEDS_MAX // 3, SEEDS_MAX), marks=pytest.mark.slow)],
)
def test_without_a_planted_bug_the_same_seeds_are_clean(seeds: range) -> None:
    assert not list(violations(seeds=seeds))
