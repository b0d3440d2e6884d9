"""The incidents that the project starts from, as reports of what must never happen again.

Each is told on the real code, without the bug; that the simulator would find the bug is the claim of
`test_revived`.
"""

from collections import Counter
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from lockstep.coordinator.ballot import Answered, Expired, Landed, Quiesced
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.config import Recurrent, SlidingWindow
from lockstep.ranks.executor.restorable import restorable
from lockstep.ranks.orders import (
    KV_POOL,
    Cancel,
    CopyToDevice,
    CopyToHost,
    CopyTransfer,
    Fetch,
    LookUp,
    Put,
)
from lockstep.ranks.replica.answers import Admission
from lockstep.ranks.replica.requests import LoadState
from lockstep.ranks.replica.tree.node import DEVICE, HOST
from tests.kit.ranks.in_turn import PAGE_TOKENS, RanksInTurn

WINDOW_PAGES = 2


def layout(page_tokens: int) -> PageLayout:
    return PageLayout(
        page_tokens=page_tokens, columns=(Column(name="k", layers=1, heads=4, elements=1),)
    )


def windowed_ranks(*, device_pages: int = 12, window_host_pages: int = 12) -> RanksInTurn:
    """Return ranks of a model whose window is two pages long."""
    window = SlidingWindow(
        window_tokens=WINDOW_PAGES * PAGE_TOKENS,
        layout=layout(PAGE_TOKENS),
        device_pages=device_pages,
        host_pages=window_host_pages,
    )
    return RanksInTurn(device_pages=device_pages, components=(window,))


def prompt(first: int, pages: int) -> list[int]:
    """Return so many pages of tokens, which no prompt with another first token shares."""
    return [first * 1000 + token for token in range(pages * PAGE_TOKENS)]


STEM = prompt(1, 4)
MIDDLE = STEM + prompt(2, 4)
END = MIDDLE + prompt(3, 4)


def ranks_whose_window_is_gone_in_the_middle() -> RanksInTurn:
    """Return ranks that have END on the host alone, but not the window before the end of MIDDLE."""
    ranks = windowed_ranks(window_host_pages=3 * WINDOW_PAGES)
    for name, tokens in (("stem", STEM), ("middle", MIDDLE), ("end", END), ("again", STEM)):
        ranks.compute(name, tokens)
    # It takes the whole device, and of the host's window pages those that were used longest ago.
    ranks.compute("other", prompt(4, 12))
    return ranks


def prefetch_all(ranks: RanksInTurn, name: str, tokens: list[int]) -> int:
    """Begin a prefetch of which every rank's store has everything; return its operation."""
    assert ranks.every(lambda cache: cache.prefetch(name, tokens))
    for executor in ranks.executors:
        (order,) = executor.take(LookUp)
        present = [[True] * len(need.keys) for need in order.needs]
        executor.said.append(Answered(order.operation, *restorable(order, present)))
    ranks.step()
    return prefetch_of(ranks, name)


def prefetch_of(ranks: RanksInTurn, name: str) -> int:
    """Return the prefetch in flight of a request."""
    operation = ranks.caches[0].inspection.requests.known(name).prefetch
    assert operation is not None
    return operation


def pages_by_pool(order: CopyToDevice) -> Counter[str]:
    """Return how many pages an order copies in each pool."""
    pages = Counter[str]()
    for transfer in order.transfers:
        pages[transfer.pool] += len(transfer.sources)
    return pages


def free(ranks: RanksInTurn, tier: int) -> list[int]:
    """Return how many pages of each pool can be had on a tier."""
    residence = ranks.caches[0].inspection.prefixes.residence
    return [residence.available(tier, index) for index in range(len(residence.pools[tier]))]


# Incident A.


def test_an_order_cannot_change_what_a_node_owns() -> None:
    """Incident A: moving a transfer's indices to the GPU changed what a tree node still owned.

    The next eviction freed the GPU's indices in the pool of the host, and the worker crashed. Here
    an order has page numbers of its own, which nobody can change.
    """
    ranks = windowed_ranks()
    ranks.compute("a", END)
    ranks.compute("other", prompt(4, 12))
    ranks.every(lambda cache: cache.load_back("b", END))
    node = ranks.caches[0].inspection.requests.known("b").node
    assert node is not None
    (order,) = ranks.executors[0].given(CopyToDevice)
    window: Any = next(each for each in order.transfers if each.pool == "window")

    with pytest.raises(TypeError):
        window.sources[0] += 1000
    with pytest.raises(FrozenInstanceError):
        window.sources = [page + 1000 for page in window.sources]

    assert list(window.sources) == list(node.pages(HOST, 1) or ())
    assert {type(getattr(window, each.name)) for each in fields(window)} == {str, tuple, bool}


def test_no_order_has_an_array_of_pages_that_the_tree_or_an_operation_owns() -> None:
    """Incident A, in the other directions: a backup, and a write to storage."""
    ranks = windowed_ranks()
    ranks.every(lambda cache: cache.load_back("a", END, reserve_tokens=len(END)))
    ranks.every(lambda cache: cache.insert("a", END))
    (backup,) = ranks.executors[0].given(CopyToHost)
    ranks.obey()
    (persist,) = ranks.executors[0].given(Put)

    runs = [each for copy in backup.transfers for each in (copy.sources, copy.destinations)]
    runs += [each.pages for each in persist.transfers]

    assert {type(run) for run in runs} == {tuple}


# Incident B.


def test_a_load_back_starts_where_every_component_accepts_and_not_at_the_last_host_node() -> None:
    """Incident B: a load back began at `last_host_node`, which the window had not accepted.

    Under load a worker crashed when it walked past the place where the window's pages had left.
    """
    ranks = ranks_whose_window_is_gone_in_the_middle()
    found = ranks.every(lambda cache: cache.match(MIDDLE))
    assert (found.host_tokens, found.last_host_tokens) == (len(STEM), len(MIDDLE))

    admission = ranks.every(lambda cache: cache.load_back("late", MIDDLE))

    assert isinstance(admission, Admission)
    assert admission.cached_tokens == len(STEM)
    (order,) = ranks.executors[1].given(CopyToDevice)
    assert pages_by_pool(order) == {KV_POOL: 4, "window": WINDOW_PAGES}


def test_a_prefetch_starts_at_the_last_host_node_and_brings_the_window_that_is_missing() -> None:
    """Incident B, the other anchor: what full attention has on the host need not be read again."""
    ranks = ranks_whose_window_is_gone_in_the_middle()

    assert ranks.every(lambda cache: cache.prefetch("late", MIDDLE + prompt(5, 4)))

    (order,) = ranks.executors[0].take(LookUp)
    kv, window = order.needs
    assert order.floor == 4
    assert (kv.first, len(kv.keys)) == (8, 4)
    # Any length beyond the floor may be what the ranks agree on, with the window before its end.
    assert (window.first, len(window.keys)) == (3, 9)


def test_a_load_back_that_is_under_way_locks_what_it_fills_and_a_split_changes_nothing() -> None:
    """Incident B, its second half: the lock skips what is not on the device, until it is filled."""
    ranks = windowed_ranks()
    ranks.compute("a", END)
    ranks.compute("other", prompt(4, 12))

    ranks.every(lambda cache: cache.load_back("b", END))
    # A prompt that turns elsewhere within what is being loaded cuts its node.
    turned = END[:18] + prompt(6, 1)
    ranks.every(lambda cache: cache.prefetch("c", turned))
    ranks.settle()

    assert ranks.every(lambda cache: cache.load_state("b")) is LoadState.READY
    table = ranks.every(lambda cache: cache.page_table("b", "window").tolist())
    assert table[-WINDOW_PAGES:] != [-1] * WINDOW_PAGES
    ranks.every(lambda cache: cache.release("b"))
    ranks.every(lambda cache: cache.release("c"))
    assert free(ranks, DEVICE) == [12, 12]


# Incident C.


def test_a_prefetch_is_complete_only_when_every_pool_has_landed_and_a_deadline_still_ends_it() -> (
    None
):
    """Incident C: KV was complete, the sidecar was not, and ranks stopped waiting for it.

    The next synchronisation hung. Complete is every pool, on every rank; and a sidecar that never
    comes is ended by the deadline, on all ranks in the same step.
    """
    ranks = windowed_ranks()
    prefetch = prefetch_all(ranks, "a", END)
    (order,) = ranks.executors[0].take(Fetch)
    assert [(each.pool, len(each.keys)) for each in order.transfers] == [
        (KV_POOL, 12),
        ("window", WINDOW_PAGES),
    ]

    for executor in ranks.executors:
        executor.said.append(Landed(prefetch, 12))
    ranks.step()
    assert ranks.phase(prefetch) == "TRANSFER"
    assert not ranks.every(lambda cache: cache.prefetch_done("a"))

    ranks.executors[0].said.append(Landed(prefetch, 14))
    ranks.step()
    assert ranks.phase(prefetch) == "TRANSFER"

    ranks.executors[1].said.append(Expired(prefetch))
    ranks.step()
    assert ranks.phase(prefetch) == "QUIESCE"
    assert ranks.every(lambda cache: cache.prefetch_done("a"))


def test_what_a_deadline_has_cut_off_is_not_offered_and_its_pages_come_back_when_all_are_quiet() -> (
    None
):
    """Incident C: full attention that has landed is kept, and no match ends where a window is not."""
    ranks = windowed_ranks()
    prefetch = prefetch_all(ranks, "a", END)
    for executor in ranks.executors:
        executor.said.append(Landed(prefetch, 12))
    ranks.step()
    ranks.executors[1].said.append(Expired(prefetch))
    ranks.step()

    found = ranks.every(lambda cache: cache.match(END))
    assert (found.host_tokens, found.last_host_tokens) == (0, len(END))
    assert free(ranks, HOST) == [64, 12 - WINDOW_PAGES]

    assert [len(executor.take(Cancel)) for executor in ranks.executors] == [1, 1]
    ranks.executors[0].said.append(Quiesced(prefetch))
    ranks.step()
    assert free(ranks, HOST) == [64, 12 - WINDOW_PAGES]
    ranks.executors[1].said.append(Quiesced(prefetch))
    ranks.step()
    assert free(ranks, HOST) == [64, 12]


# Incident D.


def test_a_cascade_stops_at_a_pinned_parent() -> None:
    """Incident D: the cleanup of tombstones looked at device locks only.

    A parent under a prefetch vanished, and the worker died of "parent does not have child key".
    """
    ranks = ranks_whose_window_is_gone_in_the_middle()
    wanted = MIDDLE + prompt(5, 4)
    prefetch = prefetch_all(ranks, "late", wanted)

    # The last window below MIDDLE leaves, and with it the only child that MIDDLE has.
    ranks.publish("more", prompt(6, 12))

    below = ranks.every(lambda cache: cache.match(END))
    assert below.last_host_tokens == len(MIDDLE)
    ranks.obey()
    assert ranks.phase(prefetch) == "DONE"
    found = ranks.every(lambda cache: cache.match(wanted))
    assert (found.host_tokens, found.last_host_tokens) == (len(wanted), len(wanted))


def test_an_insert_on_the_host_refreshes_every_component_of_its_path() -> None:
    """Incident D, seen on the way: only full attention's recency was refreshed by such an insert."""
    ranks = windowed_ranks(window_host_pages=3 * WINDOW_PAGES)
    other = prompt(7, 4)
    ranks.compute("stem", STEM)
    ranks.compute("other", other)
    prefetch_all(ranks, "late", MIDDLE)
    ranks.settle()

    ranks.compute("more", prompt(8, 12))

    assert ranks.every(lambda cache: cache.match(STEM)).host_tokens == len(STEM)
    assert ranks.every(lambda cache: cache.match(other)).host_tokens == 0


def test_a_chunked_insert_says_that_it_is_one() -> None:
    """Incident D, seen on the way: ranks that do not agree on it have diverged, and know it."""
    ranks = windowed_ranks()
    ranks.every(lambda cache: cache.load_back("a", END, reserve_tokens=len(END)))

    ranks.caches[0].insert("a", MIDDLE, final=False)
    ranks.caches[1].insert("a", MIDDLE, final=True)

    one, other = (cache.inspection.digest for cache in ranks.caches)
    assert one != other


# Incident E.


def hybrid_ranks() -> RanksInTurn:
    """Return ranks of a model with a window of two pages and a state at every second page."""
    window = SlidingWindow(
        window_tokens=WINDOW_PAGES * PAGE_TOKENS,
        layout=layout(PAGE_TOKENS),
        device_pages=12,
        host_pages=12,
    )
    state = Recurrent(
        checkpoint_tokens=2 * PAGE_TOKENS, layout=layout(1), device_pages=12, host_pages=12
    )
    return RanksInTurn(device_pages=12, components=(window, state))


def test_a_retracted_request_is_saved_in_every_pool_and_what_is_saved_belongs_to_it_alone() -> None:
    """Incident E: after a retract and resume a request was served another request's data.

    Its metadata buffers were views of slots that were reused, and one pool was not saved with the KV.
    `test_retract` says the same of the bytes.
    """
    ranks = hybrid_ranks()
    tokens = [*STEM, 1, 2]
    ranks.every(lambda cache: cache.load_back("a", tokens, reserve_tokens=len(tokens)))

    assert ranks.every(lambda cache: cache.retract("a", tokens))

    order = ranks.executors[0].given(CopyToHost)[-1]
    saved = [each for each in order.transfers if each.sealed]
    assert {type(each) for each in order.transfers} == {CopyTransfer}
    assert [each.pool for each in saved] == [KV_POOL, "window", "state"]
    ranks.settle()
    assert ranks.every(lambda cache: cache.load_state("a")) is LoadState.SAVED
    prefixes = ranks.caches[0].inspection.prefixes
    nobodys = [set(pool.free_pages()) for pool in prefixes.residence.pools[HOST]]
    trees = [
        {page for node in prefixes.tree.nodes() for page in node.pages(HOST, index) or ()}
        for index in range(3)
    ]
    owned_otherwise = [
        set(transfer.destinations) & (free | tree)
        for transfer, free, tree in zip(saved, nobodys, trees, strict=True)
    ]
    assert owned_otherwise == [set()] * 3


def test_a_request_resumes_in_pages_of_its_own_with_all_that_was_saved() -> None:
    """Incident E: what comes back is a copy, in every pool, and waits until every rank has it."""
    ranks = hybrid_ranks()
    tokens = [*STEM, 1, 2]
    ranks.every(lambda cache: cache.load_back("a", tokens, reserve_tokens=len(tokens)))
    ranks.every(lambda cache: cache.retract("a", tokens))
    ranks.settle()

    admission = ranks.every(lambda cache: cache.resume("a", reserve_tokens=len(tokens)))

    assert isinstance(admission, Admission)
    assert admission.cached_tokens == len(tokens)
    (order,) = ranks.executors[0].given(CopyToDevice)
    assert [each.pool for each in order.transfers if each.sealed] == [KV_POOL, "window", "state"]
    assert ranks.every(lambda cache: cache.load_state("a")) is LoadState.LOADING
    ranks.settle()
    assert ranks.every(lambda cache: cache.load_state("a")) is LoadState.READY


# Rule R4.


def test_ranks_agree_on_a_length_that_every_rank_can_restore() -> None:
    """Rank 0 can restore 512 or 1,024 tokens, rank 1 can restore 512 or 768: the answer is 512.

    The MIN of the longest would be 768, at which rank 0 has no state.
    """
    ranks = RanksInTurn(
        host_pages=512,
        components=(
            Recurrent(checkpoint_tokens=256, layout=layout(1), device_pages=8, host_pages=8),
        ),
    )
    ranks.every(lambda cache: cache.prefetch("a", prompt(1, 1024 // PAGE_TOKENS)))
    for executor, lengths in zip(ranks.executors, ((512, 1024), (512, 768)), strict=True):
        (order,) = executor.take(LookUp)
        pages = tuple(length // PAGE_TOKENS for length in lengths)
        executor.said.append(Answered(order.operation, 0, pages))

    for _ in range(3):
        ranks.step()

    assert ranks.phase(prefetch_of(ranks, "a")) == "TRANSFER"
    fetched = [fetch.transfers for each in ranks.executors for fetch in each.take(Fetch)]
    assert [len(kv.keys) * PAGE_TOKENS for kv, _ in fetched] == [512, 512]
    assert [state.keys for _, state in fetched] == [(kv.keys[-1],) for kv, _ in fetched]
