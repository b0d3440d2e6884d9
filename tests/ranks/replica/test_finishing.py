"""Under write-back, device pages over a quota and pinned ones are kept until the host has a copy."""

from collections.abc import Sequence

import pytest

from lockstep.coordinator.ballot import TransferEnded
from lockstep.ranks.protocol.answers import Admission
from lockstep.ranks.protocol.config import ANY_NAMESPACE, Bounds, NamespaceLimit, WritePolicy
from lockstep.ranks.protocol.orders import CopyToHost
from lockstep.ranks.replica.tree.node import DEVICE, HOST
from tests.kit.ranks.in_turn import PAGE_TOKENS, RanksInTurn

PROMPTS = 8
QUOTA = 2 * PROMPTS


def prompt(first: int, pages: int = 2) -> list[int]:
    return [first] * (pages * PAGE_TOKENS)


def publish(ranks: RanksInTurn, name: str, tokens: Sequence[int], cached: int = 0) -> None:
    admission = ranks.every(lambda cache: cache.load_back(name, tokens, reserve_tokens=len(tokens)))
    assert isinstance(admission, Admission)
    assert admission.device_tokens == cached
    ranks.every(lambda cache: cache.insert(name, tokens))
    ranks.every(lambda cache: cache.release(name))


def at_its_quota(host_pages: int = 64, bounds: Bounds | None = None) -> RanksInTurn:
    ranks = RanksInTurn(
        2,
        store=False,
        host_pages=host_pages,
        bounds=bounds,
        write_policy=WritePolicy.WRITE_BACK,
        limits=(NamespaceLimit(namespace=ANY_NAMESPACE, device_pages=QUOTA),),
    )
    for first in range(PROMPTS):
        publish(ranks, f"r{first}", prompt(first))
    ranks.step()
    return ranks


def kept_pages(ranks: RanksInTurn, tier: int) -> int:
    return ranks.every(lambda cache: cache.inspection.prefixes.allocator.tree_pages[tier][0])


def copied_pages(ranks: RanksInTurn) -> int:
    """Return the number of device pages in copy orders that no executor has carried out."""
    orders = ranks.executors[0].given(CopyToHost)
    return sum(len(transfer.sources) for order in orders for transfer in order.transfers)


def on_device(ranks: RanksInTurn, tokens: Sequence[int]) -> int:
    found = ranks.every(lambda cache: cache.match(tokens))
    return found.device_tokens // PAGE_TOKENS


def fail_copies(ranks: RanksInTurn) -> None:
    for executor in ranks.executors:
        executor.reports += [
            TransferEnded(order.operation, ok=False) for order in executor.take(CopyToHost)
        ]


@pytest.mark.parametrize(("surplus", "copied"), [(1, 2), (2, 2), (3, 4)])
def test_no_more_is_saved_than_has_to_leave_for_a_quota(surplus: int, copied: int) -> None:
    """A run over its namespace's quota is copied and split, but only the surplus pages are evicted."""
    ranks = at_its_quota()

    publish(ranks, "more", prompt(PROMPTS, pages=surplus))
    ranks.step()
    ranks.step()
    assert copied_pages(ranks) == copied

    ranks.settle()
    assert kept_pages(ranks, DEVICE) == QUOTA
    assert kept_pages(ranks, HOST) == copied
    assert ranks.every(lambda cache: cache.inspection.prefixes.tree.node_count) <= PROMPTS + 2


def test_what_could_not_be_saved_leaves_for_the_quota_and_nothing_else_does() -> None:
    ranks = at_its_quota()
    publish(ranks, "more", prompt(PROMPTS, pages=1))
    ranks.step()

    fail_copies(ranks)
    ranks.settle()

    assert kept_pages(ranks, DEVICE) == QUOTA
    assert kept_pages(ranks, HOST) == 0
    assert on_device(ranks, prompt(0)) == 1


def test_what_is_used_while_it_is_saved_stays_and_the_next_leaves_for_the_quota() -> None:
    ranks = at_its_quota()
    publish(ranks, "more", prompt(PROMPTS, pages=1))
    ranks.step()

    publish(ranks, "again", prompt(0), cached=2 * PAGE_TOKENS)
    ranks.settle()

    assert kept_pages(ranks, DEVICE) == QUOTA
    assert [on_device(ranks, prompt(first)) for first in range(3)] == [2, 1, 2]


def test_what_is_pinned_while_it_is_saved_in_vain_stays_and_the_next_leaves_for_the_quota() -> None:
    ranks = at_its_quota()
    publish(ranks, "more", prompt(PROMPTS, pages=1))
    ranks.step()

    ranks.every(lambda cache: cache.pin("kept", prompt(0), ttl_s=60.0))
    fail_copies(ranks)
    ranks.settle()

    assert kept_pages(ranks, DEVICE) == QUOTA
    assert [on_device(ranks, prompt(first)) for first in range(3)] == [2, 1, 2]


def test_of_what_host_memory_has_no_room_to_save_whole_no_other_leaves_in_its_place() -> None:
    ranks = at_its_quota(host_pages=1)

    publish(ranks, "more", prompt(PROMPTS, pages=2))
    ranks.step()
    ranks.settle()

    assert kept_pages(ranks, DEVICE) == QUOTA
    assert [on_device(ranks, prompt(first)) for first in range(3)] == [0, 2, 2]


def test_what_is_cut_while_it_is_saved_leaves_whole_and_nothing_else_does() -> None:
    ranks = at_its_quota(bounds=Bounds(pinned_pages=0))
    publish(ranks, "more", prompt(PROMPTS, pages=2))
    ranks.step()

    cut = [*prompt(0, pages=1), *prompt(99, pages=1)]
    assert ranks.every(lambda cache: cache.pin("no room", cut, ttl_s=60.0)) == 0
    ranks.settle()

    assert kept_pages(ranks, DEVICE) == QUOTA
    assert [on_device(ranks, prompt(first)) for first in range(3)] == [0, 2, 2]


def test_a_pin_whose_copy_failed_lets_go_of_the_device_once_another_copy_is_there() -> None:
    ranks = RanksInTurn(2, store=False, write_policy=WritePolicy.WRITE_BACK)
    allocator = ranks.caches[0].inspection.prefixes.allocator
    publish(ranks, "r", prompt(0))
    ranks.every(lambda cache: cache.pin("failed", prompt(0), ttl_s=60.0))
    fail_copies(ranks)
    ranks.settle()
    assert allocator.available(DEVICE, 0) == 62

    ranks.every(lambda cache: cache.pin("copied", prompt(0), ttl_s=60.0))
    ranks.settle()

    assert allocator.available(DEVICE, 0) == 64
