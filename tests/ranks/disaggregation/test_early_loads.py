"""What has come of a prompt is on the device before its last page is, and in nobody's way."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from lockstep.ranks.cache import Cache
from lockstep.ranks.config import CacheConfig
from lockstep.ranks.disaggregation.arrivals import Arrivals
from lockstep.ranks.disaggregation.control import Announce, Control
from lockstep.ranks.disaggregation.early_loads import EarlyLoads
from lockstep.ranks.replica.answers import Wait
from lockstep.small_engine.forward_pass import ForwardPass, TokenSpan
from lockstep.small_engine.profiles import find_profile
from tests.kit.ranks.handoffs import steps, terms_of
from tests.kit.ranks.served_group import ServedGroup, keyed

PAGE_TOKENS = 16
PAGES = 8
TOKENS = keyed(1, PAGES * PAGE_TOKENS, PAGE_TOKENS)
FIRST, SECOND = 3 * PAGE_TOKENS, 6 * PAGE_TOKENS
NAME = "r"

Program = Callable[[Cache, Arrivals, Callable[[int], None]], int]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def config_of(store: str, profile: str) -> CacheConfig:
    found = find_profile(profile)
    return CacheConfig(
        model=found.name,
        layout=found.layout(PAGE_TOKENS),
        components=found.components(PAGE_TOKENS, 2 * PAGES, 4 * PAGES),
        device_pages=2 * PAGES,
        host_pages=4 * PAGES,
        store=store,
    )


def computes(cache: Cache, forward: ForwardPass) -> None:
    """Compute the prompt, and have all of it in the store."""
    cache.load_back(NAME, TOKENS.ids[:0], reserve_tokens=len(TOKENS.ids))
    span = TokenSpan(request=NAME, tokens=TOKENS, start=0, stop=len(TOKENS.ids))
    forward.compute([span])
    cache.insert(NAME, TOKENS.ids)
    cache.release(NAME)
    assert cache.flush()


def on_two_ranks(stack: ExitStack, store: str, program: Program, profile: str = "llama") -> int:
    """Run the program on ranks of which the store has the prompt; return what it says on both."""
    config = config_of(f"memory://early-loads-{store}", profile)
    with closing(ServedGroup(config, 2)) as before:
        assert [each.result(60) for each in before.begin(computes)] == [None, None]
    group = stack.enter_context(closing(ServedGroup(config, 2)))

    def runs(cache: Cache, _: ForwardPass) -> int:
        early = EarlyLoads(cache)
        arrivals = Arrivals(cache, terms_of(cache), lambda to, message: None, early=early)

        def moves(count: int) -> None:
            for _ in range(count):
                steps(cache, arrivals.hear, lambda: not arrivals.step())

        arrivals.expect(NAME, TOKENS.ids, "prefill")
        return program(cache, arrivals, moves)

    first, second = (each.result(60) for each in group.begin(runs))
    assert first == second
    return first


def announced(tokens: int) -> Control:
    return Announce(request=NAME, tokens=tokens)


def on_device(cache: Cache) -> int:
    return cache.match(TOKENS.ids).device_tokens


def held(cache: Cache) -> int:
    """Return how many device pages nobody but their holder can have."""
    return sum(cache.inspection.prefixes.residence.holds.kept_pages[0])


def settle(cache: Cache, arrivals: Arrivals, done: Callable[[], bool]) -> None:
    def is_done() -> bool:
        arrivals.step()
        return done() and not cache.inspection.in_flight

    steps(cache, arrivals.hear, is_done)


def test_what_has_come_is_loaded_while_the_rest_is_computed_and_is_held_by_nobody(
    stack: ExitStack,
) -> None:
    def program(cache: Cache, arrivals: Arrivals, _: Callable[[int], None]) -> int:
        arrivals.hear(announced(FIRST))
        settle(cache, arrivals, lambda: on_device(cache) == FIRST)
        arrivals.hear(announced(SECOND))
        settle(cache, arrivals, lambda: on_device(cache) == SECOND)
        settle(cache, arrivals, lambda: not held(cache))
        return len(cache.inspection.requests)

    # The one that comes is known, since it is being fetched.
    assert on_two_ranks(stack, "loaded", program) == 1


def test_where_the_device_has_no_room_nothing_is_loaded_early(stack: ExitStack) -> None:
    def program(cache: Cache, arrivals: Arrivals, moves: Callable[[int], None]) -> int:
        room = (2 * PAGES - 2) * PAGE_TOKENS
        other = cache.load_back("other", TOKENS.ids[:0], reserve_tokens=room)
        assert not isinstance(other, Wait)
        arrivals.hear(announced(FIRST))
        settle(cache, arrivals, lambda: cache.match(TOKENS.ids).host_tokens == FIRST)
        moves(3)
        return on_device(cache) + len(cache.inspection.requests)

    assert on_two_ranks(stack, "room", program) == 2


def test_what_the_device_could_never_hold_is_not_loaded_early(stack: ExitStack) -> None:
    def program(cache: Cache, arrivals: Arrivals, moves: Callable[[int], None]) -> int:
        early = EarlyLoads(cache)
        early.came(NAME, keyed(2, (2 * PAGES + 1) * PAGE_TOKENS, PAGE_TOKENS).ids, "")
        moves(1)
        return len(cache.inspection.requests)

    assert on_two_ranks(stack, "long", program) == 0


def test_what_is_on_its_way_in_has_half_of_the_device_at_most(stack: ExitStack) -> None:
    def program(cache: Cache, _: Arrivals, __: Callable[[int], None]) -> int:
        early = EarlyLoads(cache)
        early.came("first", TOKENS.ids[:SECOND], "")
        early.came("second", TOKENS.ids[:FIRST], "")
        known = len(cache.inspection.requests)
        early.forget("first")
        early.came("second", TOKENS.ids[:FIRST], "")
        early.forget("second")
        return known

    assert on_two_ranks(stack, "half", program) == 1


def test_a_request_that_is_named_as_an_early_load_is_left_alone(stack: ExitStack) -> None:
    def program(cache: Cache, arrivals: Arrivals, _: Callable[[int], None]) -> int:
        stranger = f"{NAME}\x00early"
        cache.load_back(stranger, TOKENS.ids[:0], reserve_tokens=PAGE_TOKENS)
        arrivals.hear(announced(FIRST))
        settle(cache, arrivals, lambda: cache.match(TOKENS.ids).host_tokens == FIRST)
        return len(cache.page_table(stranger))

    assert on_two_ranks(stack, "stranger", program) == 1


def test_of_a_model_with_states_nothing_is_loaded_early(stack: ExitStack) -> None:
    def program(cache: Cache, arrivals: Arrivals, moves: Callable[[int], None]) -> int:
        arrivals.hear(announced(FIRST))
        moves(3)
        settle(cache, arrivals, lambda: cache.prefetch_done(NAME))
        return on_device(cache)

    assert on_two_ranks(stack, "states", program, "hybrid-all") == 0


def test_a_request_that_is_forgotten_while_its_first_part_is_loaded_leaves_nothing(
    stack: ExitStack,
) -> None:
    def program(cache: Cache, arrivals: Arrivals, _: Callable[[int], None]) -> int:
        arrivals.hear(announced(FIRST))

        def is_loading() -> bool:
            arrivals.step()
            return len(cache.inspection.requests) == 2

        steps(cache, arrivals.hear, is_loading)
        arrivals.forget(NAME)
        cache.abort(NAME)
        settle(cache, arrivals, lambda: not held(cache))
        return len(cache.inspection.requests)

    assert on_two_ranks(stack, "forgotten", program) == 0
