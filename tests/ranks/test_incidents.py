"""Regression tests for the incidents that the project starts from.

They cover conditions that a scenario file in `tests/scenarios` cannot express.
"""

from typing import Any

import pytest
from msgspec import structs

from lockstep.ranks.protocol.orders import (
    CopyToDevice,
)
from lockstep.ranks.replica.operations.requests import LoadState
from lockstep.ranks.replica.tree.node import DEVICE, HOST
from tests.kit.ranks.in_turn import RanksInTurn, prompt_of, window_of

WINDOW_PAGES = 2


def windowed_ranks(*, window_host_pages: int = 12) -> RanksInTurn:
    window = window_of(WINDOW_PAGES, device_pages=12, host_pages=window_host_pages)
    return RanksInTurn(device_pages=12, components=(window,))


STEM = prompt_of(1, 4)
MIDDLE = STEM + prompt_of(2, 4)
END = MIDDLE + prompt_of(3, 4)


def test_an_order_cannot_change_what_a_node_owns() -> None:
    """Incident A: moving a transfer's indices to the GPU changed those that a tree node still held.

    The next eviction then freed GPU indices in the host's pool, and the worker crashed. Now the page
    numbers of an order are immutable and not shared with the tree.
    """
    ranks = windowed_ranks()
    ranks.compute("a", END)
    ranks.compute("other", prompt_of(4, 12))
    ranks.every(lambda cache: cache.load_back("b", END))
    node = ranks.caches[0].inspection.requests.known("b").node
    assert node is not None
    (order,) = ranks.executors[0].given(CopyToDevice)
    window: Any = next(each for each in order.transfers if each.pool == "window")

    with pytest.raises(TypeError):
        window.sources[0] += 1000
    with pytest.raises(AttributeError):
        window.sources = [page + 1000 for page in window.sources]

    windows = [list(each.pages(HOST, 1) or ()) for each in node.path_down()]
    assert list(window.sources) in windows
    assert {*map(type, structs.astuple(window))} == {str, tuple, bool}


def test_a_load_back_that_is_under_way_locks_what_it_fills_and_a_split_changes_nothing() -> None:
    """Incident B: the lock of a load back covers the pages that it will fill, even after a split."""
    ranks = windowed_ranks()
    ranks.compute("a", END)
    ranks.compute("other", prompt_of(4, 12))

    ranks.every(lambda cache: cache.load_back("b", END))
    # A prompt that branches off inside the prefix being loaded splits its node.
    turned = END[:18] + prompt_of(6, 1)
    ranks.every(lambda cache: cache.prefetch("c", turned))
    ranks.settle()

    assert ranks.every(lambda cache: cache.load_state("b")) is LoadState.READY
    table = ranks.every(lambda cache: cache.page_table("b", "window").tolist())
    assert table[-WINDOW_PAGES:] != [-1] * WINDOW_PAGES
    ranks.every(lambda cache: cache.release("b"))
    ranks.every(lambda cache: cache.release("c"))
    assert ranks.available(DEVICE) == [12, 12]


def test_an_insert_on_the_host_refreshes_every_component_of_its_path() -> None:
    """Incident D, related bug: a host insert refreshed the recency of full-attention pages only."""
    # The host has window pages for only two of three prompts, so one prompt's pages are evicted.
    ranks = windowed_ranks(window_host_pages=2 * (WINDOW_PAGES + 2) + 2)
    other = prompt_of(7, 4)
    ranks.compute("stem", STEM)
    ranks.compute("other", other)
    ranks.every(lambda cache: cache.prefetch("late", MIDDLE))
    ranks.settle(lambda key: True)

    ranks.compute("more", prompt_of(8, 12))

    assert ranks.every(lambda cache: cache.match(STEM)).host_tokens == len(STEM)
    assert ranks.every(lambda cache: cache.match(other)).host_tokens == 0


def test_a_chunked_insert_says_that_it_is_one() -> None:
    """Incident D, related bug: digests differ if ranks disagree whether an insert is the last one."""
    ranks = windowed_ranks()
    ranks.every(lambda cache: cache.load_back("a", END, reserve_tokens=len(END)))

    ranks.caches[0].insert("a", MIDDLE, final=False)
    ranks.caches[1].insert("a", MIDDLE, final=True)

    one, other = (cache.inspection.digest for cache in ranks.caches)
    assert one != other
