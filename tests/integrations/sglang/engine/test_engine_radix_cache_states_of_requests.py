"""What SGLang promises of its radix cache holds with Lockstep below it: of states that requests leave.

See `test_engine_radix_cache_states.py`.
"""

from lockstep.ranks.orders import Direction
from tests.kit.sglang.tree import here
from tests.kit.sglang.tree.stateful_rig import StatefulRig, one_stateful, rig

__all__ = ["rig"]

pytestmark = here.MARKS


def test_a_chunk_leaves_its_state_to_the_tree_and_the_request_goes_on_in_another(
    rig: StatefulRig,
) -> None:
    tokens = rig.pages(1, 5)
    first = tokens[: 2 * rig.page_tokens]
    request = rig.admitted(rig.request(tokens))

    rig.extend(request, len(first))
    kept = request.kv.cache_protected_len, rig.matched(tokens), rig.evict_states(rig.slots)
    rig.extend(request)

    assert kept == (len(first), len(first), 0)
    assert rig.wrong(first) == rig.wrong(tokens) == rig.wrong_of(request) == []
    assert int(request.kv.mamba_pool_idx) not in (
        int(rig.state_of(first)),
        int(rig.state_of(tokens)),
    )
    rig.end(request)


def test_a_running_request_keeps_its_last_state_and_lets_those_before_it_go(
    rig: StatefulRig,
) -> None:
    tokens = rig.pages(1, 4)
    first = tokens[: 2 * rig.page_tokens]
    request = rig.admitted(rig.request(tokens))
    rig.extend(request, len(first))
    rig.extend(request)
    rig.settled()

    rig.evict_states(rig.slots)

    assert rig.found(first, tokens) == [False, True]
    assert rig.cache.mamba_protected_size() == 1
    rig.end(request)


def test_a_request_that_ends_leaves_the_states_of_its_prompt_and_its_answer(
    rig: StatefulRig,
) -> None:
    prompt, answer = rig.pages(1, 3), rig.pages(2000, 1)
    request = rig.admitted(rig.request(prompt))
    rig.extend(request)
    rig.generate(request, answer)

    rig.end(request)
    rig.settled()

    assert rig.wrong(prompt) == rig.wrong(prompt + answer) == []
    assert rig.states() == (rig.slots - 2, 2, 0)
    assert rig.evict(len(answer)) == len(answer)
    assert rig.found(prompt, prompt + answer) == [True, False]


def test_a_request_that_is_not_to_be_kept_leaves_no_state(rig: StatefulRig) -> None:
    tokens = rig.pages(1, 2)
    request = rig.admitted(rig.request(tokens))
    rig.generate(request, rig.pages(2000, 1))

    rig.end(request, checkpoint=False)

    assert rig.matched(tokens) == 0
    assert rig.states() == (rig.slots, 0, 0)


def test_thoughts_are_not_taken_for_the_state_of_the_prompt(rig: StatefulRig) -> None:
    prompt, answer = rig.pages(1, 3), rig.pages(2000, 2)
    request = rig.admitted(rig.request(prompt))
    rig.extend(request)
    request.reasoning_tokens = 1
    rig.generate(request, answer)

    with here.of("sglang.srt.runtime_context", "get_serving")().override(strip_thinking_cache=True):
        rig.end(request)
    rig.settled()

    assert rig.matched(prompt + answer) == len(prompt)
    assert rig.wrong(prompt) == []
    rig.evict(rig.size)
    rig.spoil()
    assert rig.serve([*prompt, *answer, 1]) == len(prompt)
    assert rig.wrong(prompt) == []


def test_what_comes_after_the_last_page_has_no_state() -> None:
    with one_stateful(tracked=True) as rig:
        tokens = rig.pages(1, 2)
        request = rig.admitted(rig.request([*tokens, 8000, 8001]))
        rig.extend(request)

        rig.end(request)
        rig.settled()

        assert rig.sizes() == (rig.size - len(tokens), len(tokens), 0)
        assert rig.states() == (rig.slots - 1, 1, 0)
        assert rig.wrong(tokens) == []


def test_two_requests_that_compute_the_same_leave_one_state(rig: StatefulRig) -> None:
    tokens = rig.pages(1, 3)
    requests = [rig.admitted(rig.request([*tokens, last])) for last in (7, 8)]
    for each in requests:
        rig.extend(each, len(tokens))
    shared = rig.cache.mamba_protected_size()

    for each in requests:
        rig.end(each, checkpoint=False)
    rig.settled()

    assert shared == 1
    assert rig.states() == (rig.slots - 1, 1, 0)
    assert rig.wrong(tokens) == []


def test_a_request_that_has_computed_what_is_known_leaves_no_second_state(rig: StatefulRig) -> None:
    rig.serve(rig.pages(1, 3))
    rig.settled()
    before = rig.states()

    rig.serve(rig.pages(1, 3))
    rig.settled()

    assert rig.states() == before


def test_a_request_computes_in_a_copy_of_the_state_that_it_found(rig: StatefulRig) -> None:
    [tokens] = rig.chain(1, 2)
    request = rig.admitted(rig.request([*tokens, *rig.pages(500, 2)]))

    copied = rig.wrong_of(request)
    rig.extend(request)

    assert copied == rig.wrong(tokens) == rig.wrong_of(request) == []
    assert request.kv.mamba_pool_idx != rig.state_of(tokens)
    rig.end(request)


def test_a_request_that_needs_a_slot_takes_one_state_and_no_tokens() -> None:
    with one_stateful(slots=3) as rig:
        sequences = rig.chain(1, 8, 16, 24)

        request = rig.admitted(rig.request([*range(500, 508)]))

        assert rig.states() == (0, 2, 0)
        assert rig.found(*sequences) == [False, True, True]
        rig.extend(request)
        rig.end(request)


def test_a_request_does_not_take_the_slot_of_the_state_that_it_goes_on_from() -> None:
    with one_stateful(slots=3) as rig:
        [oldest], [older], [old] = rig.chain(1, 8), rig.chain(500, 8), rig.chain(700, 8)

        request = rig.admitted(rig.request([*oldest, 7]))

        assert rig.found(oldest, older, old) == [True, False, True]
        assert rig.wrong_of(request) == []
        rig.extend(request)
        rig.end(request)


def test_a_request_is_told_where_a_state_is_missing(rig: StatefulRig) -> None:
    tokens = [*range(1, 25)]
    rig.insert(tokens[:16])
    rig.insert([*tokens, *rig.pages(500, 2)])

    request = rig.admitted(rig.request([*tokens, *rig.pages(700, 2)]))

    assert (request.prefix_len, request.mamba_branching_seqlen) == (16, 24)
    rig.extend(request)
    rig.end(request)


def test_a_request_is_told_where_a_state_is_missing_after_a_load(rig: StatefulRig) -> None:
    tokens = [*range(1, 25)]
    rig.serve(tokens[:16])
    rig.insert([*tokens, *rig.pages(500, 2)])
    rig.settled()
    rig.evict_states(1)

    request = rig.admitted(rig.request([*tokens, *rig.pages(700, 2)]))
    told = request.prefix_len, request.mamba_branching_seqlen
    rig.extend(request)
    rig.end(request)

    assert told == (16, 24)


def test_a_request_that_may_be_loaded_is_told_too_where_the_device_lacks_a_state(
    rig: StatefulRig,
) -> None:
    """HiCache does not tell, since its load begins at once; one that does not begin needs it here."""
    tokens = [*range(1, 25)]
    rig.serve(tokens[:16])
    rig.insert([*tokens[:16], *rig.pages(500, 2)])
    rig.settled()
    rig.evict_states(1)

    request = rig.request([*tokens[:16], *rig.pages(700, 2)])
    told = request.host_hit_length, request.mamba_branching_seqlen
    rig.abort(request)

    assert told == (16, 16)


def test_a_path_has_no_more_states_than_sglang_is_told_to_keep() -> None:
    with one_stateful(states_per_path=2) as rig:
        sequences = rig.chain(1, 8, 16, 24, 32)

        assert rig.states() == (rig.slots - 2, 2, 0)
        assert rig.cache.evictable_size() == 32
        assert rig.found(*sequences) == [False, False, True, True]


def test_a_path_keeps_every_state_where_sglang_is_told_no_number() -> None:
    with one_stateful(states_per_path=-1) as rig:
        sequences = rig.chain(1, 8, 16, 24, 32)

        assert rig.found(*sequences) == [True] * 4


def test_a_path_keeps_its_states_that_are_locked_or_where_branches_part() -> None:
    with one_stateful(states_per_path=1) as rig:
        fork, [locked] = [*range(1, 9)], rig.chain(1, 16)
        rig.insert([*fork, *range(500, 508)])
        lock = rig.lock(rig.match(locked).last_device_node)
        rig.insert(fork)

        sequences = rig.chain(1, 24, 32)

        assert rig.found(fork, locked, *sequences) == [True, True, False, True]
        rig.cache.unlock(lock)


def test_a_state_beyond_a_path_s_number_is_on_the_host_and_comes_back() -> None:
    with one_stateful(states_per_path=1) as rig:
        tokens = [*range(1, 25)]
        request = rig.admitted(rig.request(tokens))
        for end in (8, 16, 24):
            rig.extend(request, end)
            rig.settled()
        kept = rig.matched(tokens[:8])
        rig.end(request)

        cached = rig.serve([*tokens[:8], 900])

        assert (kept, cached) == (0, 8)
        assert rig.wrong(tokens[:8]) == []


def test_a_state_that_is_being_copied_is_kept_beyond_a_path_s_number() -> None:
    with one_stateful(states_per_path=1) as rig:
        tokens = [*range(1, 25)]
        request = rig.admitted(rig.request(tokens))
        with rig.copies_held(Direction.TO_HOST):
            for end in (8, 16, 24):
                rig.extend(request, end)
            kept = rig.found(tokens[:8], tokens[:16], tokens)
        rig.end(request)
        rig.settled()

        rig.evict(rig.size)
        rig.spoil()

        assert kept == [True, True, True]
        assert rig.serve([*tokens[:8], 900]) == 8
        assert rig.wrong(tokens[:8]) == []
