"""KV that was evicted from SGLang's device is restored from the host byte for byte, or not at all.

The tests use SGLang's own pools of each supported kind: keys and values, latent attention, and latent
attention with an index. Free slots are overwritten before a load. After the load, every element that a
request uses is compared.
"""

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from lockstep.ranks.protocol.orders import Direction
from tests.kit.sglang.tree import here
from tests.kit.sglang.tree.known_bytes import KINDS
from tests.kit.sglang.tree.rig import Rig
from tests.kit.sglang.tree.rigs import Rigs, one_rig

pytestmark = here.MARKS


@pytest.fixture
def rig() -> Generator[Rig]:
    with one_rig() as rig:
        yield rig


def prompt(rig: Rig, first: int, pages: int) -> list[int]:
    """Return a prompt of `pages` whole pages and one last token that is always computed."""
    return [*range(first, first + pages * rig.page_tokens), 7]


def four_on_the_host(rig: Rig) -> list[list[int]]:
    prompts = [prompt(rig, 10 + 100 * number, 4) for number in range(4)]
    for tokens in prompts:
        rig.serve(tokens)
    rig.evict_all()
    return prompts


def left_for_two(rig: Rig, request: Any) -> int:
    """Return how many pool tokens to reserve so that two requests like `request` fill the rest.

    A request needs its prompt and output tokens, and a page more because its last page may be partial.
    """
    tokens: int = len(request.origin_input_ids) + request.sampling_params.max_new_tokens
    return rig.size - 2 * (tokens + rig.page_tokens)


def loading(rig: Rig, tokens: Sequence[int]) -> Any:
    request = rig.request(tokens)
    rig.step()
    assert not rig.admit(request)
    assert rig.cache.lockstep_state()["loading"] == 1
    return request


def landed(rig: Rig) -> None:
    """Run iterations until every load has completed."""
    for _ in range(200):
        rig.step()
        if not rig.cache.lockstep_state()["loading"]:
            return
    raise AssertionError("loads do not end")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("written_by", "read_by"), [(1, 1), (2, 1), (1, 2)])
def test_what_ranks_of_one_number_wrote_those_of_another_read_byte_for_byte(
    kind: str, written_by: int, read_by: int, tmp_path: Path
) -> None:
    with Rigs(written_by, kind=kind, pages=16, store=f"file://{tmp_path}") as rigs:
        tokens = prompt(rigs.ranks[0], 10, 5)
        rigs.serve(tokens)
        rigs.settled()

    with Rigs(read_by, kind=kind, pages=16, store=f"file://{tmp_path}") as rigs:
        rigs.every(lambda rig: rig.spoil())

        assert rigs.serve(tokens) == [5 * rig.page_tokens for rig in rigs.ranks]
        assert rigs.every(lambda rig: rig.wrong(tokens[:-1])) == [[]] * read_by


def test_two_requests_that_wait_for_the_same_share_it(rig: Rig) -> None:
    tokens = prompt(rig, 10, 5)
    rig.serve(tokens)
    rig.evict_all()
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
    prompts = four_on_the_host(rig)
    with rig.copies_held(Direction.TO_DEVICE):
        requests = [rig.request(tokens) for tokens in prompts]
        rig.step()

        rig.admit(requests[0], promised=left_for_two(rig, requests[0]))

        assert rig.cache.lockstep_state()["loading"] == 2
    for each in requests:
        rig.end(rig.admitted(each))


def test_what_is_visited_next_is_loaded_beside(rig: Rig) -> None:
    prompts = four_on_the_host(rig)
    requests = [rig.request(tokens) for tokens in prompts]
    rig.step()
    rig.cache.will_visit([requests[at] for at in (2, 0, 3, 1)])

    rig.admit(requests[0], promised=left_for_two(rig, requests[0]))

    landed(rig)
    assert [rig.matched(tokens) > 0 for tokens in prompts] == [True, False, False, True]
    for each in requests:
        rig.end(rig.admitted(each))


def test_what_was_loaded_and_evicted_before_its_request_was_admitted_is_loaded_again(
    rig: Rig,
) -> None:
    tokens = prompt(rig, 10, 4)
    rig.serve(tokens)
    rig.evict_all()
    request = loading(rig, tokens)
    landed(rig)
    found = rig.matched(tokens)

    rig.evict(rig.size)
    rig.spoil()
    rig.admitted(request)

    assert found == request.prefix_len == 4 * rig.page_tokens
    assert rig.wrong(tokens[:-1]) == []
    assert rig.cache.lockstep_state()["loads"] == 2
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
    rig.evict_all()
    rig.admitted(request)
    assert request.prefix_len == 5 * rig.page_tokens
    assert rig.wrong([*tokens, *range(500, 509)][: 5 * rig.page_tokens]) == []
    rig.extend(request)
    rig.end(request)


def test_a_reset_gives_slots_away_that_no_copy_touches(rig: Rig) -> None:
    tokens, other = prompt(rig, 10, 4), prompt(rig, 500, 4)
    rig.serve(tokens)
    rig.evict_all()
    rig.serve(other)
    loading(rig, tokens)

    rig.cache.reset()
    rig.allocator.clear()
    rig.spoil()

    assert rig.sizes() == (rig.size, 0, 0)
    assert rig.cache.lockstep_state()["loading"] == rig.cache.lockstep_state()["keeping"] == 0
    assert [rig.serve(tokens), rig.serve(other)] == [4 * rig.page_tokens] * 2
    assert rig.wrong(tokens[:-1]) == rig.wrong(other[:-1]) == []
