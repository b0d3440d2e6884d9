"""Rule R16 under SGLang: KV of other weights is neither found nor written."""

import pytest

from lockstep.coordinator.divergence import first_difference
from lockstep.integrations.sglang.identity.kv_identity import Update
from lockstep.integrations.sglang.weights import WeightsUpdate
from lockstep.ranks.protocol.orders import LookUp, Put
from tests.kit.ranks.in_turn import PAGE_TOKENS
from tests.kit.sglang.host_tier_ranks import INITIAL, RanksBelow

PROMPT = list(range(4 * PAGE_TOKENS))


def change(
    below: RanksBelow,
    version: str | None = None,
    taken: WeightsUpdate = WeightsUpdate.ALL,
) -> None:
    """Forget requests and report a weight update with result `taken` on all ranks."""
    below.every(lambda rank: rank.waiting.forget_all())
    below.every(lambda rank: rank.running.forget_all())
    below.every(lambda rank: rank.weights.changed(taken, Update(version), holds_nothing=True))
    below.ranks.step()


def in_session(
    below: RanksBelow, *versions: str | None, taken: WeightsUpdate = WeightsUpdate.ALL
) -> None:
    """In one update session, call `change` once for each given version."""
    below.every(lambda rank: rank.weights.begin_session())
    for version in versions:
        change(below, version, taken=taken)
    below.every(lambda rank: rank.weights.end_session(holds_nothing=True))
    below.ranks.step()


def found(below: RanksBelow) -> int:
    below.every(lambda rank: rank.arrive("asks", PROMPT))
    below.ranks.settle()
    hit = below.every(lambda rank: rank.hit("asks"))
    below.every(lambda rank: rank.forget("asks"))
    return hit


def written(below: RanksBelow) -> set[bytes]:
    """Let a request compute the prompt; return the page keys that it persists."""
    below.every(lambda rank: rank.compute("writes", PROMPT))
    below.ranks.complete()
    orders = [order for each in below.ranks.executors for order in each.given(Put)]
    below.ranks.settle()
    below.every(lambda rank: rank.running.ended("writes"))
    return {key for order in orders for each in order.transfers for key in each.keys}


def queried_keys(below: RanksBelow) -> set[bytes]:
    below.every(lambda rank: rank.arrive("asks", PROMPT))
    orders = [order for each in below.ranks.executors for order in each.take(LookUp)]
    below.every(lambda rank: rank.forget("asks"))
    return {key for order in orders for key in order.needs[0].keys}


def test_nothing_of_other_weights_is_found_and_what_is_of_a_version_that_comes_back_is() -> None:
    below = RanksBelow()
    below.publish("first", PROMPT)
    change(below, "2")
    below.publish("second", PROMPT)
    assert found(below) == len(PROMPT)
    change(below, "3")
    assert found(below) == 0

    change(below, "2")
    assert found(below) == len(PROMPT)
    change(below, INITIAL)
    assert found(below) == len(PROMPT)


def test_two_versions_are_written_under_different_keys_and_each_always_under_its_own() -> None:
    below, other = RanksBelow(), RanksBelow()
    keys: list[set[bytes]] = [written(below)]
    for version in ("2", "3"):
        change(below, version)
        keys.append(written(below))

    change(other, "3")

    assert [len(each) for each in keys] == [4, 4, 4]
    assert len(set[bytes]().union(*keys)) == 12
    assert keys[2] <= queried_keys(other)


def test_weights_without_a_name_hide_everything_and_write_nothing_to_storage() -> None:
    below = RanksBelow()
    below.publish("first", PROMPT)

    change(below)

    assert found(below) == 0
    assert queried_keys(below) == set()
    assert written(below) == set()
    assert found(below) == len(PROMPT)


def test_of_two_updates_without_a_name_the_second_hides_what_the_first_has() -> None:
    below = RanksBelow()
    change(below)
    below.publish("first", PROMPT)
    assert found(below) == len(PROMPT)

    change(below)

    assert found(below) == 0


def test_a_version_after_one_without_a_name_finds_nothing_of_it_and_is_written_again() -> None:
    below, other = RanksBelow(), RanksBelow()
    for each in (below, other):
        change(each)
    below.publish("first", PROMPT)

    change(below, "2")
    assert found(below) == 0
    keys = written(below)
    change(other, "2")

    assert len(keys) == 4
    assert keys <= queried_keys(other)


def test_weights_that_come_back_after_one_without_a_name_have_keys_that_mean_them_alone() -> None:
    one, other = RanksBelow(), RanksBelow()
    for below, versions in ((one, (None, "2", INITIAL)), (other, (None, INITIAL, "2"))):
        for version in versions:
            change(below, version)

    assert written(one).isdisjoint(written(other))


@pytest.mark.parametrize(("holds_nothing", "cached"), [(True, True), (False, False)])
def test_where_the_device_has_kv_of_before_nothing_is_cached_until_its_tree_is_new(
    holds_nothing: bool, cached: bool
) -> None:
    weights = RanksBelow(1).below[0].weights
    assert weights.may_cache

    weights.changed(WeightsUpdate.ALL, Update("2"), holds_nothing=holds_nothing)
    assert weights.may_cache is cached
    weights.tree_is_new()

    assert weights.may_cache


def test_within_a_session_nothing_is_cached_even_in_a_new_tree() -> None:
    weights = RanksBelow(1).below[0].weights

    weights.begin_session()
    weights.changed(WeightsUpdate.ALL, Update("2"), holds_nothing=True)
    weights.tree_is_new()
    assert not weights.may_cache
    weights.end_session(holds_nothing=True)

    assert weights.may_cache


def test_weights_that_came_in_parts_have_the_one_name_of_all_parts() -> None:
    below, whole = RanksBelow(), RanksBelow()
    in_session(below, "2", None, "2")
    change(whole, "2")

    keys = written(below)

    assert len(keys) == 4
    assert keys <= queried_keys(whole)


@pytest.mark.parametrize(
    ("versions", "taken"),
    [
        (("2", "3"), WeightsUpdate.ALL),
        ((None,), WeightsUpdate.ALL),
        ((), WeightsUpdate.ALL),
        ((INITIAL,), WeightsUpdate.ALL),
        (("2", "2"), WeightsUpdate.PERHAPS),
    ],
    ids=["two names", "no name", "by another process", "the name of before", "not all parts"],
)
def test_weights_that_came_in_parts_under_no_name_of_their_own_have_none(
    versions: tuple[str | None, ...], taken: WeightsUpdate
) -> None:
    below = RanksBelow()
    below.publish("first", PROMPT)

    in_session(below, *versions, taken=taken)

    assert found(below) == 0
    assert written(below) == set()


def test_after_an_update_that_failed_in_its_midst_nobody_can_name_the_weights() -> None:
    below = RanksBelow()
    below.publish("first", PROMPT)

    change(below, "2", taken=WeightsUpdate.PERHAPS)

    assert found(below) == 0
    assert written(below) == set()


def test_an_update_that_has_changed_nothing_leaves_all_as_it_was() -> None:
    below = RanksBelow()
    below.publish("first", PROMPT)

    change(below, "2", taken=WeightsUpdate.NOTHING)

    assert found(below) == len(PROMPT)
    assert below.every(lambda rank: rank.weights.may_cache)


def test_weights_without_a_name_and_a_tree_of_before_are_warned_of_once_for_all_ranks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    below = RanksBelow()

    below.every(lambda rank: rank.weights.changed(WeightsUpdate.ALL, Update(), holds_nothing=False))

    messages = [each.message for each in caplog.records]
    assert len(messages) == 2
    assert "weight_version" in messages[0]
    assert "flush" in messages[1]


@pytest.mark.parametrize(
    ("version", "taken", "named"),
    [
        ("2", WeightsUpdate.PERHAPS, "result of a weight update is unknown"),
        ("3", WeightsUpdate.ALL, "weights become 3"),
    ],
)
def test_ranks_that_do_not_take_the_same_weights_are_named(
    version: str, taken: WeightsUpdate, named: str
) -> None:
    first, second = RanksBelow().below

    first.weights.changed(WeightsUpdate.ALL, Update("2"), holds_nothing=True)
    second.weights.changed(taken, Update(version), holds_nothing=True)

    journals = [each.host.inspection.journal.last(9) for each in (first, second)]
    assert f"rank 1: engine {named}" in (first_difference(journals) or "")


def test_after_a_clear_nothing_from_before_is_found_and_another_clear_is_another() -> None:
    below = RanksBelow()
    below.publish("first", PROMPT)
    keys, hits = [queried_keys(below)], list[int]()
    for _ in range(2):
        below.every(lambda rank: rank.weights.clear())
        keys.append(queried_keys(below))
        hits.append(found(below))
        below.publish("again", PROMPT)
        hits.append(found(below))

    assert hits == [0, len(PROMPT)] * 2
    assert len(set[bytes]().union(*keys)) == sum(map(len, keys)) > 0
