"""Recurrent states evicted from SGLang's device are restored exactly, with their tokens, or not at all.

The tests use SGLang's own tree, pools and allocators, with each supported shape of states. With pages
of one token, SGLang keeps a request's own state at the end of its computed tokens. With larger pages,
SGLang tracks the state in separate slots.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LockstepError
from lockstep.ranks.protocol.orders import Direction
from tests.kit.sglang.tree import here
from tests.kit.sglang.tree.known_states import STATES
from tests.kit.sglang.tree.rigs import Rigs
from tests.kit.sglang.tree.stateful_rig import StatefulRig, one_stateful, rig

__all__ = ["rig"]

pytestmark = here.MARKS

TOKENS = 24
PROMPT = [*range(10, 10 + TOKENS), 7]


def stateful(ranks: int = 1, **settings: Any) -> Rigs:
    return Rigs(ranks, rig=StatefulRig, **settings)


def computed(rig: Any, tokens: Sequence[int], ends: Sequence[int]) -> Any:
    """Admit a request and compute it in chunks that end at `ends`; return the request."""
    request = rig.admitted(rig.request(tokens))
    for end in ends:
        rig.extend(request, end)
    return request


def ended(rig: Any, tokens: Sequence[int], ends: Sequence[int]) -> None:
    rig.end(computed(rig, tokens, [*ends, len(tokens)]))


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_comes_back_with_its_tokens(states: str, ranks: int, tracked: bool) -> None:
    with stateful(ranks, states=states, tracked=tracked) as rigs:
        rigs.every(lambda rig: ended(rig, PROMPT, [TOKENS]))
        rigs.every(lambda rig: rig.evict_all())

        requests = rigs.every(lambda rig: rig.admitted(rig.request(PROMPT)))
        wrong = rigs.every(lambda rig: rig.wrong_of(requests[rig.rank]))

        assert [request.prefix_len for request in requests] == [TOKENS] * ranks
        assert wrong == [[]] * ranks
        assert rigs.every(lambda rig: rig.wrong(PROMPT[:TOKENS])) == [[]] * ranks
        states_of = rigs.every(lambda rig: rig.cache.lockstep_state())
        assert [each["loaded_tokens"] for each in states_of] == [TOKENS] * ranks
        rigs.every(lambda rig: rig.extend(requests[rig.rank]))
        rigs.every(lambda rig: rig.end(requests[rig.rank]))


@pytest.mark.parametrize("states", ["delta net", "short convolution", "by input"])
@pytest.mark.parametrize(("written_by", "read_by"), [(1, 2), (2, 1), (2, 4)])
def test_ranks_of_another_number_read_it_from_storage(
    states: str, written_by: int, read_by: int, tmp_path: Path
) -> None:
    store = f"file://{tmp_path}?durability=none"
    with stateful(written_by, states=states, store=store) as rigs:
        rigs.every(lambda rig: ended(rig, PROMPT, [TOKENS]))

    with stateful(read_by, states=states, store=store) as rigs:
        requests = rigs.every(lambda rig: rig.admitted(rig.request(PROMPT)))
        wrong = rigs.every(lambda rig: rig.wrong_of(requests[rig.rank]))

        assert [request.prefix_len for request in requests] == [TOKENS] * read_by
        assert wrong == [[]] * read_by
        rigs.every(lambda rig: rig.extend(requests[rig.rank]))
        rigs.every(lambda rig: rig.end(requests[rig.rank]))


def test_ranks_of_another_number_are_refused_where_the_parts_are_not_told(tmp_path: Path) -> None:
    store = f"file://{tmp_path}?durability=none"
    with stateful(1, states="parts not told", store=store) as rigs:
        rigs.every(lambda rig: ended(rig, PROMPT, [TOKENS]))

    with (
        pytest.raises(LockstepError, match="of a rank in 1 in the store and"),
        stateful(2, states="parts not told", store=store),
    ):
        pass


def test_a_hit_ends_at_the_last_state_and_not_where_the_tokens_do(rig: StatefulRig) -> None:
    ended(rig, PROMPT, [8, 16])
    rig.evict_all()

    cached = rig.serve([*PROMPT[:20], 900, 901, 902])

    assert cached == 16
    assert rig.wrong(PROMPT[:16]) == []


def test_a_state_that_was_evicted_alone_comes_back_to_the_tokens_that_stayed(
    rig: StatefulRig,
) -> None:
    ended(rig, PROMPT, [8, 16])
    rig.settled()
    rig.evict_states(rig.slots)
    rig.spoil()
    before = rig.matched(PROMPT[:16])

    request = rig.admitted(rig.request([*PROMPT[:16], 900]))

    assert (before, request.prefix_len) == (0, 16)
    assert rig.wrong_of(request) == []
    rig.extend(request)
    rig.end(request)


def test_copies_that_keep_every_slot_are_ended_before_sglang_finds_none() -> None:
    """Copies that hold every state slot are completed before SGLang needs a slot, or it would raise."""
    with one_stateful(slots=4) as rig:
        request = rig.admitted(rig.request([*range(64)]))
        settle = rig.cache.settle
        with rig.copies_held(Direction.TO_HOST) as let_go:
            rig.cache.settle = lambda: (let_go(), settle())
            for end in range(8, 64, 8):
                rig.extend(request, end)
        rig.extend(request)
        rig.end(request)
        rig.settled()

        assert rig.all_lost() == (0, 0)


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
    rig.evict_all()
    assert rig.serve([*prompt, *answer, 1]) == len(prompt)
    assert rig.wrong(prompt) == []


def test_a_request_is_told_where_a_state_is_missing_after_a_load(rig: StatefulRig) -> None:
    tokens = [*range(1, 25)]
    rig.serve(tokens[:16])
    rig.insert([*tokens, *rig.pages(500, 2)])
    rig.settled()
    rig.evict_states(1)

    request = rig.admitted(rig.request([*tokens, *rig.pages(700, 2)]))
    lengths = request.prefix_len, request.mamba_branching_seqlen
    rig.extend(request)
    rig.end(request)

    assert lengths == (16, 24)


def test_a_request_that_may_be_loaded_is_told_too_where_the_device_lacks_a_state(
    rig: StatefulRig,
) -> None:
    """A match with a host hit also returns the position at which the device lacks a state."""
    tokens = [*range(1, 25)]
    rig.serve(tokens[:16])
    rig.insert([*tokens[:16], *rig.pages(500, 2)])
    rig.settled()
    rig.evict_states(1)

    request = rig.request([*tokens[:16], *rig.pages(700, 2)])
    lengths = request.host_hit_length, request.mamba_branching_seqlen
    rig.abort(request)

    assert lengths == (16, 16)


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

        rig.evict_all()

        assert kept == [True, True, True]
        assert rig.serve([*tokens[:8], 900]) == 8
        assert rig.wrong(tokens[:8]) == []
