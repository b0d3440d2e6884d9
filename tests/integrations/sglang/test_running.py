"""When each part of a running request's tokens is copied to the host."""

import pytest
import torch

from lockstep.ranks.protocol.config import WritePolicy
from tests.kit.ranks.in_turn import PAGE_TOKENS
from tests.kit.sglang.host_tier_ranks import RankBelow, RanksBelow
from tests.kit.sglang.sent import Row, Sent

PROMPT = list(range(4 * PAGE_TOKENS))
OUTPUT = list(range(500, 500 + PAGE_TOKENS + 2))


def on_the_host(below: RanksBelow) -> int:
    below.ranks.settle()
    return below.every(lambda rank: rank.host.match([*PROMPT, *OUTPUT]).host_tokens)


def retract(rank: RankBelow, committed: int | None = None) -> None:
    tokens = len(PROMPT) + len(OUTPUT) if committed is None else committed
    request = Sent("r", PROMPT, OUTPUT, kv=Row(kv_committed_len=tokens))
    rank.running.retracted(request, rank.rows(64).to(torch.int32))
    rank.running.left("r")


@pytest.mark.parametrize(
    ("policy", "shared", "kept"),
    [
        (WritePolicy.WRITE_THROUGH, 0, len(PROMPT)),
        (WritePolicy.WRITE_THROUGH_SELECTIVE, 0, 0),
        (WritePolicy.WRITE_THROUGH_SELECTIVE, 2 * PAGE_TOKENS, 2 * PAGE_TOKENS),
    ],
)
def test_all_that_the_tree_has_is_backed_up_or_only_what_was_cached_for_a_request(
    policy: WritePolicy, shared: int, kept: int
) -> None:
    below = RanksBelow(store=False, policy=policy)

    below.every(lambda rank: rank.compute("r", PROMPT, shared=shared))

    assert on_the_host(below) == kept


def test_a_chunk_is_backed_up_once_and_its_lock_is_of_that_moment() -> None:
    below = RanksBelow(store=False)
    for count in (PAGE_TOKENS, PAGE_TOKENS, len(PROMPT)):
        below.every(lambda rank: rank.compute("r", PROMPT, backed_up=count))
    below.ranks.settle()
    below.every(lambda rank: rank.backups.collect())

    assert below.every(lambda rank: rank.unlocked) == ["lock of r at 4", "lock of r at 16"]
    assert on_the_host(below) == len(PROMPT)


def test_a_retracted_request_s_whole_pages_are_saved_before_its_slots_are_given_away() -> None:
    below = RanksBelow(store=False)
    below.every(lambda rank: rank.compute("r", PROMPT, backed_up=2 * PAGE_TOKENS))
    below.ranks.settle()
    for executor in below.ranks.executors:
        executor.begun.clear()

    below.every(retract)

    below.check_copied_before_it_went_on()
    assert on_the_host(below) == 5 * PAGE_TOKENS


def test_a_retracted_request_waits_once_for_what_was_saved_of_it() -> None:
    below = RanksBelow(store=False)
    below.every(lambda rank: rank.compute("r", PROMPT, backed_up=PAGE_TOKENS))

    below.every(retract)

    assert not below.every(lambda rank: "r" in rank.running)
    name = below.every(lambda rank: rank.running.saved_by("r"))
    assert name == "b2"
    assert below.every(lambda rank: "b2" in rank.backups)
    assert below.every(lambda rank: rank.running.saved_by("r")) is None


@pytest.mark.parametrize("committed", [0, 3, 4 * PAGE_TOKENS, 5 * PAGE_TOKENS - 1])
def test_nothing_is_saved_again_of_a_request_that_is_backed_up(committed: int) -> None:
    below = RanksBelow(store=False)
    below.every(lambda rank: rank.compute("r", PROMPT))
    below.ranks.settle()

    below.every(lambda rank: retract(rank, committed))

    assert [each.orders for each in below.ranks.executors] == [[], []]
    assert below.every(lambda rank: rank.backups.retracted) == 0
    assert below.every(lambda rank: rank.running.saved_by("r")) is None


def test_nobody_asks_for_what_was_saved_of_a_request_that_was_aborted() -> None:
    below = RanksBelow(store=False)
    below.every(lambda rank: rank.compute("r", PROMPT, backed_up=PAGE_TOKENS))
    below.every(retract)

    below.every(lambda rank: rank.running.ended("r"))

    assert below.every(lambda rank: rank.running.saved_by("r")) is None


def test_requests_that_run_while_the_weights_change_are_not_backed_up_any_more() -> None:
    below = RanksBelow(store=False)
    below.every(lambda rank: rank.compute("r", PROMPT, backed_up=PAGE_TOKENS))
    below.every(lambda rank: rank.compute("s", PROMPT, backed_up=PAGE_TOKENS))
    below.every(retract)

    below.every(lambda rank: rank.running.forget_all())

    assert not below.every(lambda rank: "r" in rank.running or "s" in rank.running)
    assert below.every(lambda rank: rank.running.saved_by("r")) is None
