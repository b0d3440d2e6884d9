"""Slots of recurrent states: reserved, moved and freed together with the token slots they cover."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.integrations.sglang.pools.state_slots import STATE_POOL, StateSlots
from lockstep.ranks.protocol.orders import KV_POOL
from tests.kit.sglang.sent import Row, Sent
from tests.kit.sglang.slot_allocators import SlotAllocator

PAGE = 4
TRACKED = torch.tensor([21, 22])


@dataclass
class Rows:
    """Stand-in for SGLang's pool of running requests, with the slots of their states."""

    mamba_allocator: SlotAllocator = field(default_factory=lambda: SlotAllocator(2, 1))
    enable_mamba_extra_buffer: bool = False
    mamba_ping_pong_track_buffer_size: int = 2

    def get_mamba_ping_pong_other_idx(self, mamba_next_track_idx: int) -> int:
        return 1 - mamba_next_track_idx


def stateful(rows: Rows, pages: int = 8) -> tuple[SlotAllocator, StateSlots]:
    allocator = SlotAllocator(pages, PAGE)
    return allocator, StateSlots(allocator, rows, PAGE)


def no_room(tokens: int, window_tokens: int, states: int) -> None:
    """Evict nothing, so that a reservation fails unless enough slots are free."""


def tracked(**kv: Any) -> tuple[int, int | None]:
    """Return the number of tokens that a request's tracked state covers, and the state's slot."""
    row = Row(mamba_ping_pong_track_buffer=TRACKED, mamba_pool_idx=torch.tensor(9), **kv)
    count, slot = stateful(Rows(enable_mamba_extra_buffer=True))[1].computed(Sent(kv=row))
    return count, None if slot is None else int(slot)


def test_a_prefix_lies_in_its_pages_and_in_the_slot_of_its_state() -> None:
    _, slots = stateful(Rows())

    found = slots.pages_of(torch.arange(4, 12), torch.tensor([5]))

    assert {name: pages.tolist() for name, pages in found.items()} == {
        KV_POOL: [1, 2],
        STATE_POOL: [5],
    }
    assert {pages.dtype for pages in found.values()} == {np.dtype(np.int32)}
    assert slots.pages_of(torch.arange(4, 12)).keys() == {KV_POOL}


def test_a_load_takes_one_state_and_gives_it_back_with_its_tokens_or_alone() -> None:
    rows = Rows()
    allocator, slots = stateful(rows)

    reserved = slots.reserve(3 * PAGE, 0, no_room)

    assert reserved is not None
    assert reserved.pages[STATE_POOL].tolist() == [1]
    assert rows.mamba_allocator.free_pages == [2]
    slots.give_back(reserved)
    assert rows.mamba_allocator.free_pages == [1, 2]
    assert allocator.free_pages == [*range(1, 9)]

    # The tree already has a state for these tokens. It takes over only the loaded token slots, and the
    # loaded state's slot is freed.
    reserved = slots.reserve(3 * PAGE, 0, no_room)
    assert reserved is not None
    slots.free_state(reserved)
    assert rows.mamba_allocator.free_pages == [1, 2]
    assert len(allocator.free_pages) == 5


def test_a_state_is_evicted_where_none_is_free() -> None:
    rows = Rows()
    _, slots = stateful(rows)
    held = rows.mamba_allocator.alloc(2)
    assert held is not None
    requested: list[tuple[int, int, int]] = []

    def make_room(tokens: int, window_tokens: int, states: int) -> None:
        requested.append((tokens, window_tokens, states))
        rows.mamba_allocator.free(held)

    assert slots.reserve(PAGE, 0, make_room) is not None
    assert requested == [(0, 0, 1)]


def test_a_load_that_one_pool_has_no_room_for_takes_nothing_of_the_other() -> None:
    rows = Rows()
    allocator, slots = stateful(rows, pages=1)

    assert slots.reserve(2 * PAGE, 0, no_room) is None
    assert rows.mamba_allocator.free_pages == [1, 2]

    rows.mamba_allocator.alloc(2)

    assert slots.reserve(PAGE, 0, no_room) is None
    assert allocator.free_pages == [1]


def test_a_request_s_own_state_stands_for_all_that_it_has_computed() -> None:
    row = Row(kv_committed_len=7, mamba_pool_idx=torch.tensor(9))

    count, slot = stateful(Rows())[1].computed(Sent(kv=row))

    assert (count, slot) == (7, torch.tensor(9))


@pytest.mark.parametrize(
    ("last", "before", "found"),
    [
        (8, 4, (8, 22)),
        # The last state covers a token that is computed but not committed, and may be discarded.
        (12, 8, (8, 21)),
        (12, 4, (4, 21)),
        # No state is tracked, or the state ends inside a page, so that no page key can name the state.
        (None, None, (0, None)),
        (12, None, (0, None)),
        (16, 12, (0, None)),
        (6, 4, (0, None)),
    ],
)
def test_where_states_are_tracked_the_last_one_counts_that_a_key_can_name(
    last: int | None, before: int | None, found: tuple[int, int | None]
) -> None:
    kv = {"mamba_last_track_seqlen": last, "mamba_prev_track_seqlen": before}

    assert tracked(kv_committed_len=11, mamba_last_track_idx=1, **kv) == found
