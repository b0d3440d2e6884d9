"""Rule R2: the digest covers the tokens of commands, not only their number."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from lockstep.coordinator.divergence import first_difference
from lockstep.errors import DivergenceError
from lockstep.ranks.group.cache import Cache
from lockstep.ranks.group.host_cache import HostCache
from tests.kit.ranks.in_turn import PAGE_TOKENS, HostRanksInTurn, InTurn, RanksInTurn

PROMPT = list(range(4 * PAGE_TOKENS))
SHARED = PROMPT[: 2 * PAGE_TOKENS]
SAMPLED = (SHARED + [100 + at for at in range(6)], SHARED + [200 + at for at in range(6)])
"""The two ranks' tokens: of equal length, and equal in their first two pages only."""

Command = Callable[[Cache, list[int]], object]
HostCommand = Callable[[HostCache, list[int]], object]

COMMANDS: dict[str, Command] = {
    "prefetch": lambda cache, tokens: cache.prefetch("new", tokens),
    "load back": lambda cache, tokens: cache.load_back("new", tokens, reserve_tokens=16),
    "insert": lambda cache, tokens: cache.insert("r", tokens),
    "insert of a chunk": lambda cache, tokens: cache.insert("r", tokens, final=False),
    "retract": lambda cache, tokens: cache.retract("r", tokens),
    "pin": lambda cache, tokens: cache.pin("kept", tokens, ttl_s=10.0),
}

HOST_COMMANDS: dict[str, HostCommand] = {
    "prefetch": lambda cache, tokens: cache.prefetch("new", tokens),
    "hit": lambda cache, tokens: cache.match_host("new", tokens),
    "hit of less than a page": lambda cache, tokens: cache.match_host("new", tokens[-2:]),
    "back up": lambda cache, tokens: cache.back_up("r", tokens, range(4)),
    "pin": lambda cache, tokens: cache.pin("kept", tokens, ttl_s=10.0),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_tokens_that_differ_change_the_digest_with_the_command_that_brings_them(
    command: Command,
) -> None:
    ranks = RanksInTurn()
    ranks.compute("first", SHARED)
    ranks.every(lambda cache: cache.load_back("r", SHARED, reserve_tokens=len(SAMPLED[0])))
    ranks.settle()

    for cache, tokens in zip(ranks.caches, SAMPLED, strict=True):
        command(cache, tokens)

    require_named(ranks)


@pytest.mark.parametrize("command", HOST_COMMANDS.values(), ids=HOST_COMMANDS)
def test_the_same_holds_where_the_engine_owns_the_device_pages(command: HostCommand) -> None:
    ranks = HostRanksInTurn()

    for cache, tokens in zip(ranks.caches, SAMPLED, strict=True):
        command(cache, tokens)

    require_named(ranks)


def test_a_load_of_other_tokens_that_are_cached_as_well_changes_the_digest() -> None:
    """If ranks load different prompts, digests differ, even if both ranks cache both prompts."""
    ranks = HostRanksInTurn()
    for name, tokens in zip("ab", SAMPLED, strict=True):
        ranks.every(partial(_backed_up, name=name, tokens=tokens))
        ranks.settle()
        ranks.every(partial(HostCache.release, request=name))

    for cache, tokens in zip(ranks.caches, SAMPLED, strict=True):
        cache.match_host("new", PROMPT)
        cache.load("new", tokens[: 3 * PAGE_TOKENS], range(3))

    require_named(ranks)


@pytest.mark.parametrize(("depth", "rounds"), [(0, 1), (1, 2)], ids=["blocking", "pipelined"])
def test_every_rank_raises_in_the_round_after_its_engine_brought_other_tokens(
    depth: int, rounds: int
) -> None:
    ranks = RanksInTurn(depth=depth)
    ranks.every(lambda cache: cache.load_back("r", [], reserve_tokens=len(SAMPLED[0])))
    ranks.settle()

    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(ended_in, cache, tokens)
            for cache, tokens in zip(ranks.caches, SAMPLED, strict=True)
        ]
        ended = [each.result(60) for each in running]

    assert [steps for steps, _ in ended] == [rounds] * 2
    assert len({words for _, words in ended}) == 1
    assert "(rank 0: tokens insert r 14 " in ended[0][1]


def require_named(ranks: InTurn[Cache] | InTurn[HostCache]) -> None:
    """Check that digests differ, and that the first journal entry that differs records tokens."""
    assert len({cache.inspection.digest for cache in ranks.caches}) == 2
    journals = [cache.inspection.journal.last(4096) for cache in ranks.caches]
    assert "(rank 0: tokens " in (first_difference(journals) or "")


def ended_in(cache: Cache, tokens: list[int]) -> tuple[int, str]:
    cache.insert("r", tokens)
    for step in range(1, 4):
        try:
            cache.step()
        except DivergenceError as error:
            return step, str(error)
    raise AssertionError("three rounds have passed, and no rank objects")


def _backed_up(cache: HostCache, name: str, tokens: list[int]) -> int:
    covered = cache.back_up(name, tokens, range(4))
    cache.begin_backups()
    return covered


def test_requests_that_are_extended_apart_are_told_apart_whatever_room_there_was() -> None:
    ranks = RanksInTurn()
    ranks.every(lambda cache: cache.load_back("r", [], reserve_tokens=4 * PAGE_TOKENS))

    answers = [
        cache.extend("r", tokens)
        for cache, tokens in zip(ranks.caches, (3 * PAGE_TOKENS, 4 * PAGE_TOKENS), strict=True)
    ]

    assert answers == [True, True]
    assert len({cache.inspection.digest for cache in ranks.caches}) == 2
