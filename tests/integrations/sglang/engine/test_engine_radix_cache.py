"""What SGLang promises of its radix cache holds with Lockstep below it: on the device.

The claims are those of SGLang's unit tests of its unified radix cache that apply to ours
(`test_unified_radix_cache_unittest.py`, commit 0014205ebcfb, near the release 0.5.23), told anew: over
its own allocator, pools and tree, with our class in the place of its own. What is on the host comes in
`test_engine_restored_bytes.py`, and what trees with recurrent states promise in
`test_engine_radix_cache_states.py`. These do not apply:

- HiCache's own host tree: tombstones, duplicates, host locks, demotion, `write_back`, its queues and
  acknowledgements. There is none; what Lockstep keeps on the host has tests of its own.
- Buffer mode, the external linker, HiCache's L3 with its retries and markers: as above.
- Sessions, speculation (bigram keys), pipeline and data parallelism: refused when the engine starts.
- Windows: with models that have them, in `test_engine_*.py`.
- Events of the KV cache: they tell of the device alone, which is SGLang's, unchanged.
- The insides of its tree core (resumable walks, drains, node hashes): not ours, and not changed.
"""

from collections.abc import Generator

import pytest

from tests.kit.sglang.tree import here
from tests.kit.sglang.tree.rig import Rig
from tests.kit.sglang.tree.rigs import Rigs

pytestmark = here.MARKS


@pytest.fixture(params=["a token to a page", "attention"])
def rig(request: pytest.FixtureRequest) -> Generator[Rig]:
    """One rank, with small pages."""
    with Rigs(kind=request.param) as rigs:
        [rig] = rigs.ranks
        yield rig
        assert rig.lost() == 0


@pytest.fixture
def paged() -> Generator[Rig]:
    """One rank, with pages of several tokens."""
    with Rigs() as rigs:
        [rig] = rigs.ranks
        yield rig
        assert rig.lost() == 0


def pages(rig: Rig, first: int, count: int) -> list[int]:
    """Tokens of so many whole pages, which begin with `first`."""
    return list(range(first, first + count * rig.page_tokens))


def test_a_match_is_the_longest_prefix_that_the_tree_has(rig: Rig) -> None:
    short, tail = pages(rig, 1, 2), pages(rig, 1000, 1)
    rig.insert(short)

    before = rig.insert(short + tail)

    assert before == len(short)
    assert rig.matched(short + tail) == len(short + tail)
    assert rig.matched(short + pages(rig, 2000, 1)) == len(short)
    assert rig.matched(pages(rig, 3000, 2)) == 0
    rig.cache.sanity_check()


def test_branches_share_what_comes_before_them(rig: Rig) -> None:
    shared, one, other = pages(rig, 1, 2), pages(rig, 100, 2), pages(rig, 200, 2)
    rig.insert(shared + one)

    before = rig.insert(shared + other)

    assert before == len(shared)
    assert rig.matched(shared + one) == rig.matched(shared + other) == len(shared + one)
    assert rig.matched(shared + pages(rig, 300, 1)) == len(shared)
    assert rig.wrong(shared + one) == rig.wrong(shared + other) == []
    rig.cache.sanity_check()


def test_slots_that_the_tree_has_already_are_given_back_once(rig: Rig) -> None:
    first, longer = pages(rig, 1, 1), pages(rig, 1, 2)
    rig.insert(first)

    rig.insert(longer)
    rig.insert(longer)

    assert rig.sizes() == (rig.size - len(longer), len(longer), 0)


def test_extra_key_and_salt_keep_the_same_tokens_apart(rig: Rig) -> None:
    tokens = pages(rig, 1, 2)

    added = [
        rig.insert(tokens, extra_key="bc", cache_salt="a"),
        rig.insert(tokens, extra_key="c", cache_salt="ab"),
    ]

    assert added == [0, 0]
    assert rig.matched(tokens, extra_key="bc", cache_salt="a") == len(tokens)
    assert rig.matched(tokens, extra_key="c", cache_salt="ab") == len(tokens)
    assert rig.matched(tokens) == rig.matched(tokens, extra_key="bc") == 0
    assert rig.matched(tokens, cache_salt="a") == 0


def test_what_is_locked_is_not_evicted_until_it_is_unlocked(rig: Rig) -> None:
    kept, other = pages(rig, 1, 2), pages(rig, 500, 2)
    rig.insert(kept)
    rig.insert(other)
    lock = rig.cache.lock(rig.match(kept).last_device_node)

    evicted = rig.evict(len(kept) + len(other))
    locked = rig.sizes()
    rig.cache.unlock(lock)

    assert evicted == len(other)
    assert rig.matched(kept) == len(kept)
    assert locked == (rig.size - len(kept), 0, len(kept))
    assert rig.evict(len(kept)) == len(kept)
    rig.cache.sanity_check()


def test_a_lock_keeps_all_that_comes_before_it(rig: Rig) -> None:
    shared, one, other = pages(rig, 1, 2), pages(rig, 100, 2), pages(rig, 200, 2)
    rig.insert(shared + one)
    rig.insert(shared + other)
    lock = rig.cache.lock(rig.match(shared + other).last_device_node)

    evicted = rig.evict(rig.size)

    assert evicted == len(one)
    assert rig.matched(shared + other) == len(shared + other)
    rig.cache.unlock(lock)


def test_two_locks_of_one_path_are_two(rig: Rig) -> None:
    tokens = pages(rig, 1, 2)
    rig.insert(tokens)
    locks = [rig.cache.lock(rig.match(tokens).last_device_node) for _ in range(2)]

    rig.cache.unlock(locks[0])

    assert rig.evict(rig.size) == 0
    rig.cache.unlock(locks[1])
    assert rig.evict(rig.size) == len(tokens)


def test_an_empty_tree_evicts_nothing(rig: Rig) -> None:
    assert rig.evict(10) == 0
    assert rig.sizes() == (rig.size, 0, 0)


def test_what_was_used_last_is_evicted_last(rig: Rig) -> None:
    old, new = pages(rig, 1, 2), pages(rig, 500, 2)
    rig.insert(old)
    rig.insert(new)
    rig.matched(old)

    rig.evict(len(new))

    assert rig.matched(old) == len(old)
    assert rig.matched(new) == 0


def test_a_policy_by_priority_keeps_what_matters_more() -> None:
    with Rigs(eviction_policy="priority") as rigs:
        [rig] = rigs.ranks
        high, low = pages(rig, 1, 2), pages(rig, 500, 2)
        rig.insert(high, priority=10)
        rig.insert(low)

        rig.evict(len(low))

        assert (rig.matched(high), rig.matched(low)) == (len(high), 0)


def test_what_was_evicted_is_what_the_tree_has_less(rig: Rig) -> None:
    sequences = [pages(rig, 100 * each, 2) for each in range(4)]
    for each in sequences:
        rig.insert(each)
    total = sum(map(len, sequences))

    half = rig.evict(total // 2)
    left = rig.sizes()
    rest = rig.evict(2 * total)

    assert half >= total // 2
    assert left == (rig.size - total + half, total - half, 0)
    assert half + rest == total
    assert rig.sizes() == (rig.size, 0, 0)
    rig.cache.sanity_check()


def test_a_chain_goes_from_its_end_and_the_tree_serves_on(rig: Rig) -> None:
    chain = pages(rig, 1, 6)
    for count in (2, 4, 6):
        rig.insert(chain[: count * rig.page_tokens])

    rig.evict(2 * rig.page_tokens)
    shorter = rig.matched(chain)
    rig.evict(rig.size)
    rig.insert(pages(rig, 500, 2))

    assert shorter == 4 * rig.page_tokens
    assert rig.matched(chain) == 0
    assert rig.matched(pages(rig, 500, 2)) == 2 * rig.page_tokens
    rig.cache.sanity_check()


def test_a_match_ends_with_a_whole_page(paged: Rig) -> None:
    tokens = pages(paged, 1, 2)
    paged.insert(tokens)

    assert paged.matched([*tokens, 9000, 9001, 9002]) == len(tokens)
    assert paged.matched(tokens[:-1]) == paged.page_tokens
    assert paged.matched(tokens[:3]) == 0
    assert paged.matched([*tokens[:6], 9000, 9001]) == paged.page_tokens
    assert paged.matched([9000, *tokens[1:]]) == 0
    paged.cache.sanity_check()


def test_a_request_that_ends_leaves_its_prompt_and_its_answer(rig: Rig) -> None:
    prompt, answer = pages(rig, 1, 3), pages(rig, 2000, 1)
    request = rig.admitted(rig.request(prompt))
    rig.extend(request)
    rig.generate(request, answer)

    rig.end(request)
    rig.settled()

    assert rig.matched(prompt + answer) == len(prompt + answer)
    assert rig.wrong(prompt + answer) == []
    assert rig.sizes() == (rig.size - len(prompt + answer), len(prompt + answer), 0)
    assert rig.evict(len(answer)) == len(answer)
    assert rig.matched(prompt + answer) == len(prompt)
    rig.cache.sanity_check()


def test_a_page_that_is_not_full_is_given_back(paged: Rig) -> None:
    request = paged.admitted(paged.request([*pages(paged, 1, 1), 8000, 8001]))
    paged.extend(request)

    paged.end(request)
    paged.settled()

    assert paged.sizes() == (paged.size - paged.page_tokens, paged.page_tokens, 0)


def test_a_request_that_is_not_to_be_kept_leaves_nothing(rig: Rig) -> None:
    tokens = pages(rig, 1, 2)
    request = rig.admitted(rig.request(tokens))
    rig.generate(request, pages(rig, 2000, 1))

    rig.end(request, checkpoint=False)

    assert rig.matched(tokens) == 0
    assert rig.sizes() == (rig.size, 0, 0)


def test_thoughts_are_not_found_again_on_the_device_or_on_the_host(rig: Rig) -> None:
    prompt, answer = pages(rig, 1, 3), pages(rig, 2000, 2)
    request = rig.admitted(rig.request([*prompt, *pages(rig, 900, 1)]))
    rig.extend(request)
    request.reasoning_tokens = 1
    rig.generate(request, answer)

    with here.of("sglang.srt.runtime_context", "get_serving")().override(strip_thinking_cache=True):
        rig.end(request)
    rig.settled()

    whole = [*prompt, *pages(rig, 900, 1), *answer]
    assert rig.matched(whole) == len(whole) - len(answer)
    rig.evict(rig.size)
    assert rig.serve([*whole, 1]) == len(whole) - len(answer)


def test_a_chunk_belongs_to_the_tree_as_soon_as_it_is_computed(rig: Rig) -> None:
    tokens = pages(rig, 1, 5)
    request = rig.admitted(rig.request(tokens))

    rig.extend(request, 2 * rig.page_tokens)
    first = request.kv.cache_protected_len, rig.matched(tokens), rig.evict(rig.size)
    rig.extend(request)

    assert first == (2 * rig.page_tokens, 2 * rig.page_tokens, 0)
    assert request.kv.cache_protected_len == len(tokens)
    assert rig.wrong(tokens) == []
    rig.end(request)


def test_two_requests_that_compute_the_same_end_in_the_same_slots(rig: Rig) -> None:
    tokens = pages(rig, 1, 3)
    requests = [rig.request([*tokens, last]) for last in (7, 8)]
    for each in requests:
        rig.admitted(each)
    for each in requests:
        rig.extend(each, len(tokens))

    rows = [rig.rows.req_to_token[each.kv.req_pool_idx][: len(tokens)] for each in requests]
    found = [row.tolist() for row in rows]
    for each in requests:
        rig.end(each)
    rig.settled()

    assert found[0] == found[1] == rig.slots_of(tokens).tolist()
    assert rig.sizes() == (rig.size - len(tokens), len(tokens), 0)


def test_a_running_request_keeps_its_prefix_when_everything_else_goes(rig: Rig) -> None:
    kept, other = pages(rig, 1, 3), pages(rig, 500, 3)
    rig.insert(other)
    request = rig.admitted(rig.request(kept))
    rig.extend(request)
    rig.settled()

    rig.evict(rig.size)

    assert rig.matched(kept) == len(kept)
    assert rig.sizes() == (rig.size - len(kept), 0, len(kept))
    rig.end(request)
    assert rig.sizes() == (rig.size - len(kept), len(kept), 0)


def test_a_reset_leaves_an_empty_tree_that_serves_on(rig: Rig) -> None:
    tokens = pages(rig, 1, 3)
    rig.insert(tokens)

    rig.cache.reset()
    rig.allocator.clear()

    assert rig.matched(tokens) == 0
    assert rig.sizes() == (rig.size, 0, 0)
    rig.insert(tokens)
    assert rig.matched(tokens) == len(tokens)
    rig.cache.sanity_check()


def test_sizes_are_told_as_sglang_tells_them(rig: Rig) -> None:
    rig.insert(pages(rig, 1, 2))

    told = rig.cache.available_and_evictable_str()

    assert f"Available full tokens: {rig.size} " in told
    assert f"full_evictable_size_={2 * rig.page_tokens})" in told
