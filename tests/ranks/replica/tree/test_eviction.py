"""Eviction order: each policy evicts as a sorted list would, at a constant cost per eviction."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lockstep.errors import ConfigError
from lockstep.ranks.protocol.config import NamespaceLimit
from lockstep.ranks.protocol.eviction_policies import (
    HITS_GRADED_MAX,
    EvictionPolicy,
    find_policy,
    register_eviction_policy,
)
from lockstep.ranks.replica.tree.eviction import STALE_SPARE, EvictionQueue
from tests.kit.ranks.in_turn import PAGE_TOKENS, RanksInTurn


@dataclass(eq=False)
class Leaf:
    """The fields of a tree node that an eviction queue reads, and whether the node is evictable."""

    id: int
    last_access: int = 0
    hits: int = 0
    priority: int = 0
    free: bool = True


def is_free(leaf: Leaf) -> bool:
    return leaf.free


def queue_of(name: str, *leaves: Leaf) -> EvictionQueue[Leaf]:
    queue = EvictionQueue(find_policy(name), is_free)
    for leaf in leaves:
        queue.try_enter(leaf)
    return queue


def drain(queue: EvictionQueue[Leaf]) -> list[int]:
    left: list[int] = []
    while (victim := queue.next_victim()) is not None:
        left.append(victim.id)
    return left


@dataclass
class SortedList:
    """A simple queue that sorts all its entries at each request."""

    policy: EvictionPolicy
    entries: list[tuple[int, Leaf]] = field(default_factory=list[tuple[int, Leaf]])
    made: int = 0

    def place(self, entry: tuple[int, Leaf]) -> tuple[int, int, int]:
        order, leaf = entry
        return self.policy.grade(leaf), leaf.last_access, order

    def enter(self, leaf: Leaf) -> None:
        self.made += 1
        self.entries.append((self.made, leaf))

    def try_enter(self, leaf: Leaf) -> None:
        if leaf.free and leaf not in self.leaves():
            self.enter(leaf)

    def used(self, leaf: Leaf) -> None:
        if leaf in self.leaves():
            self.discard(leaf)
            self.enter(leaf)

    def discard(self, leaf: Leaf) -> None:
        self.entries = [entry for entry in self.entries if entry[1] is not leaf]

    def next_victim(self) -> Leaf | None:
        while self.entries:
            first = min(self.entries, key=self.place)
            self.entries.remove(first)
            if first[1].free:
                return first[1]
        return None

    def leaves(self) -> list[Leaf]:
        return [leaf for _, leaf in self.entries]


numbers = st.integers(0, 7)


class QueueBesideList(RuleBasedStateMachine):
    """A state machine that makes the same random calls to an eviction queue and to a sorted list."""

    @initialize(name=st.sampled_from(["lru", "lfu", "slru", "priority"]))
    def begin(self, name: str) -> None:
        self.clock = 0
        self.leaves = [Leaf(id=number) for number in range(8)]
        self.queue: EvictionQueue[Leaf] = queue_of(name)
        self.model = SortedList(find_policy(name))

    @rule()
    def time_passes(self) -> None:
        self.clock += 1

    @rule(number=numbers)
    def try_enter(self, number: int) -> None:
        self.queue.try_enter(self.leaves[number])
        self.model.try_enter(self.leaves[number])

    @rule(number=numbers, hit=st.booleans())
    def use(self, number: int, hit: bool) -> None:
        leaf = self.leaves[number]
        leaf.last_access = self.clock
        leaf.hits += hit
        self.queue.used(leaf)
        self.model.used(leaf)

    @rule(number=numbers, priority=st.integers(-2, 2))
    def change_priority(self, number: int, priority: int) -> None:
        leaf = self.leaves[number]
        leaf.priority = priority
        self.queue.used(leaf)
        self.model.used(leaf)

    @rule(number=numbers)
    def lock_or_unlock(self, number: int) -> None:
        self.leaves[number].free = not self.leaves[number].free

    @rule(number=numbers)
    def remove(self, number: int) -> None:
        self.queue.discard(self.leaves[number])
        self.model.discard(self.leaves[number])
        self.leaves[number] = Leaf(id=number, last_access=self.clock)

    @precondition(lambda self: self.model.entries)
    @rule()
    def evict(self) -> None:
        assert self.queue.next_victim() is self.model.next_victim()

    @invariant()
    def both_hold_the_same(self) -> None:
        if hasattr(self, "queue"):
            assert sorted(leaf.id for leaf in self.queue.entries()) == sorted(
                leaf.id for leaf in self.model.leaves()
            )

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            while (expected := self.model.next_victim()) is not None:
                assert self.queue.next_victim() is expected
            assert self.queue.next_victim() is None


def test_nodes_leave_in_the_order_of_a_list_that_is_sorted_each_time() -> None:
    run_state_machine_as_test(
        QueueBesideList, settings=settings(max_examples=120, stateful_step_count=50, deadline=None)
    )


def test_lfu_lets_what_was_once_hot_leave_at_last() -> None:
    once_hot = Leaf(id=1, last_access=1, hits=10**6)
    hot = Leaf(id=2, last_access=2, hits=HITS_GRADED_MAX)

    assert drain(queue_of("lfu", once_hot, hot)) == [1, 2]


def test_an_inner_node_whose_child_left_for_a_quota_leaves_by_its_own_last_use() -> None:
    limits = (NamespaceLimit(namespace="limited", device_pages=4),)
    ranks = RanksInTurn(2, store=False, device_pages=12, host_pages=0, limits=limits)
    inner, child, other, more = ([first] * 2 * PAGE_TOKENS for first in range(4))
    serve(ranks, "r1", inner, "limited")
    serve(ranks, "r2", inner + child, "limited")
    serve(ranks, "r3", other)
    serve(ranks, "r4", inner + child, "limited")
    serve(ranks, "r5", more, "limited")
    ranks.step()
    assert on_device(ranks, inner + child, "limited") == 2 * PAGE_TOKENS

    ranks.every(lambda cache: cache.load_back("r6", [], reserve_tokens=8 * PAGE_TOKENS))

    assert on_device(ranks, inner, "limited") == 2 * PAGE_TOKENS
    assert on_device(ranks, other) == 0


def serve(ranks: RanksInTurn, name: str, tokens: list[int], namespace: str = "") -> None:
    ranks.every(lambda cache: cache.load_back(name, tokens, namespace, reserve_tokens=len(tokens)))
    ranks.every(lambda cache: cache.insert(name, tokens))
    ranks.every(lambda cache: cache.release(name))


def on_device(ranks: RanksInTurn, tokens: list[int], namespace: str = "") -> int:
    return ranks.every(lambda cache: cache.match(tokens, namespace)).device_tokens


def test_an_eviction_looks_at_no_more_nodes_than_it_takes_whatever_there_is() -> None:
    checked: list[int] = []

    def ask(leaf: Leaf) -> bool:
        checked.append(leaf.id)
        return True

    queue = EvictionQueue(find_policy("lru"), ask)
    for number in range(20_000):
        queue.try_enter(Leaf(id=number, last_access=number))
    checked.clear()

    victims = [queue.next_victim() for _ in range(64)]

    assert [victim.id for victim in victims if victim] == checked == list(range(64))


def test_what_enters_late_and_is_used_again_for_ever_takes_no_more_memory() -> None:
    """Rule R10: memory is bounded, even if the pool never fills and nothing is evicted."""
    newest = Leaf(id=0, last_access=10**9)
    late = Leaf(id=1)
    queue = queue_of("lru", newest)
    for number in range(10_000):
        late.last_access = number
        queue.try_enter(late)
        queue.discard(late)

    assert len(queue._late) <= STALE_SPARE + 1  # pyright: ignore[reportPrivateUsage]
    assert drain(queue) == [0]


def test_no_policy_can_take_the_name_of_another() -> None:
    with pytest.raises(ConfigError, match="eviction policy 'lru' is already registered"):
        register_eviction_policy(find_policy("lru"))
