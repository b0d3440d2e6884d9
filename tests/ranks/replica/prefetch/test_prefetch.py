"""The two-rank prefetch example of the design document, step by step."""

from typing import Any

import pytest

from lockstep.coordinator.ballot import (
    Answered,
    Expired,
    Landed,
    Progress,
    Quiesced,
    QuiesceExpired,
)
from lockstep.coordinator.prefetch_slots import UNBOUNDED
from lockstep.coordinator.stop_policy import StopPolicy, StopRule
from lockstep.ranks.protocol.config import Bounds
from lockstep.ranks.protocol.orders import Fetch, LookUp
from lockstep.ranks.replica.operations.kinds import Prefetch
from lockstep.ranks.replica.operations.operation_table import OperationTable
from lockstep.ranks.replica.tree.node import HOST
from tests.kit.ranks.in_turn import PAGE_TOKENS, RanksInTurn, prompt


def let_the_second_vote_for_less(ranks: RanksInTurn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rank 1 vote for a prefetch goal one page shorter than that of rank 0."""
    vote = OperationTable.vote
    others = ranks.caches[1]._replica.operation_table  # pyright: ignore[reportPrivateUsage]

    def vote_for_less(self: OperationTable, operation: Prefetch, *vote_on: Any) -> None:
        if self is others and operation.goal:
            *others_vote_on, goal = vote_on
            vote(self, operation, *others_vote_on, goal - 1)
        else:
            vote(self, operation, *vote_on)

    monkeypatch.setattr(OperationTable, "vote", vote_for_less)


def test_ranks_that_would_restore_to_different_positions_differ_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Invariant 10: if ranks chose different lengths to restore, their digests differ at once."""
    ranks = RanksInTurn(2)
    let_the_second_vote_for_less(ranks, monkeypatch)
    assert ranks.every(lambda cache: cache.prefetch("7", prompt(4)))
    for executor in ranks.executors:
        executor.reports.append(Answered(executor.take(LookUp)[0].operation, 4))
    monkeypatch.setattr(ranks, "check", lambda: None)
    ranks.step()

    one, other = (cache.inspection for cache in ranks.caches)
    assert one.digest != other.digest
    assert one.journal.last(1)[1] == [f"vote 1 TRANSFER {UNBOUNDED} 4"]
    assert other.journal.last(1)[1] == [f"vote 1 TRANSFER {UNBOUNDED} 3"]


class Started:
    """A prefetch of eight pages, whose transfer has begun on both ranks."""

    def __init__(self, ranks: RanksInTurn, request: str = "r") -> None:
        self.ranks = ranks
        self.tokens = prompt(8)
        assert ranks.every(lambda cache: cache.prefetch(request, self.tokens))
        self.operation = ranks.executors[0].take(LookUp)[0].operation
        ranks.executors[1].take(LookUp)
        self.say(Answered(self.operation, 8))

    def say(self, *progress: Progress) -> None:
        for executor in self.ranks.executors:
            executor.reports.extend(progress)
        self.ranks.step()

    @property
    def host_tokens(self) -> int:
        tokens: int = self.ranks.every(lambda cache: cache.match(self.tokens).host_tokens)
        return tokens

    @property
    def free(self) -> int:
        return self.ranks.every(
            lambda cache: cache.inspection.prefixes.allocator.pools[HOST][0].free
        )


@pytest.mark.parametrize("rule", [StopRule.TIMEOUT, StopRule.WAIT_COMPLETE])
def test_under_the_other_rules_the_engine_waits(rule: StopRule) -> None:
    ranks = RanksInTurn(2, stop_policy=StopPolicy(rule=rule))
    Started(ranks)

    assert not ranks.every(lambda cache: cache.prefetch_done("r"))


def test_a_prefetch_takes_no_more_host_pages_than_there_is_room_for() -> None:
    ranks = RanksInTurn(2, host_pages=4, bounds=Bounds(prefetch_pages=8))
    Started(ranks)
    assert len(ranks.executors[0].take(Fetch)[0].transfers[0].pages) == 4


def test_pages_computed_meanwhile_are_kept_and_the_prefetched_copies_given_back() -> None:
    ranks = RanksInTurn(2)
    prefetch = Started(ranks)
    ranks.compute("other", prefetch.tokens[: 4 * PAGE_TOKENS])
    prefetch.say(Landed(prefetch.operation, 8))

    assert ranks.phase(prefetch.operation) == "DONE"
    assert prefetch.host_tokens == 8 * PAGE_TOKENS
    assert prefetch.free == 64 - 8


def test_one_store_that_is_never_quiet_does_not_keep_the_pages_of_others() -> None:
    """Rule R10: a quarantined operation can end before one that was quarantined earlier."""
    ranks = RanksInTurn(2, bounds=Bounds(quarantine_pages=64))
    hung, slow = Started(ranks, "hung"), Started(ranks, "slow")
    for each in (hung, slow):
        each.say(Expired(each.operation))
        each.say(QuiesceExpired(each.operation))
    assert ranks.phase(hung.operation) == ranks.phase(slow.operation) == "QUARANTINED"

    slow.say(Quiesced(slow.operation))
    slow.say()

    assert ranks.phase(hung.operation) == "QUARANTINED"
    assert ranks.phase(slow.operation) == "DONE"
    assert slow.free == 56


def test_a_store_that_was_detached_is_not_read_any_more() -> None:
    ranks = RanksInTurn(2, bounds=Bounds(quarantine_pages=4))
    bad = Started(ranks)
    ranks.every(lambda cache: cache.prefetch("other", prompt(4, start=500)))
    lookups = [executor.take(LookUp)[0] for executor in ranks.executors]
    bad.say(Expired(bad.operation), QuiesceExpired(bad.operation))
    bad.say()
    assert ranks.phase(bad.operation) == "QUARANTINED"

    bad.say(Answered(lookups[0].operation, 4))

    assert ranks.phase(lookups[0].operation) == "DONE"
    assert len(ranks.executors[0].take(Fetch)) == 1
