"""The plug-in's scheduler side for a model with windows and states next to full attention.

The cache is real; the test controls its I/O. The window is two pages less one token.
"""

from collections.abc import Sequence

import pytest

from lockstep.integrations.vllm.groups import GroupKind, PoolGroup
from lockstep.integrations.vllm.lent_blocks import HeldBlocks, LentBlocks
from lockstep.integrations.vllm.tracked import PassResult
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.protocol.config import Recurrent, SlidingWindow
from lockstep.ranks.protocol.orders import Cancel, CopyToHost, LookUp
from tests.kit.ranks.in_turn import PAGE_TOKENS, HostRanksInTurn
from tests.kit.vllm.sent_requests import Blocks, CountedBlocks, Scheduled, Sent, Status
from tests.kit.vllm.sides import side_of

COLUMNS = (Column(name="k", layers=1, heads=4, elements=1),)
WINDOW = SlidingWindow(
    window_tokens=2 * PAGE_TOKENS - 1,
    layout=PageLayout(page_tokens=PAGE_TOKENS, columns=COLUMNS),
    device_pages=0,
    host_pages=16,
)
STATE = Recurrent(
    checkpoint_tokens=PAGE_TOKENS,
    layout=PageLayout(page_tokens=1, columns=COLUMNS),
    device_pages=0,
    host_pages=8,
)
GROUPS = (
    PoolGroup("kv", 1, GroupKind.FULL, PAGE_TOKENS, 0),
    PoolGroup("window", 0, GroupKind.WINDOW, PAGE_TOKENS, WINDOW.window_tokens),
    PoolGroup("state", 2, GroupKind.STATE, PAGE_TOKENS, PAGE_TOKENS),
)
PROMPT = list(range(4 * PAGE_TOKENS))
TABLES = ([0, 12, 13, 14], [21, 22, 23, 24], [0, 0, 0, 34])
"""Block tables of a request of four pages, one table for each group. Block 0 stands for a block that
left the window, or for a state that was not kept."""
PASSING = {12: 1, 13: 1, 14: 1, 34: 1}


class Scripted:
    """One rank's scheduler side, with a cache whose I/O the test controls, and a pool of blocks."""

    def __init__(self, *, store: bool = True) -> None:
        self.ranks = HostRanksInTurn(ranks=1, components=(WINDOW, STATE), store=store)
        self.blocks = CountedBlocks()
        self.side = side_of(self.ranks.caches[0], LentBlocks(GROUPS, HeldBlocks(self.blocks)))
        self.executor = self.ranks.executors[0]

    def arrive(self, tokens: list[int], name: str) -> Sent:
        request = Sent(tokens, request_id=name)
        self.side.arrived(request)
        return request

    def compute(self, request: Sent, tokens: int, tables: Sequence[Sequence[int]] = TABLES) -> None:
        state = Blocks(lambda _: tuple(tables))
        self.side.end_pass(Scheduled({request.request_id: tokens}, None, state))
        self.side.cache.begin_backups()

    def settle(self) -> None:
        """Complete all I/O, and run the passes that report it."""
        for _ in range(3):
            self.executor.complete()
            self.side.end_pass(Scheduled())

    def pass_by(self) -> PassResult:
        """Run an empty scheduler pass in which copies can only be cancelled, not completed."""
        self.executor.complete_only(Cancel)
        return self.side.end_pass(Scheduled())

    def filled(self) -> Sent:
        """Serve and finish a request, with backups; return a new request for the same prompt."""
        first = self.arrive(PROMPT, "first")
        self.compute(first, len(PROMPT))
        self.settle()
        self.side.finished(first, TABLES[0])
        self.settle()
        again = self.arrive([*PROMPT, 1], "again")
        self.settle()
        return again

    def load(self, request: Sent) -> None:
        assert self.side.hit(request, 0) == len(PROMPT)
        self.side.allocated(request, TABLES, len(PROMPT))
        self.side.end_pass(Scheduled())


def copied(order: CopyToHost) -> dict[str, tuple[int, ...]]:
    return {
        pool.name: tuple(
            block for each in order.transfers if each.pool == pool.name for block in each.sources
        )
        for pool in GROUPS
    }


@pytest.mark.parametrize(("tokens", "computed"), [([*PROMPT, 1], 1), (PROMPT, 2)])
def test_a_state_beyond_the_last_page_or_after_guessed_tokens_is_not_backed_up(
    tokens: list[int], computed: int
) -> None:
    """A state past the last whole page, or after speculative tokens, is not backed up."""
    scripted = Scripted()
    request = scripted.arrive(tokens, "r")

    scripted.compute(request, len(PROMPT) + computed)

    [order] = scripted.executor.given(CopyToHost)
    assert copied(order)["state"] == ()
    assert len(copied(order)["kv"]) == 4


def test_blocks_that_a_request_gives_up_while_it_runs_are_held_until_their_backup_has_ended() -> (
    None
):
    scripted = Scripted()
    request = scripted.arrive(PROMPT, "r")

    scripted.compute(request, len(PROMPT))
    assert scripted.blocks.users == PASSING
    scripted.side.end_pass(Scheduled())
    assert scripted.blocks.users == PASSING
    scripted.settle()

    assert set(scripted.blocks.users.values()) == {0}


def test_an_aborted_request_s_blocks_are_the_engine_s_at_once() -> None:
    scripted = Scripted()
    request, _ = scripted.arrive(PROMPT, "r"), scripted.arrive([9, *PROMPT], "other")
    scripted.compute(request, len(PROMPT))

    request.status = Status.FINISHED_ABORTED
    scripted.side.finished(request, TABLES[0])

    assert set(scripted.blocks.users.values()) == {0}


def test_after_a_load_that_failed_the_engine_is_offered_what_storage_still_has() -> None:
    scripted = Scripted()
    request = scripted.filled()
    scripted.load(request)

    scripted.executor.fail()
    results = [scripted.pass_by() for _ in range(3)]

    assert ("again",) in [each.failed for each in results]
    [lookup] = scripted.executor.given(LookUp)
    assert len(lookup.needs[0].keys) == 4
    assert scripted.side.hit(request, 0) is None
    for _ in range(4):
        scripted.executor.complete(lambda key: True)
        scripted.side.end_pass(Scheduled())
    assert scripted.side.hit(request, 0) == len(PROMPT)


def test_a_request_whose_loads_have_failed_twice_computes() -> None:
    scripted = Scripted()
    request = scripted.filled()
    scripted.load(request)
    scripted.executor.fail()
    for _ in range(6):
        scripted.side.end_pass(Scheduled())
        scripted.executor.complete(lambda key: True)
    scripted.load(request)

    scripted.executor.fail()
    results = [scripted.pass_by() for _ in range(3)]

    assert ("again",) in [each.failed for each in results]
    assert scripted.side.hit(request, 0) == 0
    assert scripted.executor.given(LookUp) == []


def promised(scripted: Scripted, request: Sent) -> int:
    """Return the number of tokens after which another engine can continue a finished request."""
    request.kv_transfer_params = {"do_remote_decode": True}
    handoff = scripted.side.handoff(request)
    return 0 if handoff is None else handoff.tokens


def test_another_engine_is_told_to_go_on_where_a_state_was_kept_for_it() -> None:
    """A handoff ends at a kept state, never after the whole prompt: the last token must be computed."""
    scripted = Scripted()
    whole, longer = scripted.arrive(PROMPT, "whole"), scripted.arrive([*PROMPT, 1], "longer")
    scripted.compute(whole, len(PROMPT))
    scripted.compute(longer, len(PROMPT))

    assert (promised(scripted, whole), promised(scripted, longer)) == (0, len(PROMPT))


def test_a_state_that_another_request_has_left_is_one_to_go_on_after() -> None:
    scripted = Scripted()
    again = scripted.filled()
    again.num_computed_tokens = len(PROMPT)
    tables = ([0, 12, 13, 14, 15], [21, 22, 23, 24, 25], [0, 0, 0, 0, 35])
    scripted.compute(again, 1, tables)

    assert promised(scripted, again) == len(PROMPT)
