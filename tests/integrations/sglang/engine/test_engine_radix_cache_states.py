"""What SGLang promises of its radix cache holds with Lockstep below it: of recurrent states.

The claims are those of SGLang's unit tests of its unified radix cache with a Mamba component, told anew
as in `test_engine_radix_cache.py`. How many states a path may have is from their neighbour
`test_mamba_path_state_cap.py`. What requests leave is in
`test_engine_radix_cache_states_of_requests.py`, and what is on the host in
`test_engine_restored_states.py`. These do not apply:

- HiCache's own host tree, buffer mode and storage: there is none, as said there.
- States beside windows, as int8, tracked only at times, replayed, or of pages that decode context
  parallelism has widened: refused when the engine starts.
- The insides: who is handed which action, cursors, and asserts on what no call brings about.
"""

from collections.abc import Generator

import pytest

from tests.kit.sglang.tree import here
from tests.kit.sglang.tree.stateful_rig import StatefulRig, one_stateful, rig

__all__ = ["rig"]

pytestmark = here.MARKS


@pytest.fixture
def paged() -> Generator[StatefulRig]:
    """One rank, with pages of several tokens."""
    with one_stateful(tracked=True) as rig:
        yield rig


def test_a_match_ends_where_a_state_is_kept(rig: StatefulRig) -> None:
    short, long = rig.chain(1, 2, 4)

    assert rig.matched([*long, *rig.pages(900, 1)]) == len(long)
    assert rig.matched(long[: -rig.page_tokens]) == len(short)
    assert rig.matched(short[: rig.page_tokens]) == 0
    assert rig.wrong(short) == rig.wrong(long) == []


def test_branches_share_their_tokens_and_have_no_state_where_they_part(rig: StatefulRig) -> None:
    shared, one, other = rig.pages(1, 2), rig.pages(100, 2), rig.pages(200, 2)
    rig.insert(shared + one)

    before = rig.insert(shared + other)

    match = rig.match(shared + rig.pages(300, 1))
    assert before == match.full_kv_hit_length == len(shared)
    assert match.device_prefix_len == 0
    assert rig.wrong(shared + one) == rig.wrong(shared + other) == []
    assert rig.states() == (rig.slots - 2, 2, 0)


def test_a_match_names_where_a_state_would_let_it_end_until_there_is_one(rig: StatefulRig) -> None:
    tokens = list(range(1, 17))
    rig.insert(tokens)
    asked = [*tokens[:11], *range(900, 909)]

    named = rig.match(asked).mamba_branching_seqlen
    rig.insert(tokens[:8])
    then = rig.match(asked)

    assert (named, then.mamba_branching_seqlen, then.device_prefix_len) == (8, None, 8)


def test_a_match_ends_with_a_whole_page(paged: StatefulRig) -> None:
    first, tokens = paged.chain(1, 1, 2)

    assert paged.matched([*tokens, 9000, 9001, 9002]) == len(tokens)
    assert paged.matched(tokens[:-1]) == len(first)
    assert paged.matched([*tokens[:6], 9000, 9001]) == len(first)
    assert paged.matched([9000, *tokens[1:]]) == paged.matched(tokens[:3]) == 0


def test_extra_key_and_salt_keep_states_apart(rig: StatefulRig) -> None:
    tokens = rig.pages(1, 2)

    rig.insert(tokens, extra_key="bc", cache_salt="a")
    rig.insert(tokens, extra_key="c", cache_salt="ab")

    assert rig.states() == (rig.slots - 2, 2, 0)
    assert rig.matched(tokens, extra_key="bc", cache_salt="a") == len(tokens)
    assert rig.matched(tokens, extra_key="c", cache_salt="ab") == len(tokens)
    assert rig.matched(tokens) == 0


def test_a_state_that_the_tree_has_already_is_given_back(rig: StatefulRig) -> None:
    tokens = rig.chain(1, 1, 2, 2)[-1]

    assert rig.states() == (rig.slots - 2, 2, 0)
    assert rig.sizes() == (rig.size - len(tokens), len(tokens), 0)


def test_a_state_goes_without_its_tokens_where_others_come_after_them(rig: StatefulRig) -> None:
    short, long = rig.chain(1, 2, 4)

    evicted = rig.evict_states(1)

    assert (evicted, rig.cache.evictable_size()) == (1, len(long))
    assert rig.match(short).full_kv_hit_length == len(short)
    assert rig.found(short, long) == [False, True]


def test_states_go_until_it_is_enough(rig: StatefulRig) -> None:
    sequences = rig.chain(1, 2, 4, 6)

    evicted = rig.evict_states(2)

    assert (evicted, rig.cache.evictable_size()) == (2, len(sequences[-1]))
    assert rig.found(*sequences) == [False, False, True]


def test_nothing_is_found_without_states_and_its_tokens_are_evicted(rig: StatefulRig) -> None:
    short, long = rig.chain(1, 2, 4)

    evicted = rig.evict_states(rig.slots)

    assert (evicted, rig.states()) == (2, (rig.slots, 0, 0))
    assert rig.matched(short) == rig.matched(long) == 0
    rig.evict(rig.size)
    assert rig.sizes() == (rig.size, 0, 0)


def test_tokens_that_are_evicted_take_their_state_with_them(rig: StatefulRig) -> None:
    short, long = rig.chain(1, 2, 4)

    evicted = rig.evict(len(long) - len(short))

    assert evicted == len(long) - len(short)
    assert rig.states() == (rig.slots - 1, 1, 0)
    assert rig.found(short, long) == [True, False]


def test_an_empty_tree_has_no_state_to_evict(rig: StatefulRig) -> None:
    assert (rig.evict_states(5), rig.evict(10)) == (0, 0)
    assert rig.states() == (rig.slots, 0, 0)


def test_a_tree_that_was_emptied_takes_states_again(rig: StatefulRig) -> None:
    rig.chain(1, 2, 4, 6)
    rig.evict(2 * rig.size)

    [tokens] = rig.chain(500, 2)

    assert rig.wrong(tokens) == []
    assert rig.states() == (rig.slots - 1, 1, 0)


def test_the_state_that_was_used_last_is_evicted_last(rig: StatefulRig) -> None:
    [old], [new] = rig.chain(1, 2), rig.chain(500, 2)
    rig.matched(old)

    rig.evict_states(1)

    assert rig.found(old, new) == [True, False]


def test_a_match_uses_the_state_where_it_ends_and_none_before_it(rig: StatefulRig) -> None:
    one, other = rig.chain(1, 2, 4), rig.chain(500, 2, 4)
    rig.matched(other[-1])
    rig.matched(one[-1])

    rig.evict_states(1)

    assert rig.found(*one, *other) == [False, True, True, True]


def test_a_match_that_ends_before_a_state_does_not_use_it(rig: StatefulRig) -> None:
    [cold], [hot] = rig.chain(1, 2), rig.chain(500, 2)
    rig.matched(cold[: rig.page_tokens])

    rig.evict_states(1)

    assert rig.found(cold, hot) == [False, True]


def test_a_lock_keeps_the_state_where_it_ends_and_none_before_it(rig: StatefulRig) -> None:
    short, long = rig.chain(1, 2, 4)
    lock = rig.lock(rig.match(long).last_device_node)

    evicted = rig.evict_states(rig.slots), rig.evict(rig.size)

    assert (evicted, rig.states()) == ((1, 0), (rig.slots - 1, 0, 1))
    assert rig.found(short, long) == [False, True]
    rig.cache.unlock(lock)
    assert (rig.evict(rig.size), rig.states()) == (len(long), (rig.slots, 0, 0))


def test_two_locks_keep_a_state_until_both_are_gone(rig: StatefulRig) -> None:
    [tokens] = rig.chain(1, 2)
    locks = [rig.lock(rig.match(tokens).last_device_node) for _ in range(2)]

    rig.cache.unlock(locks[0])
    kept = rig.evict_states(1)
    rig.cache.unlock(locks[1])

    assert (kept, rig.evict_states(1)) == (0, 1)


def test_a_lock_of_tokens_alone_lets_their_state_go(rig: StatefulRig) -> None:
    [tokens] = rig.chain(1, 2)
    lock = rig.lock(rig.match(tokens).last_device_node, state=False)

    evicted = rig.evict_states(1), rig.evict(rig.size)

    assert evicted == (1, 0)
    assert rig.sizes() == (rig.size - len(tokens), 0, len(tokens))
    rig.cache.unlock(lock)
    assert rig.evict(rig.size) == len(tokens)


def test_who_locks_tokens_alone_does_not_unlock_another_s_state(rig: StatefulRig) -> None:
    [tokens] = rig.chain(1, 2)
    node = rig.match(tokens).last_device_node
    lock, alone = rig.lock(node), rig.lock(node, state=False)

    rig.cache.unlock(alone)

    assert (rig.evict_states(1), rig.states()) == (0, (rig.slots - 1, 0, 1))
    rig.cache.unlock(lock)


def test_a_state_that_comes_to_locked_tokens_is_locked_with_them(rig: StatefulRig) -> None:
    short, long = rig.chain(1, 2, 4)
    node = rig.match(short).last_device_node
    rig.matched(long)
    rig.evict_states(1)
    before = rig.lock(node)

    rig.insert(short)
    after = rig.lock(node)
    rig.cache.unlock(before)

    assert (rig.evict_states(rig.slots), rig.states()) == (1, (rig.slots - 1, 0, 1))
    assert rig.wrong(short) == []
    rig.cache.unlock(after)
    assert rig.states() == (rig.slots - 1, 1, 0)


def test_locked_tokens_without_a_state_outlive_those_that_come_after_them(
    rig: StatefulRig,
) -> None:
    short, long = rig.chain(1, 2, 4)
    lock = rig.lock(rig.match(short).last_device_node, state=False)
    rig.matched(long)
    rig.evict_states(1)

    evicted = rig.evict(rig.size)

    assert evicted == len(long) - len(short)
    assert rig.sizes() == (rig.size - len(short), 0, len(short))
    rig.cache.unlock(lock)
    assert rig.evict(rig.size) == len(short)


def test_what_was_evicted_is_what_the_tree_has_less(rig: StatefulRig) -> None:
    sequences = [rig.chain(100 * each, 2)[0] for each in range(4)]

    evicted = rig.evict_states(3)

    assert evicted == 3
    assert rig.states() == (rig.slots - 1, 1, 0)
    assert rig.found(*sequences) == [False, False, False, True]


def test_a_reset_leaves_a_tree_without_states_that_serves_on(rig: StatefulRig) -> None:
    [tokens] = rig.chain(1, 2)

    rig.cache.reset()
    rig.allocator.clear()
    rig.rows.clear()

    assert (rig.matched(tokens), rig.states()) == (0, (rig.slots, 0, 0))
    rig.insert(tokens)
    assert rig.wrong(tokens) == []


def test_how_many_states_there_are_is_told_as_sglang_tells_it(rig: StatefulRig) -> None:
    rig.chain(1, 2, 4)

    told = rig.cache.available_and_evictable_str()

    assert f"mamba: {rig.slots} (available_size={rig.slots - 2} " in told.lower()
