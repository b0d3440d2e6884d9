"""Rule R15: a run without a branch is one node, and costs as much as one node."""

import numpy as np
import pytest

from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.protocol.answers import Admission, Wait
from lockstep.ranks.protocol.config import Recurrent, WritePolicy
from lockstep.ranks.replica.check import InvariantViolation
from tests.kit.counted_calls import calls
from tests.kit.ranks.in_turn import PAGE_TOKENS, HostRanksInTurn, RanksInTurn, prompt


def nodes(ranks: RanksInTurn | HostRanksInTurn) -> int:
    return ranks.caches[0].inspection.prefixes.tree.node_count


def decode(ranks: RanksInTurn, pages: int, *, name: str = "r") -> None:
    tokens = prompt(pages)
    ranks.every(lambda cache: cache.load_back(name, [], reserve_tokens=len(tokens)))
    for page in range(1, pages + 1):
        so_far = tokens[: page * PAGE_TOKENS]
        ranks.every(lambda cache: cache.insert(name, so_far, final=False))
        ranks.settle(lambda key: True)


@pytest.mark.parametrize(("host_pages", "store"), [(0, False), (64, False), (64, True)])
def test_a_request_that_decodes_extends_its_node(host_pages: int, store: bool) -> None:
    ranks = RanksInTurn(2, host_pages=host_pages, store=store)

    decode(ranks, 12)

    # The request locks the whole run, so its lock splits no node.
    assert nodes(ranks) == 1


@pytest.mark.parametrize("store", [False, True])
def test_each_state_that_is_kept_divides_the_run_once(store: bool) -> None:
    """Each kept state splits a run once; a copy of the state in the store causes no further split."""
    layout = PageLayout(page_tokens=1, columns=(Column(name="s", layers=1, heads=1, elements=1),))
    state = Recurrent(
        checkpoint_tokens=4 * PAGE_TOKENS, layout=layout, device_pages=8, host_pages=8
    )
    ranks = RanksInTurn(2, components=(state,), store=store)

    decode(ranks, 12)

    assert nodes(ranks) == 3


def test_when_it_was_saved_to_leave_divides_no_run_once_it_was_used_again() -> None:
    ranks = RanksInTurn(
        1, store=False, device_pages=12, host_pages=40, write_policy=WritePolicy.WRITE_BACK
    )
    ranks.publish("a", prompt(8))
    ranks.every(lambda cache: cache.load_back("half", prompt(4)))
    ranks.every(lambda cache: cache.release("half"))
    make_room(ranks, 8)
    apart = nodes(ranks)

    ranks.every(lambda cache: cache.load_back("whole", prompt(8)))
    ranks.settle()
    ranks.every(lambda cache: cache.release("whole"))
    ranks.check()

    assert apart == 2
    assert nodes(ranks) == 1


def make_room(ranks: RanksInTurn, pages: int) -> None:
    """Evict `pages` pages from the device, after write-back has copied them to the host."""

    def admit() -> Admission | Wait:
        tokens = pages * PAGE_TOKENS
        return ranks.every(lambda cache: cache.load_back("big", [], reserve_tokens=tokens))

    assert admit() is Wait.NO_ROOM
    ranks.settle()
    assert isinstance(admit(), Admission)
    ranks.every(lambda cache: cache.release("big"))


def test_an_operation_in_flight_keeps_what_it_copies_apart_until_it_has_ended() -> None:
    ranks = RanksInTurn(2, store=False)
    tokens = prompt(3)
    ranks.every(lambda cache: cache.load_back("r", [], reserve_tokens=len(tokens)))
    for page in (1, 2, 3):
        so_far = tokens[: page * PAGE_TOKENS]
        ranks.every(lambda cache: cache.insert("r", so_far, final=False))
    apart = nodes(ranks)

    ranks.settle()

    assert apart == 3
    assert nodes(ranks) == 1


def test_another_child_and_the_end_of_a_lock_divide_a_run_until_they_are_gone() -> None:
    ranks = RanksInTurn(2, host_pages=0, store=False)
    decode(ranks, 4)
    ranks.every(lambda cache: cache.release("r"))
    whole = nodes(ranks)
    ranks.every(lambda cache: cache.load_back("half", prompt(2), reserve_tokens=0))
    locked = nodes(ranks)
    ranks.every(lambda cache: cache.load_back("all", prompt(4), reserve_tokens=0))
    ranks.every(lambda cache: cache.release("half"))
    ranks.every(lambda cache: cache.release("all"))
    ranks.every(lambda cache: cache.load_back("all", prompt(4), reserve_tokens=0))
    ranks.check()
    again = nodes(ranks)

    other = [*prompt(2), *range(900, 900 + PAGE_TOKENS)]
    ranks.every(lambda cache: cache.load_back("branch", other, reserve_tokens=len(other)))
    ranks.every(lambda cache: cache.insert("branch", other))
    ranks.check()

    assert (whole, locked, again) == (1, 2, 1)
    assert nodes(ranks) == 3


def test_what_was_used_at_another_time_stays_apart_and_so_leaves_on_its_own() -> None:
    """Runs used at different times are separate nodes, so that the older end is evicted first."""
    ranks = RanksInTurn(2, host_pages=0, store=False)
    decode(ranks, 4)
    ranks.every(lambda cache: cache.release("r"))

    ranks.every(lambda cache: cache.load_back("half", prompt(2), reserve_tokens=0))
    ranks.every(lambda cache: cache.release("half"))
    ranks.check()

    assert nodes(ranks) == 2


def test_the_pages_of_a_run_that_grew_are_its_pages_in_their_order() -> None:
    ranks = RanksInTurn(2, store=False)
    decode(ranks, 5)
    before = ranks.every(lambda cache: tuple(cache.page_table("r").tolist()))

    ranks.every(lambda cache: cache.release("r"))
    ranks.every(lambda cache: cache.load_back("again", prompt(5), reserve_tokens=0))

    assert len(set(before)) == 5
    assert ranks.every(lambda cache: tuple(cache.page_table("again").tolist())) == before


def lending(pages: int) -> HostRanksInTurn:
    """Return a rank that has backed up `pages` pages lent by the engine, one page at a time."""
    ranks = HostRanksInTurn(1, host_pages=2 * pages, store=False)
    tokens, lent = np.arange(pages * PAGE_TOKENS, dtype=np.int32), np.arange(pages, dtype=np.int32)
    for page in range(1, pages + 1):
        ranks.caches[0].back_up("r", tokens[: page * PAGE_TOKENS], lent[:page])
        ranks.executors[0].complete()
        ranks.caches[0].open_round()
        ranks.caches[0].close_round()
    return ranks


def test_the_last_page_of_a_long_request_is_lent_in_as_many_calls_as_that_of_a_short_one() -> None:
    def next_page(ranks: HostRanksInTurn, pages: int) -> int:
        tokens = np.arange((pages + 1) * PAGE_TOKENS, dtype=np.int32)
        lent = np.arange(pages + 1, dtype=np.int32)
        return calls(lambda: ranks.caches[0].back_up("r", tokens, lent))

    assert next_page(lending(16), 16) == next_page(lending(256), 256)


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_the_last_page_of_a_long_request_is_inserted_in_as_many_calls(policy: WritePolicy) -> None:
    def next_page(pages: int) -> int:
        ranks = RanksInTurn(
            1, device_pages=2 * pages, host_pages=2 * pages, store=False, write_policy=policy
        )
        decode(ranks, pages)
        cache, tokens = ranks.caches[0], prompt(pages + 1)
        cache.extend("r", len(tokens))
        return calls(lambda: cache.insert("r", tokens, final=False))

    assert next_page(16) == next_page(64)


@pytest.mark.parametrize("count", ["begins", "ends"])
def test_a_miscount_of_what_divides_a_run_is_found(count: str) -> None:
    """`check()` finds a node with a wrong lock count, which would split or merge nodes wrongly."""
    ranks = RanksInTurn(1, host_pages=0, store=False)
    decode(ranks, 2)
    (node,) = ranks.caches[0].inspection.prefixes.tree.nodes()

    setattr(node, count, getattr(node, count) + 1)

    with pytest.raises(InvariantViolation, match=f"has a wrong count `{count}`"):
        ranks.check()
