"""Hits of an unbounded cache, of the optimal cache (Belady) and of FIFO."""

from collections.abc import Sequence
from functools import cache
from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.simulation.planning.oracles import belady, fifo, ideal, paths
from lockstep.simulation.planning.prompts import PagedPrompt


def prompt(ids: Sequence[int], *, partial: bool = True) -> PagedPrompt:
    return PagedPrompt(
        tokens=64 * len(ids) + partial,
        ids=np.array(ids, dtype="<i4").tobytes(),
        usable=len(ids) if partial else len(ids) - 1,
        reserved=len(ids) + partial,
    )


def hits_of_the_best(prompts: list[tuple[int, ...]], pages: int) -> int:
    """Return the largest possible number of hits, found by trying every choice of pages to keep."""
    chains = [[each[: end + 1] for end in range(len(each))] for each in prompts]

    @cache
    def best(at: int, held: frozenset[tuple[int, ...]]) -> int:
        if at == len(chains):
            return 0
        hit = next((n for n, page in enumerate(chains[at]) if page not in held), len(chains[at]))
        can = held | set(chains[at])
        kept = combinations(sorted(can), min(pages, len(can)))
        return hit + max(best(at + 1, frozenset(each)) for each in kept)

    return best(0, frozenset[tuple[int, ...]]())


PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple), max_size=6)


@given(PROMPTS, st.integers(1, 3))
def test_no_choice_of_what_to_keep_hits_more_than_the_best_cache(
    prompts: list[tuple[int, ...]], pages: int
) -> None:
    chains, _ = paths([prompt(each) for each in prompts])

    assert sum(belady(chains, pages)) == hits_of_the_best(prompts, pages)


def test_an_ideal_cache_has_all_whole_pages_that_came_before() -> None:
    chains, pages = paths(
        [prompt((1, 2, 3)), prompt((1, 2, 4)), prompt((1, 2, 3, 5)), prompt((2,))]
    )

    assert ideal(chains) == [0, 2, 3, 0]
    assert pages == 6


def test_a_prompt_that_is_cached_whole_has_its_last_page_computed() -> None:
    chains, _ = paths([prompt((1, 2), partial=False)] * 2)

    assert [ideal(chains), belady(chains, 9), fifo(chains, 9)] == [[0, 1]] * 3


def test_a_fifo_lets_the_first_page_go_first_and_hits_nothing_behind_it() -> None:
    chains, _ = paths([prompt((1, 2)), prompt((3,)), prompt((1, 2))])

    assert fifo(chains, 2) == [0, 0, 0]
    assert fifo(chains, 3) == [0, 0, 2]
