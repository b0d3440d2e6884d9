"""An engine lends pages of every component: pages that a window still needs, and a state's slot."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from lockstep.coordinator.ballot import Quiesced, TransferEnded
from lockstep.errors import UsageError
from lockstep.ranks.group.host_cache import HostCache
from lockstep.ranks.protocol.answers import Wait
from lockstep.ranks.protocol.config import Recurrent, SlidingWindow
from lockstep.ranks.protocol.orders import KV_POOL, Cancel, CopyToDevice, CopyToHost
from lockstep.ranks.replica.operations.requests import LoadState
from tests.kit.ranks.in_turn import LAYOUT, PAGE_TOKENS, HostRanksInTurn

STATE = replace(LAYOUT, page_tokens=1)
PROMPT = list(range(6 * PAGE_TOKENS))
BEGUN = [*PROMPT, 1, 2]
"""Tokens of six pages, and two tokens of a seventh."""
GONE = [-1]


def hybrid(*, window_pages: int = 2, window_host_pages: int = 16) -> HostRanksInTurn:
    """Return two ranks of a hybrid model: a state, and a window one token short of `window_pages`."""
    window = SlidingWindow(
        window_tokens=window_pages * PAGE_TOKENS - 1,
        layout=LAYOUT,
        device_pages=0,
        host_pages=window_host_pages,
    )
    state = Recurrent(checkpoint_tokens=PAGE_TOKENS, layout=STATE, device_pages=0, host_pages=8)
    return HostRanksInTurn(components=(window, state), store=False)


def lent(pages: int, *, window: Sequence[int]) -> dict[str, Sequence[int]]:
    """Return lent device pages by pool: full attention, the given window pages, and a state slot."""
    return {KV_POOL: range(pages), "window": window, "state": [3]}


def begin(ranks: HostRanksInTurn) -> None:
    for cache in ranks.caches:
        cache.begin_loads()
        cache.begin_backups()


def back_up(ranks: HostRanksInTurn, name: str, tokens: list[int], window: Sequence[int]) -> None:
    pages = lent(len(tokens) // PAGE_TOKENS, window=window)
    assert ranks.every(lambda cache: cache.back_up(name, tokens, pages)) == len(tokens)
    begin(ranks)


def retract(ranks: HostRanksInTurn, tokens: list[int], window: Sequence[int]) -> None:
    pages = lent(-(-len(tokens) // PAGE_TOKENS), window=window)
    assert ranks.every(lambda cache: cache.retract("r", tokens, pages))
    begin(ranks)


def state_of(ranks: HostRanksInTurn) -> LoadState:
    return ranks.every(lambda cache: cache.load_state("r"))


def brought(ranks: HostRanksInTurn) -> dict[str, list[int]]:
    (order,) = ranks.executors[0].given(CopyToDevice)
    return {
        pool: sorted(
            page for each in order.transfers if each.pool == pool for page in each.destinations
        )
        for pool in (KV_POOL, "window", "state")
    }


def known(ranks: HostRanksInTurn) -> None:
    """Match the prompt, so that the cache knows the request; host memory has no page of it."""
    assert ranks.every(lambda cache: cache.match_host("r", PROMPT)) == 0


def test_a_resume_lets_go_of_what_kept_the_request_on_the_host() -> None:
    """A resume unpins the saved host pages. Regression: lost lock handles kept the pages pinned."""
    ranks = hybrid()
    known(ranks)
    retract(ranks, PROMPT, [0, 1, 2, 3, 4, 5])
    ranks.settle()

    resumed = lent(6, window=[0, 1, 2, 3, 4, 5])
    assert ranks.every(lambda cache: cache.resume("r", resumed)) is None
    begin(ranks)
    ranks.settle()

    assert state_of(ranks) is LoadState.READY
    allocator = ranks.caches[0].inspection.prefixes.allocator
    assert allocator.available(1, 0) == allocator.pools[1][0].capacity


def test_a_request_is_saved_once_no_earlier_backup_reads_its_pages() -> None:
    """A retract becomes SAVED only when no earlier copy, even a failed one, still reads its pages."""
    ranks = hybrid()
    back_up(ranks, "r", PROMPT[:8], [0, 1])
    backup = ranks.take_operation(CopyToHost)
    retract(ranks, BEGUN, [0, 1, 2, 3, 4, 5, 6])
    ranks.report(TransferEnded(backup, ok=False))
    ranks.step()
    for executor in ranks.executors:
        executor.complete_only(CopyToHost)
    ranks.step()

    before = state_of(ranks)
    ranks.settle()

    assert before is LoadState.SAVING
    assert state_of(ranks) is LoadState.SAVED


def test_a_retract_that_has_failed_is_told_as_saving_until_no_copy_reads() -> None:
    """A failed retract is reported as SAVING, not LOADING, until its copy has stopped reading."""
    ranks = hybrid()
    known(ranks)
    retract(ranks, BEGUN, [0, 1, 2, 3, 4, 5, 6])
    operation = ranks.take_operation(CopyToHost)
    ranks.report(TransferEnded(operation, ok=False))
    ranks.step()

    before = state_of(ranks)
    for executor in ranks.executors:
        executor.take(Cancel)
        executor.reports.append(Quiesced(operation))
    ranks.step()

    assert before is LoadState.SAVING
    assert state_of(ranks) is LoadState.FAILED


WRONG: dict[str, Callable[[HostCache], object]] = {
    "back_up": lambda cache: cache.back_up("r", PROMPT, lent(6, window=range(6))),
    "load": lambda cache: cache.load("r", PROMPT, lent(6, window=range(6))),
    "retract": lambda cache: cache.retract("r", PROMPT, lent(6, window=range(6))),
    "fence": lambda cache: cache.fence("r"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_request_that_is_saved_lends_nothing_before_it_is_resumed(
    wrong: Callable[[HostCache], object],
) -> None:
    """A retracted request accepts no backup and no load before it is resumed."""
    ranks = hybrid()
    known(ranks)
    retract(ranks, PROMPT, range(6))
    ranks.settle()

    with pytest.raises(UsageError, match="is retracted; resume or release it"):
        wrong(ranks.caches[0])


def test_a_window_that_has_left_pages_behind_is_retracted_and_resumed() -> None:
    """A request can be retracted and resumed if its window no longer includes its first pages."""
    ranks = hybrid()
    known(ranks)

    retract(ranks, PROMPT, [*GONE * 4, 8, 9])
    ranks.settle()
    resumed = lent(6, window=[*GONE * 4, 5, 7])
    assert ranks.every(lambda cache: cache.resume("r", resumed)) is None

    assert brought(ranks) == {KV_POOL: [0, 1, 2, 3, 4, 5], "window": [5, 7], "state": [3]}


def test_a_begun_page_needs_less_of_the_window_than_a_match_does() -> None:
    """With a partial last page, a resume restores fewer window pages than a match would need."""
    ranks = hybrid()
    known(ranks)

    retract(ranks, BEGUN, [*GONE * 5, 8, 9])
    ranks.settle()
    resumed = lent(7, window=[*GONE * 5, 5, 7])
    assert ranks.every(lambda cache: cache.resume("r", resumed)) is None

    assert brought(ranks) == {KV_POOL: [0, 1, 2, 3, 4, 5, 6], "window": [5, 7], "state": [3]}


def test_a_resume_brings_what_lies_behind_the_pages_that_the_engine_has_kept() -> None:
    ranks = hybrid()
    known(ranks)
    retract(ranks, BEGUN, range(7))
    ranks.settle()

    resumed = {KV_POOL: [7], "window": [8], "state": [2]}
    unit = 6 * PAGE_TOKENS
    assert ranks.every(lambda cache: cache.resume("r", resumed, device_tokens=unit)) is None

    assert brought(ranks) == {KV_POOL: [7], "window": [8], "state": [2]}


@pytest.mark.parametrize(
    ("first", "window", "filled"),
    [(5, [9], [9]), (1, [*GONE * 3, 8, 9], [8, 9])],
    ids=["on the device", "behind it"],
)
def test_a_load_fills_the_window_that_begins(
    first: int, window: list[int], filled: list[int]
) -> None:
    ranks = hybrid()
    back_up(ranks, "first", PROMPT, range(6))
    ranks.settle()
    start, pages = first * PAGE_TOKENS, lent(6 - first, window=window)
    assert (
        ranks.every(lambda c: c.match_host("r", PROMPT, device_tokens=start)) == len(PROMPT) - start
    )

    ranks.every(lambda cache: cache.load("r", PROMPT, pages, device_tokens=start))

    assert brought(ranks) == {KV_POOL: list(range(6 - first)), "window": filled, "state": [3]}


def test_a_load_without_a_page_that_the_window_needs_is_refused() -> None:
    ranks = hybrid()
    back_up(ranks, "first", PROMPT, range(6))
    ranks.settle()
    ranks.every(lambda cache: cache.match_host("r", PROMPT))

    with pytest.raises(UsageError, match="lacks lent pages of pool 'window' for the pages 4 to 6"):
        ranks.caches[0].load("r", PROMPT, lent(6, window=[*GONE * 5, 9]))


def test_a_request_whose_backup_has_failed_is_lost_when_it_is_resumed() -> None:
    ranks = hybrid()
    back_up(ranks, "r", PROMPT, range(6))
    backup = ranks.take_operation(CopyToHost)
    retract(ranks, PROMPT, range(6))
    ranks.report(TransferEnded(backup, ok=False))
    ranks.settle()
    assert state_of(ranks) is LoadState.SAVED

    assert ranks.every(lambda cache: cache.resume("r", lent(6, window=range(6)))) is Wait.LOST


def test_a_backup_copies_all_of_a_run_that_a_window_divides() -> None:
    """A backup copies a whole run of pages, even if the window's first page splits the run."""
    ranks = hybrid()

    back_up(ranks, "r", PROMPT, [*GONE * 4, 8, 9])
    ranks.settle()

    assert ranks.every(lambda cache: cache.match(PROMPT)).host_tokens == len(PROMPT)


def test_a_backup_counts_what_it_keeps_of_a_longer_run_as_kept() -> None:
    """Window pages that a backup locks count as locked, even if they are part of a longer run."""
    ranks = hybrid(window_pages=3, window_host_pages=3)
    prefix, other, longer = PROMPT[:20], [99] * PAGE_TOKENS, [*PROMPT, 1, 2, 3, 4]
    back_up(ranks, "first", prefix, range(5))
    ranks.settle()
    # Match in the middle of the run, which splits it. A later eviction can then take only the pages it
    # needs.
    ranks.every(lambda cache: cache.match_host("second", prefix, device_tokens=12))
    ranks.every(lambda c: c.load("second", prefix, lent(2, window=[0, 1]), device_tokens=12))
    begin(ranks)
    ranks.settle()
    back_up(ranks, "third", other, [0])
    ranks.settle()
    ranks.every(lambda cache: cache.match_host("fourth", other))
    ranks.every(lambda cache: cache.load("fourth", other, lent(1, window=[0])))

    back_up(ranks, "first", longer, range(7))
    ranks.settle()

    assert ranks.every(lambda cache: cache.match(longer)).last_host_tokens == len(longer)


def test_all_that_is_lent_of_a_window_is_backed_up_so_that_a_shorter_prefix_is_found_too() -> None:
    """All lent window pages are backed up, so that shorter prefixes match, too (window-only model)."""
    window = SlidingWindow(
        window_tokens=2 * PAGE_TOKENS, layout=LAYOUT, device_pages=0, host_pages=16
    )
    ranks = HostRanksInTurn(components=(window,), store=False)
    pages = {KV_POOL: range(6), "window": [*GONE, 1, 2, 3, 4, 5]}

    ranks.every(lambda cache: cache.back_up("r", PROMPT, pages))
    begin(ranks)
    ranks.settle()

    def found(length: int) -> int:
        return ranks.every(
            lambda cache: cache.match(PROMPT[: length * PAGE_TOKENS]).host_tokens // PAGE_TOKENS
        )

    assert [found(length) for length in range(1, 7)] == [0, 0, 3, 4, 5, 6]


def window_sources(ranks: HostRanksInTurn) -> set[int]:
    """Return the window pages read by the copies in flight, after letting these copies finish."""
    orders = ranks.executors[0].given(CopyToHost)
    transfers = [each for order in orders for each in order.transfers if each.pool == "window"]
    ranks.settle()
    return {page for each in transfers for page in each.sources}


def load(
    ranks: HostRanksInTurn, tokens: list[int], window: Sequence[int], *, first: int = 0
) -> None:
    start, pages = first * PAGE_TOKENS, lent(len(tokens) // PAGE_TOKENS - first, window=window)
    hit = ranks.every(lambda cache: cache.match_host("r", tokens, device_tokens=start))
    assert hit == len(tokens) - start
    ranks.every(lambda cache: cache.load("r", tokens, pages, device_tokens=start))
    begin(ranks)


def resumed(ranks: HostRanksInTurn, pages: int) -> None:
    whole = lent(pages, window=range(pages))
    assert ranks.every(lambda cache: cache.resume("r", whole)) is None
    begin(ranks)
    ranks.settle()


def after_a_load(ranks: HostRanksInTurn) -> None:
    back_up(ranks, "first", PROMPT, [*GONE * 4, 4, 5])
    ranks.settle()
    load(ranks, PROMPT, range(6))
    ranks.settle()


def after_two_loads(ranks: HostRanksInTurn) -> None:
    begin_a_second_load(ranks)
    ranks.settle()


def begin_a_second_load(ranks: HostRanksInTurn) -> None:
    back_up(ranks, "first", PROMPT[: 3 * PAGE_TOKENS], [*GONE, 1, 2])
    ranks.settle()
    back_up(ranks, "first", PROMPT, [*GONE * 4, 4, 5])
    ranks.settle()
    load(ranks, PROMPT[: 3 * PAGE_TOKENS], range(3))
    ranks.settle()
    load(ranks, PROMPT, range(3, 6), first=3)


def after_a_load_that_failed_behind_another(ranks: HostRanksInTurn) -> None:
    begin_a_second_load(ranks)
    ranks.report(TransferEnded(ranks.take_operation(CopyToDevice), ok=False))
    ranks.settle()


def after_a_resume(ranks: HostRanksInTurn) -> None:
    known(ranks)
    retract(ranks, PROMPT, range(6))
    ranks.settle()
    resumed(ranks, 6)


def after_a_fence(ranks: HostRanksInTurn) -> None:
    after_a_load(ranks)
    ranks.every(lambda cache: cache.fence("r"))


@pytest.mark.parametrize(
    ("before", "copied"),
    [
        (after_a_load, set[int]()),
        (after_two_loads, set[int]()),
        # The failed second load left these pages unfilled. The request computed them, so they are
        # backed up.
        (after_a_load_that_failed_behind_another, {3, 4, 5}),
        (after_a_resume, set[int]()),
        # After the fence, the request computed its pages again, so they are backed up.
        (after_a_fence, {0, 1, 2, 3}),
    ],
)
def test_what_a_load_has_left_unfilled_of_a_lent_window_is_never_backed_up(
    before: Callable[[HostRanksInTurn], None], copied: set[int]
) -> None:
    """Regression: window pages left unfilled by a load were backed up, and other requests read them."""
    ranks = hybrid()
    before(ranks)

    back_up(ranks, "r", PROMPT, range(6))

    assert window_sources(ranks) == copied


def test_a_match_that_would_need_what_was_left_unfilled_is_not_made_by_a_shorter_backup() -> None:
    ranks = hybrid()
    after_a_load(ranks)
    shorter = PROMPT[: 5 * PAGE_TOKENS]

    back_up(ranks, "r", shorter, range(5))

    assert window_sources(ranks) == set()
    assert ranks.every(lambda cache: cache.match(shorter)).host_tokens == 0


def test_a_second_retract_saves_nothing_that_the_resume_before_it_has_not_filled() -> None:
    ranks = hybrid()
    known(ranks)
    retract(ranks, BEGUN, [*GONE * 5, 5, 6])
    ranks.settle()
    resumed(ranks, 7)

    retract(ranks, BEGUN, range(7))

    assert window_sources(ranks) == {6}
    assert state_of(ranks) is LoadState.SAVED
