"""Events are what the notices of a replica add up to, and who has missed some is helped."""

from itertools import pairwise

import pytest

from lockstep.errors import ConfigError
from lockstep.ranks.disaggregation.groups.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventPublisher,
)
from lockstep.ranks.orders import KV_POOL
from lockstep.ranks.replica.notices import Cause, Hit, Notice, Removed, Reset, Stored, Tier

ROOT = b"root"


def stored(*keys: bytes, after: bytes = ROOT, tier: Tier = Tier.DEVICE) -> Stored:
    return Stored(tier, KV_POOL, len(keys), Cause.COMPUTED, after, keys, b"tokn" * len(keys))


def removed(*keys: bytes, tier: Tier = Tier.DEVICE) -> Removed:
    return Removed(tier, KV_POOL, len(keys), Cause.ROOM, keys)


def told(publisher: KVEventPublisher, *notices: Notice) -> tuple[object, ...]:
    batch = publisher.fold(notices)
    return () if batch is None else batch.events


def test_pages_that_come_and_go_are_told_by_tier_with_what_they_follow() -> None:
    publisher = KVEventPublisher(life=0)

    assert told(publisher, stored(b"a", b"b")) == (
        BlockStored(Tier.DEVICE, (b"a", b"b"), None, b"tokntokn"),
    )
    assert told(publisher, stored(b"a", b"b", tier=Tier.HOST), stored(b"c", after=b"b")) == (
        BlockStored(Tier.HOST, (b"a", b"b"), None, b"tokntokn"),
        BlockStored(Tier.DEVICE, (b"c",), b"b", b"tokn"),
    )
    assert told(publisher, removed(b"c", b"b")) == (BlockRemoved(Tier.DEVICE, (b"c", b"b")),)


@pytest.mark.parametrize(
    "notice",
    [
        Hit("r", 4, 4, 0, 0),
        Stored(Tier.STORAGE, KV_POOL, 1, Cause.PERSISTED, ROOT, (b"a",)),
        Stored(Tier.DEVICE, "window", 1, Cause.COMPUTED),
        Removed(Tier.HOST, "state", 1, Cause.ROOM),
        removed(b"never seen"),
    ],
)
def test_what_changes_nothing_of_full_attention_in_memory_is_no_event(notice: Notice) -> None:
    publisher = KVEventPublisher(life=0)

    assert publisher.fold([notice]) is None
    assert publisher.last_sequence == -1


def test_notices_that_name_no_pages_are_refused() -> None:
    publisher = KVEventPublisher(life=0)

    with pytest.raises(ConfigError, match="names_pages"):
        publisher.fold([Stored(Tier.DEVICE, KV_POOL, 2, Cause.COMPUTED)])


def test_a_reset_clears_all_but_what_is_still_there() -> None:
    publisher = KVEventPublisher(life=0)
    told(publisher, stored(b"a", b"b"), stored(b"x", b"y"))

    events = told(publisher, Reset(1, None), removed(b"x", b"y"))

    assert events == (
        AllBlocksCleared(),
        BlockStored(Tier.DEVICE, (b"a",), None),
        BlockStored(Tier.DEVICE, (b"b",), b"a"),
    )


def test_a_page_is_there_until_the_last_with_its_key_has_left() -> None:
    """After a reset to the same weights new pages have the keys of those that requests still hold."""
    publisher = KVEventPublisher(life=0)
    told(publisher, stored(b"a"), Reset(1, "v1"))

    assert told(publisher, stored(b"a", b"b")) == (
        BlockStored(Tier.DEVICE, (b"b",), b"a", b"tokn"),
    )
    assert told(publisher, removed(b"a")) == ()
    assert told(publisher, removed(b"b", b"a")) == (BlockRemoved(Tier.DEVICE, (b"b", b"a")),)


def test_batches_are_numbered_without_a_gap_and_had_again() -> None:
    publisher = KVEventPublisher(life=7)
    batches = [publisher.fold([stored(bytes([number]))]) for number in range(5)]

    assert [each and (each.life, each.sequence) for each in batches] == [(7, n) for n in range(5)]
    assert publisher.since(-1) == tuple(batches)
    assert publisher.since(2) == tuple(batches[3:])
    assert publisher.since(4) == ()


def test_who_has_missed_too_much_or_comes_from_another_life_needs_a_snapshot() -> None:
    publisher = KVEventPublisher(life=0, replay_pages_max=4)
    for number in range(5):
        publisher.fold([stored(bytes([number]))])

    assert publisher.since(0) is None
    assert [each.sequence for each in publisher.since(2) or ()] == [3, 4]
    assert publisher.since(9) is None


def test_the_last_batch_is_kept_whatever_its_size() -> None:
    publisher = KVEventPublisher(life=0, replay_pages_max=1)

    batch = publisher.fold([stored(*(bytes([number]) for number in range(9)))])

    assert publisher.since(-1) == (batch,)


def test_a_snapshot_is_all_there_is_in_prefix_order_and_says_for_which_batch() -> None:
    publisher = KVEventPublisher(life=3)
    assert publisher.snapshot().sequence == -1
    told(publisher, stored(b"a", b"b", b"c"), stored(b"a", tier=Tier.HOST))
    told(publisher, removed(b"c"))
    told(publisher, stored(b"d", after=b"b"))

    snapshot = publisher.snapshot()

    assert (snapshot.life, snapshot.sequence) == (3, 2)
    assert snapshot.held == {Tier.DEVICE: (b"a", b"b", b"d"), Tier.HOST: (b"a",)}
    assert all(earlier < later for earlier, later in pairwise(snapshot.held[Tier.DEVICE]))
