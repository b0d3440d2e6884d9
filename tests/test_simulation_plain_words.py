"""What can go wrong with stores that come and go, in a sentence that a stranger understands."""

import pytest

from lockstep.coordinator.proposal import Change, Proposal
from lockstep.ranks.replica.attaching import StoreState
from lockstep.simulation.memory import Store
from lockstep.simulation.plain_words import in_plain_words
from lockstep.simulation.stores import OTHER_STORE, OpenStore

JARGON = (
    "invariant",
    "digest",
    "node",
    "receipt",
    "None",
    "epoch",
    "Something that must",
    "Change.",
)
JARGON_OF_STORES = ("proposal", "Proposal", "drain", "touch", "verdict", "in flight", "miscount")
ATTACH, DETACH = Proposal(Change.ATTACH, OTHER_STORE), Proposal(Change.DETACH)
DIFFERENT = [StoreState.ATTACHED, StoreState.DRAINING]

SENTENCES = {
    "rank 1: a store is attached that is not open, or beside another": "has not opened yet",
    f"the ranks have different stores: {DIFFERENT}, ['memory://', None]": "no longer use the same",
    f"the store is {StoreState.ATTACHED} on every rank, and they use None": "none of them has any",
    f"the store is {StoreState.DETACHED} on every rank, and they use memory://": (
        "storage is detached, and they still have memory:// in use"
    ),
    f"the store is {StoreState.DRAINING} on every rank, and they use None": "is being detached, and",
    f"rank 1 was told: {ATTACH}, and it does not end": "Rank 1 was told to attach storage",
    f"rank 0 was told: {DETACH}, and it does not end": "Rank 0 was told to detach storage",
    "nothing is in flight, and the store is not let go of": "no other can ever be attached",
    "rank 1 has left its group, and a proposal waits for it": "cannot come any more",
    f"{ATTACH} was done on 1 of the ranks that were told": "attached for only 1 of the ranks",
    f"{DETACH} was done on 2 of the ranks that were told": "detached for only 2 of the ranks",
    f"{ATTACH} was done, and not every rank was told of it": "attached although not every rank",
}
"""By violation, as the checkers have it: what its sentence must say."""


@pytest.mark.parametrize("what", SENTENCES)
def test_each_violation_with_stores_has_a_sentence_without_jargon(what: str) -> None:
    said = in_plain_words(what)

    assert SENTENCES[what] in said
    assert said.endswith(".")
    assert said.count(". ") == 0
    assert not [word for word in (*JARGON, *JARGON_OF_STORES) if word in said]


@pytest.mark.parametrize("who", ["a lookup", "a read", "a write", "operation 41"])
def test_whoever_uses_a_store_that_was_closed_is_named(who: str) -> None:
    found: list[str] = []
    store = OpenStore(OTHER_STORE, Store({}), found.append)
    store.closed = True
    store.touch(who)

    said = in_plain_words(f"rank 3: {found[0]}")

    name = {"operation 41": "a transfer"}.get(who, who)
    assert said.startswith(f"On rank 3 {name} uses the storage {OTHER_STORE} after it was detached")
