"""A recurrent state that left SGLang's device comes back with its tokens, byte for byte, or not at all.

The tree, the pools and the allocators are SGLang's own, for each shape of states that it has; see
`test_engine_restored_bytes.py`. Pages have one token, where a request's own state is kept at the end of
what it has computed; or several, where SGLang tracks its state beside it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LockstepError
from lockstep.ranks.orders import Direction
from tests.kit.sglang.tree import here
from tests.kit.sglang.tree.known_states import STATES
from tests.kit.sglang.tree.rigs import Rigs
from tests.kit.sglang.tree.stateful_rig import StatefulRig, one_stateful, rig

__all__ = ["rig"]

pytestmark = here.MARKS

TOKENS = 24
PROMPT = [*range(10, 10 + TOKENS), 7]
ANSWER = list(range(500, 509))


def stateful(ranks: int = 1, **settings: Any) -> Rigs:
    return Rigs(ranks, rig=StatefulRig, **settings)


def evict_and_spoil(rig: Any) -> None:
    """Take everything from the device's tree, and overwrite what is free then."""
    rig.settled()
    rig.evict(rig.size)
    rig.spoil()


def computed(rig: Any, tokens: Sequence[int], ends: Sequence[int]) -> Any:
    """A request of which chunks up to those ends have been computed."""
    request = rig.admitted(rig.request(tokens))
    for end in ends:
        rig.extend(request, end)
    return request


def ended(rig: Any, tokens: Sequence[int], ends: Sequence[int]) -> None:
    """Serve a prompt in chunks."""
    rig.end(computed(rig, tokens, [*ends, len(tokens)]))


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_comes_back_with_its_tokens(states: str, ranks: int, tracked: bool) -> None:
    with stateful(ranks, states=states, tracked=tracked) as rigs:
        rigs.every(lambda rig: ended(rig, PROMPT, [TOKENS]))
        rigs.every(evict_and_spoil)

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
    evict_and_spoil(rig)

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


def test_a_load_goes_on_from_a_state_that_is_on_the_device(rig: StatefulRig) -> None:
    ended(rig, PROMPT, [8, 16])
    evict_and_spoil(rig)
    rig.serve([*PROMPT[:8], 900])
    before = rig.matched(PROMPT[:8])

    request = rig.admitted(rig.request([*PROMPT[:16], 901]))

    assert (before, request.prefix_len) == (8, 16)
    assert rig.wrong_of(request) == []
    rig.extend(request)
    rig.end(request)


def test_a_retracted_request_comes_back_with_the_last_state_that_is_known(
    rig: StatefulRig,
) -> None:
    request = computed(rig, PROMPT, [8, TOKENS, len(PROMPT)])
    rig.generate(request, ANSWER)
    whole = (len(PROMPT) + len(ANSWER)) // rig.page_tokens * rig.page_tokens

    request.output_ids.append(3)
    rig.retract(request)
    rig.evict(rig.size)
    rig.spoil()
    rig.admitted(request)

    assert request.prefix_len == whole
    assert rig.wrong_of(request) == []
    rig.extend(request)
    rig.end(request)


def test_an_answer_comes_back_with_its_prompt(rig: StatefulRig) -> None:
    request = computed(rig, PROMPT, [len(PROMPT)])
    rig.generate(request, ANSWER)
    rig.end(request)
    evict_and_spoil(rig)
    whole = (len(PROMPT) + len(ANSWER)) // rig.page_tokens * rig.page_tokens

    cached = rig.serve([*PROMPT, *ANSWER, 1, 2, 3, 4])

    assert cached == whole
    assert rig.wrong([*PROMPT, *ANSWER][:whole]) == []


def test_a_backup_keeps_its_state_until_it_has_ended(rig: StatefulRig) -> None:
    with rig.copies_held(Direction.TO_HOST):
        ended(rig, PROMPT, [TOKENS])
        kept = rig.cache.mamba_protected_size()
        evicted = rig.evict_states(rig.slots)
    rig.settled()

    assert kept > 0
    assert (evicted, rig.cache.mamba_protected_size()) == (0, 0)


@pytest.mark.parametrize("tracked", [False, True])
def test_a_load_that_fails_on_one_rank_gives_its_state_back_on_all(tracked: bool) -> None:
    with stateful(2, tracked=tracked) as rigs:
        rigs.every(lambda rig: ended(rig, PROMPT, [TOKENS]))
        rigs.every(evict_and_spoil)
        with rigs.ranks[1].copies_failing(Direction.TO_DEVICE):
            cached = rigs.serve(PROMPT)
        rigs.settled()

        states = rigs.every(lambda rig: rig.cache.lockstep_state())
        assert cached == [0, 0]
        assert [(each["loads"], each["loads_failed"]) for each in states] == [(0, 1)] * 2
        assert rigs.every(lambda rig: rig.all_lost()) == [(0, 0)] * 2
        assert states[0]["digest"] == states[1]["digest"]


def test_a_load_of_what_another_has_computed_meanwhile_is_given_back(rig: StatefulRig) -> None:
    ended(rig, PROMPT, [TOKENS])
    evict_and_spoil(rig)
    request = rig.request(PROMPT)
    rig.step()
    assert not rig.admit(request)

    rig.insert(PROMPT[:TOKENS])
    rig.admitted(request)

    assert request.prefix_len == TOKENS
    assert rig.lost_states() == 1 + 2 * rig.tracked
    assert rig.wrong_of(request) == []
    rig.extend(request)
    rig.end(request)


def test_an_abort_of_a_load_gives_its_state_back_when_nothing_touches_it(rig: StatefulRig) -> None:
    ended(rig, PROMPT, [TOKENS])
    evict_and_spoil(rig)
    with rig.copies_held(Direction.TO_DEVICE):
        request = rig.request(PROMPT)
        rig.step()
        assert not rig.admit(request)
        rig.abort(request)
        rig.step()
        during = rig.lost_states()
    for _ in range(5):
        rig.step()

    assert (during, rig.lost_states()) == (1, 0)


def test_copies_that_keep_every_slot_are_ended_before_sglang_finds_none() -> None:
    """SGLang takes it for an error, though the pool has a slot for each request and its copies."""
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
