"""What left SGLang's device comes back from the host byte for byte, or not at all.

The claims of SGLang's unit tests of its unified radix cache about a host tier, told anew for ours; see
`test_engine_radix_cache.py`. The pools are SGLang's own, of each kind that is served: keys and values,
latent attention, and latent attention with an index. Free slots are overwritten before anything comes
back, and every element that a request finds is compared.
"""

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.integrations.sglang.identity.update import Update
from lockstep.integrations.sglang.weights import Taken
from lockstep.ranks.config import WritePolicy
from lockstep.ranks.orders import Direction
from tests.kit.sglang.tree import here
from tests.kit.sglang.tree.known_bytes import KINDS
from tests.kit.sglang.tree.rig import Rig
from tests.kit.sglang.tree.rigs import Rigs

pytestmark = here.MARKS


@pytest.fixture
def rig() -> Generator[Rig]:
    """One rank, with pages of several tokens; at the end nothing is lost and nothing is locked."""
    with Rigs() as rigs:
        [rig] = rigs.ranks
        yield rig
        rig.settled()
        assert rig.lost() == 0
        assert rig.cache.protected_size() == 0
        rig.cache.sanity_check()


def prompt(rig: Rig, first: int, pages: int) -> list[int]:
    """A prompt of so many whole pages, and a last token that is computed in any case."""
    return [*range(first, first + pages * rig.page_tokens), 7]


def evict_and_spoil(rig: Rig, tokens: int | None = None) -> None:
    """Take tokens from the device's tree, by default all, and overwrite what is free then."""
    rig.settled()
    rig.evict(rig.size if tokens is None else tokens)
    rig.spoil()


def loading(rig: Rig, tokens: Sequence[int]) -> Any:
    """A request that is loaded now."""
    request = rig.request(tokens)
    rig.step()
    assert not rig.admit(request)
    assert rig.cache.lockstep_state()["loading"] == 1
    return request


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_evicted_comes_back_byte_for_byte(kind: str) -> None:
    with Rigs(kind=kind, pages=16) as rigs:
        [rig] = rigs.ranks
        tokens = prompt(rig, 10, 5)
        rig.serve(tokens)
        evict_and_spoil(rig)

        request = rig.admitted(rig.request(tokens))

        assert request.prefix_len == 5 * rig.page_tokens
        assert rig.wrong(tokens[:-1]) == []
        rig.extend(request)
        rig.end(request)
        assert rig.lost() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_write_what_one_rank_reads(kind: str, tmp_path: Path) -> None:
    with Rigs(2, kind=kind, pages=16, store=f"file://{tmp_path}") as rigs:
        tokens = prompt(rigs.ranks[0], 10, 5)
        rigs.serve(tokens)
        rigs.settled()

    with Rigs(kind=kind, pages=16, store=f"file://{tmp_path}") as rigs:
        [rig] = rigs.ranks
        rig.spoil()

        assert rig.serve(tokens) == 5 * rig.page_tokens
        assert rig.wrong(tokens[:-1]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_writes_what_two_ranks_read(kind: str, tmp_path: Path) -> None:
    with Rigs(kind=kind, pages=16, store=f"file://{tmp_path}") as rigs:
        tokens = prompt(rigs.ranks[0], 10, 5)
        rigs.ranks[0].serve(tokens)

    with Rigs(2, kind=kind, pages=16, store=f"file://{tmp_path}") as rigs:
        rigs.every(lambda rig: rig.spoil())

        assert rigs.serve(tokens) == [5 * rig.page_tokens for rig in rigs.ranks]
        assert rigs.every(lambda rig: rig.wrong(tokens[:-1])) == [[], []]


def test_what_every_rank_has_alike_is_stored_once(tmp_path: Path) -> None:
    stored = {}
    for kind in ("attention", "latent", "sparse"):
        with Rigs(2, kind=kind, pages=16, store=f"file://{tmp_path}/{kind}") as rigs:
            tokens = prompt(rigs.ranks[0], 10, 5)
            rigs.serve(tokens)
            rigs.settled()
        files = [each for each in (tmp_path / kind).rglob("*") if each.is_file()]
        stored[kind] = sum(b"/kv/" in each.read_bytes() for each in files)

    assert stored == {"attention": 10, "latent": 5, "sparse": 5}


def test_a_prefix_on_the_device_is_continued_from_the_host(rig: Rig) -> None:
    tokens = prompt(rig, 10, 6)
    rig.serve(tokens[: 2 * rig.page_tokens])
    rig.serve(tokens)
    evict_and_spoil(rig, 4 * rig.page_tokens)
    on_the_device = rig.matched(tokens)

    cached = rig.serve(tokens)

    assert on_the_device == 2 * rig.page_tokens
    assert cached == 6 * rig.page_tokens
    assert rig.wrong(tokens[:-1]) == []
    assert rig.cache.lockstep_state()["loaded_tokens"] == 4 * rig.page_tokens


def test_an_answer_comes_back_with_its_prompt(rig: Rig) -> None:
    first, answer = prompt(rig, 10, 3), list(range(500, 507))
    request = rig.admitted(rig.request(first))
    rig.extend(request)
    rig.generate(request, answer)
    rig.end(request)
    evict_and_spoil(rig)

    cached = rig.serve([*first, *answer, 1])

    assert cached == 5 * rig.page_tokens
    assert rig.wrong([*first, *answer]) == []


def test_other_extra_keys_and_salts_find_nothing_on_the_host(rig: Rig) -> None:
    tokens = prompt(rig, 10, 4)
    rig.serve(tokens, extra_key="bc", cache_salt="a")
    evict_and_spoil(rig)

    others = [
        rig.serve(tokens),
        rig.serve(tokens, extra_key="c", cache_salt="ab"),
        rig.serve(tokens, cache_salt="a"),
    ]

    assert others == [0, 0, 0]
    assert rig.serve(tokens, extra_key="bc", cache_salt="a") == 4 * rig.page_tokens
    assert rig.wrong(tokens[:-1], extra_key="bc", cache_salt="a") == []


def test_a_prefix_that_is_on_the_host_is_not_copied_again(rig: Rig) -> None:
    tokens = prompt(rig, 10, 4)
    free = rig.host.free_host_pages()
    rig.serve(tokens)
    evict_and_spoil(rig)

    rig.serve(tokens)
    rig.serve(tokens)
    rig.settled()

    assert free - rig.host.free_host_pages() == 4


def test_what_only_one_has_used_is_not_backed_up_selectively() -> None:
    with Rigs(write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE) as rigs:
        [rig] = rigs.ranks
        tokens = prompt(rig, 10, 4)
        free = rig.host.free_host_pages()

        rig.serve(tokens)
        rig.settled()
        once = rig.host.free_host_pages()
        rig.serve(tokens)
        rig.settled()

        assert (free - once, free - rig.host.free_host_pages()) == (0, 4)


def test_more_than_the_host_holds_is_computed_again_and_is_never_wrong() -> None:
    with Rigs(pages=16, host_pages=8) as rigs:
        [rig] = rigs.ranks
        prompts = [prompt(rig, 100 * each, 5) for each in range(1, 6)]
        found, wrong = list[int](), list[str]()
        for tokens in prompts * 3:
            found.append(rig.serve(tokens))
            wrong += rig.wrong(tokens[:-1])
            evict_and_spoil(rig)
        last = rig.serve(prompts[-1])

        assert wrong == []
        assert last == 5 * rig.page_tokens
        assert max(found) < last
        assert rig.lost() == 0


def test_a_backup_keeps_its_pages_until_it_has_ended(rig: Rig) -> None:
    tokens = prompt(rig, 10, 4)
    with rig.copies_held(Direction.TO_HOST):
        rig.serve(tokens)
        before = rig.cache.lockstep_state()["keeping"], rig.evict(rig.size)
        for _ in range(5):
            rig.step()
        later = rig.cache.lockstep_state()["keeping"], rig.evict(rig.size)
    rig.settled()

    assert before == later == (1, 0)
    assert rig.sizes() == (rig.size - 4 * rig.page_tokens, 4 * rig.page_tokens, 0)
    evict_and_spoil(rig)
    assert rig.serve(tokens) == 4 * rig.page_tokens
    assert rig.wrong(tokens[:-1]) == []


def test_a_load_that_fails_on_one_rank_leaves_nothing_on_any() -> None:
    with Rigs(2) as rigs:
        tokens = prompt(rigs.ranks[0], 10, 4)
        rigs.serve(tokens)
        rigs.every(evict_and_spoil)
        with rigs.ranks[1].copies_failing(Direction.TO_DEVICE):
            cached = rigs.serve(tokens)

        assert cached == [0, 0]
        assert rigs.every(lambda rig: rig.wrong(tokens[:-1])) == [[], []]
        assert rigs.every(lambda rig: rig.lost()) == [0, 0]
        states = rigs.every(lambda rig: rig.cache.lockstep_state())
        assert [(each["loads"], each["loads_failed"]) for each in states] == [(0, 1), (0, 1)]
        assert states[0]["digest"] == states[1]["digest"]


def test_a_load_that_finds_no_room_is_computed_or_comes_later(rig: Rig) -> None:
    tokens, other = prompt(rig, 10, 4), prompt(rig, 500, 29)
    rig.serve(tokens)
    evict_and_spoil(rig)
    running = rig.admitted(rig.request(other))
    rig.extend(running)
    rig.settled()
    request = rig.request(tokens)
    rig.step()

    admitted = rig.admit(request)

    assert admitted
    assert request.prefix_len == 0
    assert rig.sizes()[0] == 2 * rig.page_tokens
    rig.end(running)
    rig.extend(request)
    rig.end(request)
    assert rig.wrong(tokens[:-1]) == []


def test_a_load_makes_room_on_the_device(rig: Rig) -> None:
    tokens, other = prompt(rig, 10, 8), prompt(rig, 500, 30)
    rig.serve(tokens)
    rig.settled()
    rig.serve(other)
    rig.settled()
    before = rig.matched(tokens)
    rig.spoil()

    cached = rig.serve(tokens)

    assert before < 8 * rig.page_tokens
    assert cached == 8 * rig.page_tokens
    assert rig.wrong(tokens[:-1]) == []


def test_what_is_loaded_is_in_no_tree_before_it_is_there(rig: Rig) -> None:
    tokens = prompt(rig, 10, 4)
    rig.serve(tokens)
    evict_and_spoil(rig)

    with rig.copies_held(Direction.TO_DEVICE):
        request = loading(rig, tokens)
        for _ in range(5):
            rig.step()
        found = rig.matched(tokens), rig.admit(request), rig.lost()

    assert found == (0, False, 4 * rig.page_tokens)
    rig.end(rig.admitted(request))


def test_a_load_of_what_another_has_computed_meanwhile_is_given_back(rig: Rig) -> None:
    tokens = prompt(rig, 10, 4)
    rig.serve(tokens)
    evict_and_spoil(rig)
    request = loading(rig, tokens)

    rig.insert(tokens[:-1])
    slots = rig.slots_of(tokens[:-1])
    rig.admitted(request)

    assert request.prefix_len == 4 * rig.page_tokens
    assert torch.equal(rig.slots_of(tokens[:-1]), slots)
    assert rig.lost() == 0
    assert rig.wrong(tokens[:-1]) == []
    rig.extend(request)
    rig.end(request)


def test_a_load_of_what_another_has_computed_in_part_ends_in_one_path(rig: Rig) -> None:
    tokens = prompt(rig, 10, 6)
    rig.serve(tokens)
    evict_and_spoil(rig)
    request = loading(rig, tokens)

    rig.insert([*tokens[: 3 * rig.page_tokens], *range(900, 904)])
    rig.admitted(request)

    assert request.prefix_len == 6 * rig.page_tokens
    assert rig.lost() == 0
    assert rig.wrong(tokens[:-1]) == []
    rig.extend(request)
    rig.end(request)


def test_two_requests_that_wait_for_the_same_share_it(rig: Rig) -> None:
    tokens = prompt(rig, 10, 5)
    rig.serve(tokens)
    evict_and_spoil(rig)
    requests = [rig.request(tokens), rig.request([*tokens, 8])]
    rig.step()
    tried = [rig.admit(each) for each in requests]

    for each in requests:
        rig.admitted(each)

    assert tried == [False, False]
    assert [each.prefix_len for each in requests] == [5 * rig.page_tokens] * 2
    assert rig.wrong(tokens[:-1]) == []
    for each in requests:
        rig.extend(each)
        rig.end(each)


def test_loads_beside_one_take_nothing_that_sglang_has_promised(rig: Rig) -> None:
    prompts = [prompt(rig, 10 + 100 * number, 4) for number in range(4)]
    for tokens in prompts:
        rig.serve(tokens)
    evict_and_spoil(rig)
    with rig.copies_held(Direction.TO_DEVICE):
        requests = [rig.request(tokens) for tokens in prompts]
        rig.step()
        # With what it is to decode, and a page that may not become full.
        needs = len(prompts[0]) + requests[0].sampling_params.max_new_tokens + rig.page_tokens

        rig.admit(requests[0], promised=rig.size - 2 * needs)

        assert rig.cache.lockstep_state()["loading"] == 2
    for each in requests:
        rig.end(rig.admitted(each))


def test_what_is_visited_next_is_loaded_beside(rig: Rig) -> None:
    prompts = [prompt(rig, 10 + 100 * number, 4) for number in range(4)]
    for tokens in prompts:
        rig.serve(tokens)
    evict_and_spoil(rig)
    requests = [rig.request(tokens) for tokens in prompts]
    rig.step()
    needs = len(prompts[0]) + requests[0].sampling_params.max_new_tokens + rig.page_tokens
    rig.cache.will_visit([requests[at] for at in (2, 0, 3, 1)])

    rig.admit(requests[0], promised=rig.size - 2 * needs)

    rig.step()
    rig.step()
    assert [rig.matched(tokens) > 0 for tokens in prompts] == [True, False, False, True]
    for each in requests:
        rig.end(rig.admitted(each))


def test_what_was_loaded_and_evicted_before_its_request_was_admitted_is_loaded_again(
    rig: Rig,
) -> None:
    tokens = prompt(rig, 10, 4)
    rig.serve(tokens)
    evict_and_spoil(rig)
    request = loading(rig, tokens)
    rig.step()
    rig.step()
    landed = rig.matched(tokens)

    rig.evict(rig.size)
    rig.spoil()
    rig.admitted(request)

    assert landed == request.prefix_len == 4 * rig.page_tokens
    assert rig.wrong(tokens[:-1]) == []
    assert rig.cache.lockstep_state()["loads"] == 2
    rig.extend(request)
    rig.end(request)


def test_an_abort_before_anything_was_loaded_leaves_nothing(rig: Rig) -> None:
    tokens = prompt(rig, 10, 4)
    rig.serve(tokens)
    evict_and_spoil(rig)
    request = rig.request(tokens)

    rig.abort(request)
    rig.step()

    assert rig.sizes() == (rig.size, 0, 0)
    assert rig.serve(tokens) == 4 * rig.page_tokens


def test_an_abort_of_a_load_gives_its_slots_back_when_nothing_touches_them(rig: Rig) -> None:
    tokens = prompt(rig, 10, 4)
    rig.serve(tokens)
    evict_and_spoil(rig)
    with rig.copies_held(Direction.TO_DEVICE):
        request = loading(rig, tokens)
        rig.abort(request)
        for _ in range(5):
            rig.step()
        during = rig.lost()
    rig.settled()
    for _ in range(5):
        rig.step()

    assert during == 4 * rig.page_tokens
    assert rig.cache.lockstep_state()["loading"] == 0
    assert rig.lost() == 0
    assert rig.serve(tokens) == 4 * rig.page_tokens
    assert rig.wrong(tokens[:-1]) == []


def test_an_abort_of_what_has_landed_leaves_it_in_the_tree(rig: Rig) -> None:
    tokens = prompt(rig, 10, 4)
    rig.serve(tokens)
    evict_and_spoil(rig)
    request = loading(rig, tokens)
    rig.step()
    rig.step()

    rig.abort(request)

    assert rig.sizes() == (rig.size - 4 * rig.page_tokens, 4 * rig.page_tokens, 0)
    assert rig.wrong(tokens[:-1]) == []


def test_an_abort_of_a_running_request_keeps_what_its_backups_read(rig: Rig) -> None:
    tokens = prompt(rig, 10, 4)
    with rig.copies_held(Direction.TO_HOST):
        request = rig.admitted(rig.request(tokens))
        rig.extend(request)
        rig.end(request, checkpoint=False)
        taken = rig.evict(rig.size)
    evict_and_spoil(rig)

    assert taken == 0
    assert rig.serve(tokens) == 4 * rig.page_tokens
    assert rig.wrong(tokens[:-1]) == []


def test_a_retracted_request_comes_back_with_all_whole_pages_that_it_had(rig: Rig) -> None:
    tokens, answer = prompt(rig, 10, 3), list(range(500, 509))
    request = rig.admitted(rig.request(tokens))
    rig.extend(request)
    rig.generate(request, answer)

    rig.retract(request)
    rig.evict(rig.size)
    rig.spoil()
    rig.admitted(request)

    assert request.prefix_len == 5 * rig.page_tokens
    assert rig.wrong([*tokens, *answer][: 5 * rig.page_tokens]) == []
    rig.extend(request)
    rig.end(request)


def test_a_retraction_gives_nothing_away_before_it_is_copied(rig: Rig) -> None:
    tokens = prompt(rig, 10, 3)
    request = rig.admitted(rig.request(tokens))
    rig.extend(request)
    rig.generate(request, list(range(500, 509)))
    rig.settled()
    free = rig.allocator.available_size()

    with ThreadPoolExecutor(1) as thread:
        with rig.copies_held(Direction.TO_HOST):
            retracting = thread.submit(rig.retract, request)
            waited, _ = wait([retracting], timeout=0.3)
            during = rig.allocator.available_size()
        retracting.result()

    assert (waited, during) == (set(), free)
    evict_and_spoil(rig)
    rig.admitted(request)
    assert request.prefix_len == 5 * rig.page_tokens
    assert rig.wrong([*tokens, *range(500, 509)][: 5 * rig.page_tokens]) == []
    rig.extend(request)
    rig.end(request)


def test_an_abort_of_a_retracted_request_leaves_what_was_saved(rig: Rig) -> None:
    tokens, answer = prompt(rig, 10, 3), list(range(500, 509))
    request = rig.admitted(rig.request(tokens))
    rig.extend(request)
    rig.generate(request, answer)
    rig.retract(request)

    rig.abort(request)
    evict_and_spoil(rig)

    assert rig.serve([*tokens, *answer]) == 5 * rig.page_tokens
    assert rig.wrong([*tokens, *answer][: 5 * rig.page_tokens]) == []


def test_a_reset_gives_slots_away_that_no_copy_touches(rig: Rig) -> None:
    tokens, other = prompt(rig, 10, 4), prompt(rig, 500, 4)
    rig.serve(tokens)
    evict_and_spoil(rig)
    rig.serve(other)
    loading(rig, tokens)

    rig.cache.reset()
    rig.allocator.clear()
    rig.spoil()

    assert rig.sizes() == (rig.size, 0, 0)
    assert rig.cache.lockstep_state()["loading"] == rig.cache.lockstep_state()["keeping"] == 0
    assert [rig.serve(tokens), rig.serve(other)] == [4 * rig.page_tokens] * 2
    assert rig.wrong(tokens[:-1]) == rig.wrong(other[:-1]) == []


def test_new_weights_find_nothing_of_old_ones_until_these_come_back(rig: Rig) -> None:
    tokens = prompt(rig, 10, 4)
    rig.serve(tokens)
    found = []
    for version in ("new", "w0"):
        rig.cache.weights_may_change()
        rig.cache.weights_changed(Taken.ALL, Update(version))
        rig.cache.reset()
        rig.allocator.clear()
        rig.spoil()
        found.append(rig.serve(tokens))

    assert found == [0, 4 * rig.page_tokens]
    assert rig.wrong(tokens[:-1]) == []
