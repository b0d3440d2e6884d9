"""The engine guide shows the example's code, and quotes errors that Lockstep really raises."""

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from tiny_transformer import Shape
from tour import config

from lockstep import Cache, LoadState, LockstepError, Timeouts, Wait
from lockstep.coordinator.collective import Collective
from tests.kit.ranks.as_threads import RanksAsThreads
from tests.kit.source_tree import ROOT

PAGE = (ROOT / "docs" / "engine-guide.md").read_text(encoding="utf-8")
SOURCES = [file.read_text(encoding="utf-8") for file in (ROOT / "examples/engine").glob("*.py")]
EXCERPTS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
LINES = re.findall(r"^\| [^|]+ \| `(\w+): ([^`]*)` \|$", PAGE, re.MULTILINE)
TOKENS = list(range(40))


@pytest.mark.parametrize("excerpt", EXCERPTS)
def test_the_code_on_the_page_is_the_example_s(excerpt: str) -> None:
    assert any(excerpt in source for source in SOURCES), excerpt


def test_every_wait_and_every_load_state_has_a_row() -> None:
    rows = "\n".join(line for line in PAGE.splitlines() if line.startswith("|"))

    names = [f"`Wait.{each.name}`" for each in Wait] + [f"`{each.name}`" for each in LoadState]
    assert [name for name in names if name not in rows] == []


Hold = Callable[[], None]
"""A function that blocks until the other rank has ended."""


@contextmanager
def opened(member: Collective, **settings: Any) -> Generator[Cache]:
    cache = Cache.open(replace(config(Shape(), "memory://"), store=None, **settings), member)
    try:
        yield cache
    finally:
        cache.close(flush=False)


def use_what_was_never_admitted(member: Collective, hold: Hold) -> None:
    with opened(member) as cache:
        cache.load_state("r")


def admit(cache: Cache, reserve_tokens: int = 40) -> None:
    cache.load_back("r", TOKENS[:-1], reserve_tokens=reserve_tokens)


def use_pages_that_are_on_their_way(member: Collective, hold: Hold) -> None:
    with opened(member) as cache:
        admit(cache)
        cache.retract("r", TOKENS)
        cache.page_table("r")


def admit_twice(member: Collective, hold: Hold) -> None:
    with opened(member) as cache:
        admit(cache)
        admit(cache)


def compute_more_than_was_reserved(member: Collective, hold: Hold) -> None:
    with opened(member) as cache:
        admit(cache)
        cache.insert("r", range(64))


def insert_other_tokens(member: Collective, hold: Hold) -> None:
    with opened(member) as cache:
        admit(cache)
        cache.insert("r", TOKENS[:16], final=False)
        cache.insert("r", [7] * 32)


def ask_for_more_than_there_is(member: Collective, hold: Hold) -> None:
    with opened(member) as cache:
        admit(cache, 16 * 24 + 1)


def decide_alone(member: Collective, hold: Hold) -> None:
    with opened(member) as cache:
        cache.prefetch("r", [member.rank] * 40)
        cache.step()
        cache.step()


def skip_the_steps_of_one_rank(member: Collective, hold: Hold) -> None:
    with opened(member, timeouts=Timeouts(round_s=0.5)) as cache:
        (hold if member.rank else cache.step)()
        (hold if member.rank else cache.step)()


def end_one_rank(member: Collective, hold: Hold) -> None:
    with opened(member) as cache:
        (cache.abandon if member.rank else cache.step)()
        (cache.abandon if member.rank else cache.step)()


def configure_each_rank(member: Collective, hold: Hold) -> None:
    with opened(member, weights_version=f"seed {member.rank}"):
        hold()


MISTAKES = [
    use_what_was_never_admitted,
    use_pages_that_are_on_their_way,
    admit_twice,
    compute_more_than_was_reserved,
    insert_other_tokens,
    ask_for_more_than_there_is,
    decide_alone,
    skip_the_steps_of_one_rank,
    end_one_rank,
    configure_each_rank,
]


def made(mistake: Callable[[Collective, Hold], None]) -> LockstepError | None:
    """Return the error that rank 0 of two ranks gets when both ranks run `mistake`."""

    def program(member: Collective, hold: Hold) -> LockstepError | None:
        try:
            mistake(member, hold)
        except LockstepError as error:
            return error
        return None

    error: LockstepError | None = RanksAsThreads().run(program, 2, late=[1])[0]
    return error


@pytest.mark.parametrize(("line", "mistake"), list(zip(LINES, MISTAKES, strict=True)))
def test_a_mistake_shows_as_the_page_says(
    line: tuple[str, str], mistake: Callable[[Collective, Hold], None]
) -> None:
    kind, words = line
    pattern = ".*".join(re.escape(part.strip()) for part in words.split("..."))

    error = made(mistake)

    assert type(error).__name__ == kind
    assert re.fullmatch(pattern, str(error)), str(error)
