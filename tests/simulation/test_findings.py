"""Each kind of finding is said in one sentence that a stranger understands."""

import pytest

from lockstep.coordinator.proposal import Change, Proposal
from lockstep.ranks.replica.attaching import StoreState
from lockstep.simulation.findings import (
    answers,
    group,
    pages,
    requests,
    storage,
    transfers,
)
from lockstep.simulation.findings.finding import Finding
from lockstep.simulation.rank.memory import SimulatedStore
from lockstep.simulation.rank.stores import OTHER_STORE, OpenStore
from lockstep.simulation.world.contents import EMPTY, GARBAGE, SHARDS, TORN

JARGON = (
    *("invariant", "digest", "node", "receipt", "kv ", "None", "epoch", "Change."),
    *("proposal", "Proposal", "drain", "touch", "verdict", "in flight", "miscount"),
)
ATTACH, DETACH = Proposal(Change.ATTACH, OTHER_STORE), Proposal(Change.DETACH)
DIFFERENT = (StoreState.ATTACHED, StoreState.DRAINING)
SLOT = pages.Slot(1, "host", "kv", 7)


def crashed(error: Exception) -> Finding:
    try:
        raise error
    except type(error) as raised:
        return group.Crashed.of(raised)


SAID: tuple[tuple[Finding, str], ...] = (
    (answers.OtherAnswer("match", "4", 1, "8"), "Ranks 0 and 1 gave different answers"),
    (answers.ImpossibleAnswer("a match", "of 4 tokens finds 8"), "gave a match an answer that"),
    (answers.NotKept(8, "were pinned", 4), "8 tokens were pinned, and 4 of them are left"),
    (answers.WrongHit("r1", 0, 8, 8, "right after a reset"), "right after a reset"),
    (answers.NotRefused(1, "half a token"), "makes no sense (half a token)"),
    (answers.RefusedAndChanged(1, "half a token"), "changed something all the same"),
    (group.InvariantBroken(1, 4, "node 3 is odd"), "the end of a prefix of which it has dropped"),
    (group.InvariantBroken(1, 10, "it is odd"), "has broken one of its own rules"),
    (group.ReplicasDiffer("the states differ"), "The ranks no longer agree"),
    (group.AheadOfTime(9, 1, 8), "a time that rank 1 has not reached"),
    (
        crashed(KeyError("page")),
        "crashed in test_findings.py with KeyError, saying: 'page'",
    ),
    (crashed(AssertionError()), "crashed in test_findings.py with AssertionError."),
    (
        group.Crashed("KeyError", "tree.py", 9, "keys", ""),
        "was to name the pages of a cached prefix",
    ),
    (group.WrongVotes(1, 0), "took part in 0 votes"),
    (group.OtherShape(1, ("int64", 9), ("int64", 8)), "votes in another form"),
    (
        group.EndedForNoReason(0, "CollectiveTimeout", "", absent=1),
        "Rank 1 did not come to the vote",
    ),
    (group.EndedForNoReason(0, "DivergenceError", "", difference="at 4"), "no longer agree"),
    (group.EndedForNoReason(0, "RankUnhealthy", "ill"), "Rank 0 gives up the group"),
    (group.NotNoticed("dead_rank", 1, 0, ("None", "None")), "rank 0 did not notice it in time"),
    (group.GoesOn(1, "steps on"), "goes on after its group has ended"),
    (group.Restless("the group does not come to rest", 9), "still busy 9 steps later"),
    (group.Miscounted(1, 3, 3, 2), "did not vote exactly once in every step"),
    (requests.OtherRequest(3, b"one", b"two"), "request 3 in other words"),
    (requests.HeardEarly(3, 1), "before rank 1 has received it"),
    (requests.NotHeard(3), "none of them acts on it"),
    (
        pages.WrongOffer(SLOT, 4 + SHARDS, 5 + SHARDS),
        "the data of another prefix: the next request",
    ),
    (pages.WrongOffer(SLOT, 4 + SHARDS, 4), "rank 0's part of a prefix where rank 1's belongs"),
    (pages.OfferStillWritten(SLOT), "while a transfer still writes it"),
    (pages.WrongPage(SLOT, "r1", 4, EMPTY), "holds nothing: it would go on without what it needs"),
    (pages.PageStillWritten(SLOT, "r1"), "request r1 uses page 7 of host memory (attention KV)"),
    (pages.FreePageChanged(SLOT, 4, TORN), "although it is free"),
    (pages.TwoTransfers(SLOT, 3, writes=True, writer=None), "while another still reads it"),
    (pages.StillTouched(SLOT, "it is free"), "still uses page 7 of host memory"),
    (pages.NothingToCopy(SLOT, "a fork", GARBAGE), "what a failed transfer has left in it"),
    (pages.WrongObject(1, 4, 5), "Rank 1 writes to storage"),
    (pages.TwoOwners(SLOT, ("request r1", "request r2")), "request r1 and to request r2 at once"),
    (pages.WrongCount(5, 3, "window", 2), "2 pages of sliding-window KV for a piece of a prefix"),
    (pages.PagesMissing("r1", 4, 8, "state", [0]), "served without pages of recurrent state"),
    (
        pages.Leaked("host", "kv", 4, 3, 0, 9),
        "Of host memory (attention KV) 2 pages belong to nobody",
    ),
    (pages.NotToBeHad(4, "device kv pages", "[1]"), "not all of the memory can be used again"),
    (storage.ClosedStore(1, "a read", OTHER_STORE), f"a read uses the storage {OTHER_STORE} after"),
    (storage.NotWritten(1, 3, "kv", 4), "rank 1 has never written it whole"),
    (storage.NotOpen(1), "has not opened yet"),
    (storage.OtherStores(DIFFERENT, ("memory://", None)), "no longer use the same storage"),
    (storage.AgreedOtherwise(StoreState.ATTACHED, None), "none of them has any"),
    (
        storage.AgreedOtherwise(StoreState.DETACHED, "memory://"),
        "storage is detached, and they use",
    ),
    (storage.AgreedOtherwise(StoreState.DRAINING, None), "is being detached, and"),
    (storage.Unanswered(1, ATTACH), "Rank 1 was told to attach storage"),
    (storage.Unanswered(0, DETACH), "Rank 0 was told to detach storage"),
    (storage.StoreKept(), "no other can ever be attached"),
    (storage.LeftWaiting(1), "cannot come any more"),
    (storage.DoneOnSome(ATTACH, 1), "attached for only 1 of the ranks"),
    (storage.DoneUntold(DETACH), "detached although not every rank"),
    (transfers.BadOrder(1, "a transfer", "names 3 keys and 2 pages"), "names 3 keys and 2 pages"),
    (transfers.Overdue("PERSIST", 3, "ISSUED", 1.5, 1.0), "A write to storage does not end"),
    (transfers.EngineNotKeptOut(3), "into the engine's own memory does not end"),
    (transfers.WaitsForNothing("r1", 3), "Request r1 waits for a copy that has ended"),
    (transfers.WaitsForNothing("r1", None), "Request r1 waits for a copy that has ended"),
    (transfers.NotLetGo("node 3", "still held"), "still keeps memory from use"),
)
"""Findings of every kind, and what the plain sentence of each must say."""


@pytest.mark.parametrize(("finding", "words"), SAID, ids=[type(each).__name__ for each, _ in SAID])
def test_a_finding_has_one_plain_sentence_without_jargon(finding: Finding, words: str) -> None:
    said = finding.say()

    assert words in said.plain
    assert said.plain[0].isupper()
    assert said.plain.endswith(".")
    assert said.plain.count(". ") == 0
    assert not [word for word in JARGON if word in said.plain]


def test_every_kind_of_finding_is_said_above() -> None:
    assert {type(each).__name__ for each, _ in SAID} == {
        kind.__name__ for kind in Finding.__subclasses__()
    }


@pytest.mark.parametrize("who", ["a lookup", "a read", "a write", "a transfer"])
def test_whoever_uses_a_store_that_was_closed_is_named(who: str) -> None:
    found: list[Finding] = []
    store = OpenStore(OTHER_STORE, SimulatedStore({}), found.append, rank=3)
    store.closed = True
    store.touch(who)

    plain = found[0].say().plain

    assert plain.startswith(f"On rank 3 {who} uses the storage {OTHER_STORE} after it was detached")
