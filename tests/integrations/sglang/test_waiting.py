"""Prefetches and loads of waiting requests, equal on every rank."""

from typing import Any

import pytest

from lockstep.coordinator.ballot import Quiesced, TransferEnded
from lockstep.integrations.sglang.identity.kv_identity import Update
from lockstep.integrations.sglang.waiting import LANDED_FIRST_STEPS
from lockstep.integrations.sglang.weights import WeightsUpdate
from lockstep.ranks.protocol.orders import CopyToDevice, CopyToHost, LookUp
from tests.kit.ranks.in_turn import PAGE_TOKENS
from tests.kit.sglang.host_tier_ranks import RanksBelow

PAGES = 4
PROMPT = list(range(PAGES * PAGE_TOKENS))
LONGER = [*PROMPT, *range(900, 900 + PAGE_TOKENS)]


def published(**settings: Any) -> RanksBelow:
    below = RanksBelow(**settings)
    below.publish("first", PROMPT)
    return below


def loading(below: RanksBelow, handle: str = "r") -> int:
    """Let a request arrive and start to load the whole prompt; return the operation."""
    below.every(lambda rank: rank.arrive(handle, PROMPT))
    below.ranks.settle()
    assert below.every(lambda rank: rank.hit(handle)) == len(PROMPT)
    below.every(lambda rank: rank.load(handle))
    return below.ranks.take_operation(CopyToDevice)


@pytest.mark.parametrize(
    ("threshold", "device_tokens", "is_queried"),
    [
        (0, 0, True),
        (0, len(PROMPT) - 1, True),
        (0, len(PROMPT), False),
        (8, len(PROMPT) - 8, True),
        (8, len(PROMPT) - 7, False),
        (1000, 0, False),
    ],
)
def test_storage_is_asked_for_more_tokens_than_the_threshold(
    threshold: int, device_tokens: int, *, is_queried: bool
) -> None:
    below = RanksBelow(threshold_tokens=threshold)

    below.every(lambda rank: rank.arrive("r", PROMPT, device_tokens))

    assert [bool(each.given(LookUp)) for each in below.ranks.executors] == [is_queried] * 2
    assert below.every(lambda rank: rank.waiting.is_busy(rank.known("r"))) is is_queried


def test_a_hit_is_what_host_memory_has_beyond_the_device() -> None:
    below = published()
    below.every(lambda rank: rank.arrive("r", LONGER))
    below.ranks.settle()

    assert below.every(lambda rank: rank.hit("r", 0)) == len(PROMPT)
    assert below.every(lambda rank: rank.hit("r", 2 * PAGE_TOKENS)) == 2 * PAGE_TOKENS
    assert below.every(lambda rank: rank.known("r").prefix) == len(PROMPT)
    assert below.every(lambda rank: rank.hit("r", len(LONGER))) == 0
    assert below.every(lambda rank: rank.known("r").prefix) == len(LONGER)
    assert below.every(lambda rank: len(rank.known("r"))) == len(LONGER)


def test_what_sglang_s_tree_has_and_what_was_loaded_are_hits_of_their_tiers() -> None:
    """Tokens cached by SGLang are device hits and loaded tokens are host hits; a backup is no hit."""
    below = published(store=False)
    below.every(lambda rank: rank.arrive("r", LONGER))
    assert below.every(lambda rank: rank.hit("r", PAGE_TOKENS)) == 3 * PAGE_TOKENS
    below.every(lambda rank: rank.load("r", PAGE_TOKENS))
    below.ranks.settle()
    below.every(lambda rank: rank.ended())
    for rank in below.below:
        rank.known("r").on_device = len(PROMPT)

    below.every(lambda rank: rank.waiting.admitted("r") is not None)

    stats = below.ranks.every(lambda cache: cache.stats().replica)
    assert (stats.admissions, stats.asked_tokens) == (1, len(LONGER))
    assert stats.hit_tokens == {"device": PAGE_TOKENS, "host": 3 * PAGE_TOKENS, "storage": 0}
    assert stats.missed_tokens["never_seen"] == PAGE_TOKENS


def test_a_load_is_good_once_every_rank_has_it() -> None:
    below = published(store=False)
    operation = loading(below)
    below.ranks.executors[0].reports.append(TransferEnded(operation, ok=True))
    below.ranks.step()

    assert below.every(lambda rank: rank.ended()) == []
    assert below.every(lambda rank: rank.waiting.loads) == 1
    assert below.every(lambda rank: rank.waiting.is_busy(rank.known("r")))
    below.ranks.executors[1].reports.append(TransferEnded(operation, ok=True))
    below.ranks.step()

    assert below.every(lambda rank: rank.ended()) == [("r2", True)]
    assert below.every(lambda rank: rank.ended()) == []
    assert below.every(lambda rank: rank.waiting.loads) == 0
    assert below.every(lambda rank: rank.known("r").landed) == (0, len(PROMPT))
    assert below.every(lambda rank: rank.waiting.loaded_tokens) == len(PROMPT)


def test_nobody_else_is_admitted_while_something_is_loaded_or_has_just_landed() -> None:
    below = published(store=False)
    below.every(lambda rank: rank.arrive("before", LONGER))
    below.every(lambda rank: rank.arrive("after", LONGER))
    assert below.every(lambda rank: rank.waits("before")) is False
    operation = loading(below)

    while_loaded = [below.every(lambda rank: rank.waits(each)) for each in ("before", "after")]
    for executor in below.ranks.executors:
        executor.reports.append(TransferEnded(operation, ok=True))
    below.ranks.step()
    below.every(lambda rank: rank.ended())
    landed = below.every(lambda rank: rank.waits("r"))
    waits = [below.every(lambda rank: rank.waits("before"))]
    for _ in range(LANDED_FIRST_STEPS):
        below.every(lambda rank: rank.ended())
        waits.append(below.every(lambda rank: rank.waits("before")))

    loading(below, "later")
    landed_long_ago = below.every(lambda rank: rank.waits("r"))

    assert landed_long_ago
    assert while_loaded == [True, True]
    assert not landed
    assert waits == [True] * LANDED_FIRST_STEPS + [False]


def test_others_are_visited_again_once_what_has_landed_is_admitted() -> None:
    below = published(store=False)
    below.every(lambda rank: rank.arrive("other", LONGER))
    operation = loading(below)
    for executor in below.ranks.executors:
        executor.reports.append(TransferEnded(operation, ok=True))
    below.ranks.step()
    below.every(lambda rank: rank.ended())

    below.every(lambda rank: rank.forget("r"))

    assert below.every(lambda rank: rank.waits("other")) is False


def test_requests_come_after_each_other_as_sglang_visits_them() -> None:
    below = published(store=False)
    below.every(lambda rank: rank.arrive("a", PROMPT))
    below.every(lambda rank: rank.arrive("b", PROMPT))
    below.every(lambda rank: rank.arrive("c", PROMPT))
    below.every(lambda rank: rank.arrive("d", PROMPT))

    queue = ["c", "unknown", "a", "d"]

    assert below.every(lambda rank: rank.after("c", queue)) == ["r2", "r5", "r3"]
    assert below.every(lambda rank: rank.after("b", queue)) == []


def test_a_load_that_failed_on_one_rank_has_failed_and_is_not_tried_again() -> None:
    below = published(store=False)
    operation = loading(below)
    below.ranks.executors[0].reports.append(TransferEnded(operation, ok=True))
    below.ranks.executors[1].reports.append(TransferEnded(operation, ok=False))
    below.ranks.step()
    assert below.every(lambda rank: rank.ended()) == []
    below.ranks.report(Quiesced(operation))
    below.ranks.step()

    assert below.every(lambda rank: rank.ended()) == [("r2", False)]
    assert below.every(lambda rank: rank.hit("r")) == 0
    assert below.every(lambda rank: rank.known("r").landed) == (0, 0)
    assert below.every(lambda rank: rank.waiting.loaded) == 0


@pytest.mark.parametrize(("first", "piece"), [((1, 1), (1, 4)), ((0, 1), (2, 4))])
def test_what_loads_brought_is_one_piece_where_each_continues_the_one_before(
    first: tuple[int, int], piece: tuple[int, int]
) -> None:
    """Two loads are counted as one span only if the second starts where the first ended."""
    below = published(store=False)
    below.every(lambda rank: rank.arrive("r", PROMPT))
    begin, pages = (PAGE_TOKENS * each for each in first)
    below.every(lambda rank: rank.hit("r", begin))
    below.every(lambda rank: rank.load("r", begin, pages))
    below.ranks.settle()
    assert below.every(lambda rank: rank.ended()) == [("r2", True)]

    below.every(lambda rank: rank.hit("r", 2 * PAGE_TOKENS))
    below.every(lambda rank: rank.load("r", 2 * PAGE_TOKENS))
    below.ranks.settle()
    below.every(lambda rank: rank.ended())

    landed = tuple(PAGE_TOKENS * each for each in piece)
    assert below.every(lambda rank: rank.known("r").landed) == landed


def test_what_is_loaded_for_an_aborted_request_is_awaited_and_may_be_used() -> None:
    below = published(store=False)
    operation = loading(below)

    name = below.every(lambda rank: rank.known("r").name)
    below.every(lambda rank: rank.forget("r"))
    assert below.every(lambda rank: rank.waiting.get("r")) is None
    assert below.every(lambda rank: rank.waiting.loads) == 1
    assert below.every(lambda rank: rank.ended()) == []
    below.ranks.report(TransferEnded(operation, ok=True))
    below.ranks.step()

    assert below.every(lambda rank: rank.ended()) == [(name, True)]
    assert below.every(lambda rank: rank.waiting.loads) == 0
    assert not below.every(lambda rank: name in rank.host.inspection.requests)


def test_an_aborted_request_that_loads_nothing_is_forgotten_at_once() -> None:
    below = published()
    below.every(lambda rank: rank.arrive("r", LONGER))
    name = below.every(lambda rank: rank.known("r").name)

    assert below.every(lambda rank: rank.forget("r"))

    assert not below.every(lambda rank: name in rank.host.inspection.requests)
    assert not below.every(lambda rank: rank.forget("r"))


def test_what_was_loaded_while_the_weights_changed_is_not_used() -> None:
    below = published(store=False)
    operation = loading(below)

    below.every(lambda rank: rank.waiting.forget_all())
    below.every(
        lambda rank: rank.weights.changed(WeightsUpdate.ALL, Update("2"), holds_nothing=False)
    )
    below.ranks.report(TransferEnded(operation, ok=True))
    below.ranks.step()

    assert below.every(lambda rank: rank.ended()) == [("r2", False)]
    assert below.every(lambda rank: rank.waiting.loaded) == 0
    assert below.every(lambda rank: rank.waiting.get("r")) is None


def test_a_request_that_comes_again_has_another_name() -> None:
    below = published()
    for _ in range(2):
        below.every(lambda rank: rank.arrive("r", LONGER))
        below.every(lambda rank: rank.forget("r"))

    below.every(lambda rank: rank.arrive("r", LONGER))

    assert below.every(lambda rank: rank.known("r").name) == "r4"


def test_a_retracted_request_waits_for_its_backup_and_then_finds_it() -> None:
    below = RanksBelow()
    below.every(lambda rank: rank.arrive("r", PROMPT, held_by="b1"))
    assert below.every(lambda rank: rank.waiting.is_busy(rank.known("r")))
    assert [each.given(LookUp) for each in below.ranks.executors] == [[], []]
    below.every(lambda rank: rank.host.back_up("b1", PROMPT, range(PAGES)))
    below.every(lambda rank: rank.host.begin_backups())
    for executor in below.ranks.executors:
        executor.complete_only(CopyToHost)
    below.ranks.step()

    below.every(lambda rank: rank.waiting.go_on(rank.known("r"), 0))

    assert not below.every(lambda rank: rank.waiting.is_busy(rank.known("r")))
    assert below.every(lambda rank: rank.hit("r")) == len(PROMPT)
