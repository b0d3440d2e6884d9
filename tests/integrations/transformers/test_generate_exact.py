"""`generate()` returns the same output with a prefix from any tier; a wrong page changes the output."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lockstep.integrations.transformers import LockstepCache
from tests.kit.transformers.generated import (
    NEW_TOKENS,
    PAGE,
    Generated,
    alone,
    generate,
    ids,
    prompt,
    reusing,
    with_own_past,
)
from tests.kit.transformers.stored_pages import flip, pages_in
from tests.kit.transformers.tiny_models import FULL, WINDOWED

if TYPE_CHECKING:
    from tests.integrations.transformers.conftest import Load, Open

pytestmark = [pytest.mark.engines, pytest.mark.timeout(120)]

PROMPT = prompt("first")
REUSED = (len(PROMPT) - 1) // PAGE * PAGE


def close(model: Any, prompts: Sequence[list[int]], came: Sequence[Generated]) -> list[bool]:
    """Return for each prompt whether its output is close to the one without a cache."""
    return [one.near(alone(model, each)) for each, one in zip(prompts, came, strict=True)]


def exact(model: Any, prompts: Sequence[list[int]], came: Sequence[Generated]) -> list[bool]:
    """Return for each prompt whether its output equals the one without a cache, to the bit."""
    return [one.same_bits(alone(model, each)) for each, one in zip(prompts, came, strict=True)]


def spoil(cache: Any) -> None:
    """Fill the cache's device memory with NaN, so that a page that is not restored spoils every sum."""
    for layer in cache._pages.layers():
        for memory in layer.memory:
            memory.fill_(torch.nan)


def cold_warm_and_restarted(open_one: "Open", model: Any, store: str) -> list[Generated]:
    """Return the outputs without cached pages, with pages from host memory, and from a store."""
    with open_one(model, store=store) as cache:
        spoil(cache)
        first = reusing(cache, model, PROMPT)
        spoil(cache)
        second = reusing(cache, model, PROMPT)
    cache = open_one(model, store=store)
    spoil(cache)
    return [first, second, reusing(cache, model, PROMPT)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FULL)
def test_full_attention_is_exact_to_the_bit_cold_warm_and_after_a_restart(
    load: "Load", opened: "Open", store: str, kind: str, dtype: torch.dtype
) -> None:
    model = load(kind, dtype=dtype)

    came = cold_warm_and_restarted(opened, model, store)

    expected = alone(model, PROMPT)
    assert [each.near(expected) for each in came] == [True] * 3
    assert [each.reused for each in came] == [0, REUSED, REUSED]


@pytest.mark.parametrize("kind", WINDOWED)
def test_windows_are_exact_too_and_to_the_bit_what_transformers_makes_of_the_same_past(
    load: "Load", opened: "Open", store: str, kind: str
) -> None:
    """With cached windows, outputs equal those of Transformers with the same past KV, to the bit."""
    model = load(kind)

    came = cold_warm_and_restarted(opened, model, store)

    expected, with_past = alone(model, PROMPT), with_own_past(model, PROMPT, REUSED)
    assert [each.near(expected) for each in came] == [True] * 3
    pairs = zip(came, [expected, with_past, with_past], strict=True)
    assert [each.same_bits(one) for each, one in pairs] == [True] * 3
    assert [each.reused for each in came] == [0, REUSED, REUSED]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*FULL, *WINDOWED])
def test_on_a_gpu_a_past_is_to_the_bit_what_transformers_makes_of_the_same_one(
    load: "Load", opened: "Open", store: str, kind: str, dtype: torch.dtype
) -> None:
    """On a GPU, outputs with cached KV equal those of Transformers with the same KV, to the bit."""
    model = load(kind, dtype=dtype, device_map="cuda")

    came = cold_warm_and_restarted(opened, model, store)

    expected, with_past = alone(model, PROMPT), with_own_past(model, PROMPT, REUSED)
    pairs = zip(came, [expected, with_past, with_past], strict=True)
    assert [each.same_bits(one) for each, one in pairs] == [True] * 3
    assert [each.reused for each in came] == [0, REUSED, REUSED]


@pytest.mark.parametrize("kind", [*FULL, *WINDOWED])
def test_a_prompt_that_leaves_another_one_anywhere_takes_up_what_they_share(
    load: "Load", opened: "Open", kind: str
) -> None:
    model = load(kind)
    cache = opened(model)
    reusing(cache, model, prompt("first", 200, shared=120))

    others = [prompt("other", 200, shared) for shared in (20, 60, 119)]

    came = [reusing(cache, model, each) for each in others]

    assert [each.reused for each in came] == [16, 48, 112]
    assert close(model, others, came) == [True] * 3


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_a_conversation_takes_up_what_it_was_answered(
    load: "Load", opened: "Open", kind: str
) -> None:
    model = load(kind)
    cache = opened(model)
    turn = PROMPT
    came: list[Generated] = []

    for seed in range(3):
        came.append(reusing(cache, model, turn))
        turn = [*came[-1].tokens, *prompt(seed, 30, shared=0)]

    # The last token of a turn has no KV, so the next turn reuses the whole pages before that token.
    assert [each.reused for each in came] == [0, 96, 144]
    prompts = [each.tokens[:-NEW_TOKENS] for each in came]
    assert close(model, prompts, came) == [True] * 3


def with_another_page(cache: LockstepCache, model: Any, page: int) -> Generated:
    with cache.reuse(ids(PROMPT)) as past:
        for layer in past.paged:
            for memory in layer.memory:
                wrong = memory[:, :, page * PAGE : (page + 1) * PAGE]
                wrong.copy_(wrong.flip(3))
        return generate(model, PROMPT, past)


@pytest.mark.parametrize(
    ("kind", "pages"), [("llama", range(6)), ("gpt_oss", range(6)), ("mistral", [4, 5])]
)
def test_any_one_page_with_other_content_would_show(
    load: "Load", opened: "Open", kind: str, pages: range
) -> None:
    """Any single wrong page changes the logits, so equal logits prove that every page was right."""
    model = load(kind)
    cache = opened(model)
    reusing(cache, model, PROMPT)
    right = reusing(cache, model, PROMPT)

    wrong = [with_another_page(cache, model, page) for page in pages]

    assert [each.near(right) for each in wrong] == [False] * len(pages)


def with_flipped(open_one: "Open", model: Any, store: Path, number: int) -> tuple[Generated, int]:
    """Return the output with one bit of a stored page flipped, and the number of corrupt pages."""
    copy = store.with_name(f"flipped-{number}")
    shutil.copytree(store, copy)
    flip(pages_in(copy)[number])
    with open_one(model, store=f"file://{copy}") as cache:
        spoil(cache)
        came = reusing(cache, model, PROMPT)
        return came, cache.cache.stats().pages_corrupt


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_any_one_page_that_the_store_has_damaged_is_computed_again(
    load: "Load", opened: "Open", tmp_path: Path, kind: str
) -> None:
    model, store = load(kind), tmp_path / "kv"
    with opened(model, store=f"file://{store}") as cache:
        reusing(cache, model, PROMPT)
    pages = len(pages_in(store))

    came = [with_flipped(opened, model, store, number) for number in range(pages)]

    expected = alone(model, PROMPT)
    assert [one.near(expected) for one, _ in came] == [True] * pages
    # A corrupt page goes unnoticed if it is not read: of a window's pages, only the last are read.
    assert {one.reused for one, corrupt in came if corrupt} == set(range(0, REUSED, PAGE))
    assert {one.reused for one, corrupt in came if not corrupt} <= {REUSED}


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_host_memory_that_is_too_small_costs_work_and_no_token(
    load: "Load", opened: "Open", kind: str
) -> None:
    model = load(kind)
    cache = opened(model, host_pages=10)
    prompts = [prompt(seed) for seed in (0, 1, 2, 0, 0, 3, 1)]

    came = [reusing(cache, model, each) for each in prompts]
    cache.cache.inspection.check()

    assert close(model, prompts, came) == [True] * 7
    assert came[0].reused == 0
    assert came[4].reused == REUSED


def test_salts_share_nothing(load: "Load", opened: "Open", store: str) -> None:
    model = load()
    cache = opened(model, store=store)

    came = [reusing(cache, model, PROMPT, salt).reused for salt in ("a", "b", "", "a", "b")]

    assert came == [0, 0, 0, REUSED, REUSED]


def test_a_sequence_that_outgrows_its_memory_goes_on_and_is_cached_up_to_there(
    load: "Load", opened: "Open"
) -> None:
    model = load("gpt_oss")
    cache = opened(model, max_tokens=64)

    came = [reusing(cache, model, PROMPT, max_new_tokens=40) for _ in range(2)]
    grown = reusing(cache, model, prompt("short", 50), max_new_tokens=40)
    again = reusing(cache, model, [*grown.tokens, 7])

    expected = alone(model, PROMPT, max_new_tokens=40)
    assert [each.near(expected) for each in came] == [True] * 2
    assert grown.near(alone(model, prompt("short", 50), max_new_tokens=40))
    assert [*(each.reused for each in came), again.reused] == [0, 64, 64]


@pytest.mark.parametrize("tokens", [1, 2, 16, 17])
def test_a_prompt_of_any_length_is_served(load: "Load", opened: "Open", tokens: int) -> None:
    model = load()
    cache = opened(model)
    short = prompt("short", tokens, shared=0)

    came = [reusing(cache, model, short) for _ in range(2)]

    assert [each.near(alone(model, short)) for each in came] == [True] * 2
    assert came[1].reused == (tokens - 1) // PAGE * PAGE
