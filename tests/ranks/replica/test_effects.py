"""The replica's Effects: each command or verdict returns all effects that it caused, and no others."""

from array import array

import pytest

from lockstep.coordinator.operation import Queue
from lockstep.coordinator.verdict import Verdict, Watermark
from lockstep.errors import UsageError
from lockstep.ranks.group.member.observer import Observer
from lockstep.ranks.protocol.effects import NOTHING, Effects
from lockstep.ranks.protocol.events import OTHERS_HAVE_IT, MissingOnRank
from lockstep.ranks.protocol.replica_config import ReplicaConfig
from lockstep.ranks.replica.digest import state_digest
from lockstep.ranks.replica.replica import Replica

PAGE_TOKENS = 4


def tokens(pages: int) -> bytes:
    return array("i", range(pages * PAGE_TOKENS)).tobytes()


def new_replica(*, device_pages: int = 16, host_pages: int = 16, names: bool = False) -> Replica:
    return Replica(
        ReplicaConfig(
            page_tokens=PAGE_TOKENS,
            device_pages=device_pages,
            host_pages=host_pages,
            has_store=True,
            model_digest=b"m",
            names_pages=names,
        )
    )


def ended(replica: Replica, queue: Queue) -> Effects:
    """Apply a verdict by which all operations of a queue have succeeded on every rank."""
    last = max(queue_index for queue_index, _ in replica.operation_table.queues()[queue])
    mark = Watermark(queue=queue, ended_through=last, first_failed=None, failed_rank=None)
    return replica.apply(Verdict(round=1, time_ms=1, watermarks=(mark,), prefetch_slots=()))


def compute(replica: Replica, name: str, pages: int) -> Effects:
    replica.load_back(name, "", b"", pages * PAGE_TOKENS)
    return replica.insert(name, tokens(pages), final=True)[1]


def test_the_fields_stand_in_the_order_in_which_a_driver_follows_them() -> None:
    """R2: expectations precede orders, because a report of an unexpected operation is ignored."""
    fields = Effects._fields

    assert fields.index("lost") < fields.index("expectations") < fields.index("orders")
    assert fields.index("orders") < fields.index("decisions") < fields.index("events")


def test_nothing_is_left_behind_for_the_next_command() -> None:
    replica = new_replica()
    compute(replica, "r", 2)

    _, effects = replica.unpin("nobody")

    assert effects is NOTHING


def test_what_a_refused_command_has_caused_leaves_with_the_next_one() -> None:
    replica = new_replica()
    replica.prefetch("r", "", tokens(2))
    with pytest.raises(UsageError):
        replica.extend("r", 4)

    _, effects = replica.unpin("nobody")

    assert effects is NOTHING


@pytest.mark.parametrize("device_pages", [0, 16])
def test_a_query_changes_nothing(device_pages: int) -> None:
    replica = new_replica(device_pages=device_pages)
    replica.prefetch("r", "", tokens(3))
    before = replica.digest, state_digest(replica)

    replica.match("", tokens(2))
    replica.match("other", tokens(2))
    replica.prefetch_done("r")
    replica.knows("r")
    replica.prefetch_slots()
    assert not replica.idle
    assert replica.clock.agreed_ms == 0
    assert replica.store_state == "attached"

    assert (replica.digest, state_digest(replica)) == before
    assert replica.unpin("nobody")[1] is NOTHING


def test_a_query_about_lent_pages_changes_nothing() -> None:
    replica = new_replica(device_pages=0)
    replica.prefetch("r", "", tokens(3))
    before = replica.digest, state_digest(replica)

    replica.touching("r")
    replica.touching(None)
    replica.load_state("r")

    assert (replica.digest, state_digest(replica)) == before
    assert replica.unpin("nobody")[1] is NOTHING


def test_naming_pages_changes_nothing_else() -> None:
    """Page keys in events do not change the digest, because only some ranks may emit them."""
    named, unnamed = new_replica(names=True), new_replica()
    for replica in (named, unnamed):
        compute(replica, "r", 2)
        ended(replica, Queue.BACKUP)
        replica.release("r")
        compute(replica, "s", 16)

    assert named.digest == unnamed.digest
    assert state_digest(named) == state_digest(unnamed)


def test_statistics_are_what_the_events_add_up_to() -> None:
    replica = new_replica(host_pages=0)
    observer = Observer(1, replica.operation_table, None)
    for name, pages in (("r", 2), ("s", 4)):
        effects = replica.load_back(name, "", tokens(pages), pages * PAGE_TOKENS)[1]
        observer.follow(effects)
        observer.follow(replica.insert(name, tokens(pages), final=True)[1])
        observer.follow(replica.release(name)[1])
    observer.follow(replica.load_back("t", "", b"", 16 * PAGE_TOKENS)[1])

    stats = observer.stats()

    assert stats.stored_pages == {"device": {"computed": 4}}
    assert stats.removed_pages == {"device": {"room": 4}}
    assert stats.asked_tokens == 6 * PAGE_TOKENS
    assert stats.hit_tokens == {"device": 2 * PAGE_TOKENS, "host": 0, "storage": 0}


def test_a_rank_lacks_only_what_the_others_have() -> None:
    """A page counts as missing on one rank only if the other ranks have it."""
    observer = Observer(1, new_replica().operation_table, None)
    for rank, reason in ((0, "could not be read"), (1, OTHERS_HAVE_IT)):
        observer.follow(Effects(events=(MissingOnRank(1, "r", rank, 0, b"key", reason),)))

    assert observer.stats().lacking == {1: 1}
