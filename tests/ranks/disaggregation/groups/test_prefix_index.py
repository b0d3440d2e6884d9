"""The index says what groups have, exactly, or that it does not know."""

from collections.abc import Iterator

import pytest

from lockstep.ranks.disaggregation.groups.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Snapshot,
)
from lockstep.ranks.disaggregation.groups.prefix_index import Hit, PrefixIndex, Standing
from lockstep.ranks.replica.notices import Tier

KEYS = tuple(bytes([number]) for number in range(9))


def batch(sequence: int, *events: Event, life: int = 0) -> EventBatch:
    return EventBatch(life=life, sequence=sequence, time_s=0.0, events=events)


def stored(*keys: bytes, tier: Tier = Tier.DEVICE) -> BlockStored:
    return BlockStored(tier, keys)


def snapshot(sequence: int, *keys: bytes, life: int = 0) -> Snapshot:
    return Snapshot(life=life, sequence=sequence, held={Tier.DEVICE: keys, Tier.HOST: ()})


def device(index: PrefixIndex, group: str = "g") -> frozenset[bytes]:
    return index.held(group)[Tier.DEVICE]


def test_a_query_finds_the_longest_prefix_of_each_group() -> None:
    index = PrefixIndex()
    index.apply("a", batch(0, stored(*KEYS[:4])))
    index.apply("b", batch(0, stored(*KEYS[:2]), stored(*KEYS[:6], tier=Tier.HOST)))
    index.apply("c", batch(0, stored(*KEYS[1:])))

    assert index.hits(KEYS) == {"a": Hit(4, 4), "b": Hit(6, 2)}
    assert index.hits(KEYS[:3]) == {"a": Hit(3, 3), "b": Hit(3, 2)}
    assert index.hits(()) == {}


def test_a_query_takes_no_more_keys_than_the_longest_prefix_and_one() -> None:
    index = PrefixIndex()
    index.apply("a", batch(0, stored(*KEYS[:3])))
    taken: list[bytes] = []

    def keys() -> Iterator[bytes]:
        for key in KEYS:
            taken.append(key)
            yield key

    index.hits(keys())

    assert taken == list(KEYS[:4])


def test_what_is_removed_or_cleared_is_gone_for_that_group_and_tier_alone() -> None:
    index = PrefixIndex()
    for group in ("a", "b"):
        index.apply(group, batch(0, stored(*KEYS[:3]), stored(*KEYS[:2], tier=Tier.HOST)))

    index.apply("a", batch(1, BlockRemoved(Tier.DEVICE, KEYS[1:3])))
    assert index.hits(KEYS) == {"a": Hit(2, 1), "b": Hit(3, 3)}

    index.apply("a", batch(2, AllBlocksCleared(), stored(KEYS[0])))
    assert index.hits(KEYS) == {"a": Hit(1, 1), "b": Hit(3, 3)}


def test_repeated_and_late_batches_change_nothing() -> None:
    index = PrefixIndex()
    first, second = batch(0, stored(KEYS[0])), batch(1, BlockRemoved(Tier.DEVICE, KEYS[:1]))

    exact = [index.apply("g", each) for each in (first, second, first, second, first)]

    assert exact == [True] * 5
    assert device(index) == frozenset()


def test_after_a_gap_a_group_is_unknown_until_the_gap_is_filled() -> None:
    index = PrefixIndex()
    index.apply("g", batch(0, stored(KEYS[0])))

    assert not index.apply("g", batch(2, stored(KEYS[2])))
    assert index.hits(KEYS) == {}
    assert index.standing("g") == Standing(exact=False, life=0, through=0, heard=2)

    assert not index.apply("g", batch(1, stored(KEYS[1])))
    assert index.apply("g", batch(2, stored(KEYS[2])))
    assert index.hits(KEYS) == {"g": Hit(3, 3)}


def test_after_a_gap_a_snapshot_helps_and_batches_that_it_contains_change_nothing() -> None:
    index = PrefixIndex()
    index.apply("g", batch(0, stored(KEYS[0])))
    index.apply("g", batch(3, stored(KEYS[3])))

    assert index.restore("g", snapshot(3, KEYS[0], KEYS[3]))
    assert index.apply("g", batch(1, stored(KEYS[1])))
    assert device(index) == {KEYS[0], KEYS[3]}


def test_a_late_snapshot_changes_nothing_and_one_that_lacks_later_batches_is_not_exact() -> None:
    index = PrefixIndex()
    index.apply("g", batch(0, stored(KEYS[0])))
    assert index.restore("g", snapshot(-1))
    assert device(index) == {KEYS[0]}

    index.apply("g", batch(5, stored(KEYS[5])))
    assert not index.restore("g", snapshot(3, KEYS[3]))
    assert index.standing("g").through == 3


def test_a_lost_last_batch_shows_once_the_group_says_how_far_it_is() -> None:
    index = PrefixIndex()
    index.apply("g", batch(0, stored(KEYS[0])))

    assert not index.heard("g", 0, 1)
    assert index.hits(KEYS) == {}
    assert index.apply("g", batch(1, stored(KEYS[1])))


def test_a_reader_that_comes_late_knows_nothing_before_a_snapshot() -> None:
    index = PrefixIndex()

    assert not index.apply("g", batch(7, stored(KEYS[7])))
    assert index.restore("g", snapshot(7, *KEYS[:2]))
    assert index.hits(KEYS) == {"g": Hit(2, 2)}


def test_a_group_that_has_told_nothing_yet_has_nothing() -> None:
    index = PrefixIndex()

    assert index.heard("g", 3, -1)
    assert index.hits(KEYS) == {}


@pytest.mark.parametrize("sign", ["batch", "level", "snapshot"])
def test_a_later_life_begins_anew_and_an_earlier_one_changes_nothing(sign: str) -> None:
    index = PrefixIndex()
    index.apply("g", batch(0, stored(*KEYS[:3])))
    begin = {
        "batch": lambda: index.apply("g", batch(0, stored(KEYS[0]), life=1)),
        "level": lambda: (
            index.heard("g", 1, -1) and index.apply("g", batch(0, stored(KEYS[0]), life=1))
        ),
        "snapshot": lambda: index.restore("g", snapshot(0, KEYS[0], life=1)),
    }

    assert begin[sign]()
    assert index.apply("g", batch(1, stored(KEYS[8]), life=0))
    assert index.heard("g", 0, 9)
    assert index.restore("g", snapshot(9, *KEYS, life=0))
    assert index.standing("g") == Standing(exact=True, life=1, through=0, heard=0)
    assert device(index) == {KEYS[0]}


def test_a_group_that_is_forgotten_leaves_its_place_to_others() -> None:
    index = PrefixIndex()
    index.apply("old", batch(0, stored(*KEYS)))
    index.forget("old")
    index.forget("old")

    assert index.hits(KEYS) == {}
    assert not index.standing("old").exact
    index.apply("new", batch(0, stored(KEYS[0])))
    assert index.hits(KEYS) == {"new": Hit(1, 1)}
