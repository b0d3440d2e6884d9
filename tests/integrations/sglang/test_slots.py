"""Slots of SGLang's pools are taken and given back whole; those of windows lie beside the last ones."""

from collections.abc import Callable

import torch

from lockstep.integrations.sglang.contract import PagedAllocator
from lockstep.integrations.sglang.slots import WINDOW_POOL, AttentionSlots, Reserved, WindowSlots
from lockstep.ranks.orders import KV_POOL
from tests.kit.sglang.sent import Allocator

UNIT = 4


class TwoPools:
    """SGLang's allocator of a model with windows: which slot of a window stands beside which."""

    def __init__(self, tokens: int, window_tokens: int) -> None:
        self.full_attn_allocator: PagedAllocator = Allocator(tokens, first=UNIT)
        self.swa_attn_allocator: PagedAllocator = Allocator(window_tokens, first=UNIT)
        self.full_to_swa_index_mapping = torch.full((tokens + UNIT,), 99)

    def set_full_to_swa_mapping(
        self, full_indices: torch.Tensor, swa_indices: torch.Tensor
    ) -> None:
        self.full_to_swa_index_mapping[full_indices] = swa_indices

    def clear_full_to_swa_mapping(self, full_indices: torch.Tensor) -> None:
        self.full_to_swa_index_mapping[full_indices] = 0


def freeing(allocator: PagedAllocator, *slots: int) -> Callable[[int, int], object]:
    """Return what makes room by evicting such slots."""
    return lambda tokens, window_tokens: allocator.free(torch.tensor(slots))


def no_room(tokens: int, window_tokens: int) -> object:
    return None


def test_slots_of_a_load_are_its_pages() -> None:
    slots = AttentionSlots(Allocator(12, first=4), UNIT)

    reserved = slots.reserve(8, 0, no_room)

    assert reserved is not None
    assert reserved.slots.tolist() == list(range(4, 12))
    assert reserved.pages[KV_POOL].tolist() == [1, 2]
    slots.hand_over(reserved)


def test_room_is_made_for_what_is_short() -> None:
    allocator = Allocator(4)
    asked: list[tuple[int, int]] = []

    def make_room(tokens: int, window_tokens: int) -> None:
        asked.append((tokens, window_tokens))
        allocator.free(torch.arange(8, 12))

    reserved = AttentionSlots(allocator, UNIT).reserve(8, 0, make_room)

    assert reserved is not None
    assert asked == [(4, 0)]


def test_where_no_room_can_be_made_nothing_is_taken() -> None:
    allocator = Allocator(4)

    assert AttentionSlots(allocator, UNIT).reserve(8, 0, no_room) is None
    assert allocator.available_size() == 4


def test_what_a_load_did_not_fill_is_given_back() -> None:
    allocator = Allocator(8)
    slots = AttentionSlots(allocator, UNIT)
    reserved = slots.reserve(8, 0, no_room)
    assert reserved is not None

    slots.give_back(reserved)

    assert allocator.available_size() == 8


def test_only_the_last_tokens_of_a_load_have_windows() -> None:
    pools = TwoPools(16, 8)
    slots = WindowSlots(pools, UNIT)

    reserved = slots.reserve(12, 8, no_room)
    assert reserved is not None
    slots.hand_over(reserved)

    assert reserved.pages[KV_POOL].tolist() == [1, 2, 3]
    assert reserved.pages[WINDOW_POOL].tolist() == [-1, 1, 2]
    found = slots.pages_of(reserved.slots)
    assert found[KV_POOL].tolist() == [1, 2, 3]
    assert found[WINDOW_POOL].tolist() == [-1, 1, 2]


def test_a_window_for_which_there_is_no_room_takes_nothing_of_full_attention_either() -> None:
    pools = TwoPools(16, 4)

    assert WindowSlots(pools, UNIT).reserve(12, 8, no_room) is None
    assert pools.full_attn_allocator.available_size() == 16
    assert pools.swa_attn_allocator.available_size() == 4


def test_room_is_made_in_each_of_the_two_pools() -> None:
    pools = TwoPools(16, 4)
    make_room = freeing(pools.swa_attn_allocator, 20, 21, 22, 23)

    assert WindowSlots(pools, UNIT).reserve(12, 8, make_room) is not None


def test_both_pools_get_back_what_a_load_did_not_fill() -> None:
    pools = TwoPools(16, 8)
    slots = WindowSlots(pools, UNIT)
    for window_tokens in (0, 8):
        reserved = slots.reserve(12, window_tokens, no_room)
        assert_given_back(slots, pools, reserved)


def assert_given_back(slots: WindowSlots, pools: TwoPools, reserved: Reserved | None) -> None:
    assert reserved is not None
    slots.give_back(reserved)
    assert pools.full_attn_allocator.available_size() == 16
    assert pools.swa_attn_allocator.available_size() == 8
