"""Served prompts are found by the next run of the cache, as far as the write policy promises.

Under write-through, everything except the last token's page is found, even if the store refuses some
writes, host memory is full for a while, or a prompt is larger than host memory.
"""

from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import count
from tempfile import TemporaryDirectory
from typing import cast

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lockstep.coordinator.collectives.in_process import InProcessGroup
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.protocol.answers import Admission
from lockstep.ranks.protocol.config import CacheConfig, ComponentConfig, Recurrent, SlidingWindow
from lockstep.ranks.replica.operations.requests import LoadState
from tests.kit.ranks.lending_engine import LendingEngine

PAGE = 4
PROMPT_PAGES = 10
DEVICE_PAGES = 96
ROOM_FOR_ALL, ROOM_FOR_ONE, LESS_THAN_ONE = 200, 14, 8
LAYOUT = PageLayout(page_tokens=PAGE, columns=(Column(name="kv", layers=1, heads=2, elements=4),))
STATE = PageLayout(page_tokens=1, columns=(Column(name="state", layers=1, heads=2, elements=4),))
IDLE_S = 0.002
STEPS_MAX = FLUSHES_MAX = 2_000
REFUSES = "fault+{}fault.seed=3&fault.error=0.1"
"""Wrapper options for a store: each call fails for one key in ten, at random."""

_NAMES = count()


class LendingStates(LendingEngine):
    """An engine that keeps the state of each checkpoint in an immutable slot."""

    keeps_states = True


WINDOW = SlidingWindow(
    window_tokens=3 * PAGE, layout=LAYOUT, device_pages=DEVICE_PAGES, host_pages=ROOM_FOR_ALL
)
STATES = Recurrent(checkpoint_tokens=PAGE, layout=STATE, device_pages=48, host_pages=ROOM_FOR_ALL)
MODELS: dict[str, tuple[ComponentConfig, ...]] = {
    "plain": (),
    "window": (WINDOW,),
    "window and states": (WINDOW, STATES),
}
STORES = {
    "file": "file://{folder}/kv?durability=none&",
    "3fs": "3fs://{folder}/kv?index=sqlite://{folder}/index.db&slot_bytes=20480&",
    "memory": "memory://{name}?",
}


@contextmanager
def opened(owner: type, config: CacheConfig) -> Generator[Cache]:
    """Open a cache on one rank. `owner` is `Cache`, or a `LendingEngine` with the same interface."""
    member = InProcessGroup(1).member(0)
    start = owner.start if issubclass(owner, LendingEngine) else Cache.open
    with closing(cast("Callable[..., Cache]", start)(config, member)) as cache:
        yield cache


def until(cache: Cache, done: Callable[[], bool]) -> None:
    for _ in range(STEPS_MAX):
        if done():
            return
        cache.step(idle_s=IDLE_S)
    raise AssertionError("what was waited for did not come")


def serve(cache: Cache, tokens: list[int]) -> int:
    name, prompt = f"r{next(_NAMES)}", tokens[:-1]
    answers: list[object] = []
    cache.prefetch(name, prompt)
    until(cache, lambda: cache.prefetch_done(name))

    def admitted() -> bool:
        answers.append(cache.load_back(name, prompt, reserve_tokens=len(tokens)))
        return isinstance(answers[-1], Admission)

    until(cache, admitted)
    until(cache, lambda: cache.load_state(name) is not LoadState.LOADING)
    answer = cast("Admission", answers[-1])
    # The engine must end a chunk at each position at which a state is kept.
    last_page = len(prompt) // PAGE * PAGE
    if cache.config.components and last_page > answer.cached_tokens:
        cache.insert(name, tokens[:last_page], final=False)
        cache.step()
    cache.insert(name, tokens)
    cache.release(name)
    cache.step()
    return answer.cached_tokens


def write_all(cache: Cache) -> None:
    for _ in range(FLUSHES_MAX):
        if cache.flush():
            return
    raise AssertionError(f"not written: {cache.stats(rounds=0).unwritten_pages}")


def edited(model: str) -> Callable[[list[int]], list[int]]:
    """Return a function that changes the last two tokens of a prompt for the next run.

    For a model with states, the function changes nothing.
    """
    return list if "states" in model else lambda tokens: [*tokens[:-2], 7, 8]


def promised(model: str, lengths: list[int]) -> list[int]:
    """Return the promised cached tokens: whole pages before the tokens that the next run changes."""
    changed = 1 if "states" in model else 2
    return [(length - changed) // PAGE * PAGE for length in lengths]


def around_a_page(pages: int, more: int) -> int:
    return pages * PAGE + more


lengths = st.lists(
    st.builds(
        around_a_page,
        st.integers(PROMPT_PAGES - 3, PROMPT_PAGES),
        st.sampled_from((0, 1, -1)),
    ),
    min_size=3,
    max_size=5,
)


TROUBLES = {
    "the store refuses": (REFUSES, ROOM_FOR_ALL),
    "room for one": ("{}", ROOM_FOR_ONE),
    "less room than one": ("{}", LESS_THAN_ONE),
}


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("owner", [Cache, LendingStates])
@pytest.mark.parametrize("trouble", TROUBLES)
@given(lengths=lengths)
@settings(max_examples=2, derandomize=True, deadline=None, database=None, phases=(Phase.generate,))
def test_what_was_served_is_found_in_the_next_life(
    trouble: str, owner: type, model: str, store: str, lengths: list[int]
) -> None:
    uri, host_pages = TROUBLES[trouble]
    prompts = [[1000 * at + each for each in range(n)] for at, n in enumerate(lengths)]
    with TemporaryDirectory() as folder:
        location = STORES[store].format(folder=folder, name=f"found-later-{next(_NAMES)}")
        well = CacheConfig(
            model="m",
            layout=LAYOUT,
            components=MODELS[model],
            device_pages=DEVICE_PAGES,
            host_pages=ROOM_FOR_ALL,
            store=location.rstrip("&?"),
        )
        first = replace(well, host_pages=host_pages, store=uri.format(location).rstrip("&?"))
        with opened(owner, well) as later:
            with opened(owner, first) as cache:
                for each in prompts:
                    serve(cache, each)
                write_all(cache)

            found = [serve(later, each) for each in map(edited(model), prompts)]

    assert found == promised(model, lengths)
