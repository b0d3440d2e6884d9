"""SGLang's token slots as Lockstep's pages: how slots are numbered, reserved and freed."""

from lockstep.integrations.sglang.pools.slots import WINDOW_POOL, AttentionSlots, WindowSlots
from lockstep.ranks.protocol.orders import KV_POOL
from lockstep.ranks.replica.operations.lent import NO_PAGE
from tests.kit.sglang.slot_allocators import SlotAllocator, WindowedAllocator

PAGE = 4


def no_room(tokens: int, window_tokens: int, states: int) -> None:
    """Evict nothing, so a reservation without enough free slots fails."""


def windowed(full_pages: int = 8, window_pages: int = 8) -> tuple[WindowedAllocator, WindowSlots]:
    allocator = WindowedAllocator(full_pages, window_pages, PAGE)
    return allocator, WindowSlots(allocator, PAGE)


def free_pages(allocator: WindowedAllocator) -> tuple[int, int]:
    return (
        len(allocator.full_attn_allocator.free_pages),
        len(allocator.swa_attn_allocator.free_pages),
    )


def test_attention_takes_slots_for_all_tokens_and_gives_them_back() -> None:
    allocator = SlotAllocator(3, PAGE)
    slots = AttentionSlots(allocator, PAGE)

    reserved = slots.reserve(2 * PAGE, 0, no_room)

    assert reserved is not None
    assert reserved.window is None
    assert reserved.pages[KV_POOL].tolist() == [1, 2]
    assert slots.reserve(2 * PAGE, 0, no_room) is None
    slots.give_back(reserved)
    assert allocator.free_pages == [1, 2, 3]


def test_attention_has_what_is_short_evicted() -> None:
    allocator = SlotAllocator(3, PAGE)
    slots = AttentionSlots(allocator, PAGE)
    held = allocator.alloc(2 * PAGE)
    assert held is not None
    requested: list[tuple[int, int]] = []

    def make_room(tokens: int, window_tokens: int, states: int) -> None:
        requested.append((tokens, window_tokens))
        allocator.free(held)

    reserved = slots.reserve(2 * PAGE, 0, make_room)

    assert requested == [(PAGE, 0)]
    assert reserved is not None


def test_a_window_that_a_request_has_left_has_no_page() -> None:
    allocator, slots = windowed()
    allocator.swa_attn_allocator.alloc(PAGE)
    prefix = allocator.give(3 * PAGE)
    allocator.free_windows(prefix[: 2 * PAGE])

    found = slots.pages_of(prefix)

    assert found[KV_POOL].tolist() == [1, 2, 3]
    assert found[WINDOW_POOL].tolist() == [NO_PAGE, NO_PAGE, 4]


def test_only_the_last_tokens_of_a_load_take_windows_and_all_are_given_back() -> None:
    allocator, slots = windowed()

    reserved = slots.reserve(5 * PAGE, 2 * PAGE, no_room)

    assert reserved is not None
    assert reserved.pages[KV_POOL].tolist() == [1, 2, 3, 4, 5]
    assert reserved.pages[WINDOW_POOL].tolist() == [NO_PAGE, NO_PAGE, NO_PAGE, 1, 2]
    assert free_pages(allocator) == (3, 6)
    slots.give_back(reserved)
    assert free_pages(allocator) == (8, 8)
    assert not allocator.full_to_swa_index_mapping.any()


def test_of_each_pool_what_is_short_is_evicted() -> None:
    allocator, slots = windowed(full_pages=4, window_pages=4)
    prefix = allocator.give(3 * PAGE)
    allocator.free_windows(prefix[:PAGE])
    requested: list[tuple[int, int]] = []

    def make_room(tokens: int, window_tokens: int, states: int) -> None:
        requested.append((tokens, window_tokens))
        allocator.free_windows(prefix[PAGE:])
        allocator.full_attn_allocator.free(prefix)

    reserved = slots.reserve(4 * PAGE, 3 * PAGE, make_room)

    assert requested == [(3 * PAGE, PAGE)]
    assert reserved is not None


def test_a_load_that_one_pool_has_no_room_for_takes_nothing_of_the_other() -> None:
    allocator, slots = windowed(full_pages=8, window_pages=1)

    assert slots.reserve(4 * PAGE, 2 * PAGE, no_room) is None
    assert free_pages(allocator) == (8, 1)

    allocator, slots = windowed(full_pages=1, window_pages=8)

    assert slots.reserve(4 * PAGE, 2 * PAGE, no_room) is None
    assert free_pages(allocator) == (1, 8)


def test_a_window_is_beside_its_token_only_once_it_is_loaded() -> None:
    _, slots = windowed()
    reserved = slots.reserve(3 * PAGE, PAGE, no_room)
    assert reserved is not None

    before = slots.pages_of(reserved.slots)
    slots.hand_over(reserved)
    after = slots.pages_of(reserved.slots)

    assert before[WINDOW_POOL].tolist() == [NO_PAGE] * 3
    assert after[WINDOW_POOL].tolist() == reserved.pages[WINDOW_POOL].tolist()
    assert after[KV_POOL].tolist() == reserved.pages[KV_POOL].tolist()
