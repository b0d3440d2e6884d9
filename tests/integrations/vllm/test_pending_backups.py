"""Backups that find no room in host memory are retried while the engine's blocks keep the KV."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.integrations.vllm.groups import EVERY_TOKEN, GroupKind, PoolGroup
from lockstep.integrations.vllm.lent_blocks import HeldBlocks, LentBlocks
from lockstep.integrations.vllm.pending_backups import PATIENCE_S
from lockstep.ranks.protocol.orders import CopyToHost
from tests.kit.ranks.in_turn import PAGE_TOKENS, HostRanksInTurn
from tests.kit.vllm.scripted import scripted
from tests.kit.vllm.sent_requests import Blocks, CountedBlocks, Scheduled, Sent, Status
from tests.kit.vllm.sides import side_of

HOST_PAGES = 4
FIRST, SECOND = ([first, *range(4 * PAGE_TOKENS)] for first in (101, 102))
NEWEST = range(20, 24)


class Pressed:
    """A scheduler side whose host memory is full of the first prompt until the test frees it."""

    def __init__(self, host_pages: int = HOST_PAGES) -> None:
        self.ranks = HostRanksInTurn(ranks=1, host_pages=host_pages)
        self.executor = self.ranks.executors[0]
        self.pool = CountedBlocks()
        group = PoolGroup("kv", 0, GroupKind.FULL, PAGE_TOKENS, EVERY_TOKEN)
        lending = LentBlocks([group], HeldBlocks(self.pool))
        self.side = side_of(self.ranks.caches[0], lending, loads=False)
        self.first = self.compute("first", FIRST, range(4))
        self.copied()
        self.second = self.compute("second", SECOND, NEWEST)

    def compute(self, name: str, tokens: list[int], blocks: range) -> Sent:
        request = Sent(tokens, request_id=name)
        self.side.arrived(request)
        tables = Blocks(lambda _: (blocks,))
        self.side.end_pass(Scheduled({name: len(tokens)}, None, tables))
        return request

    def copied(self) -> Sequence[str]:
        """Complete the copies in flight; return the requests whose blocks are freed."""
        self.executor.complete_only(CopyToHost)
        return self.side.end_pass(Scheduled()).freed

    def make_room(self) -> list[tuple[int, ...]]:
        """Run four passes, each of which completes all I/O in flight; return the blocks backed up.

        Each tuple has the blocks of one transfer.
        """
        copies: list[CopyToHost] = []
        for _ in range(4):
            copies += self.executor.given(CopyToHost)
            self.executor.complete()
            self.side.end_pass(Scheduled())
        return [tuple(each.sources) for copy in copies for each in copy.transfers]

    @property
    def lost(self) -> dict[str, int]:
        return dict(self.side.cache.stats(rounds=0).left_unwritten_pages)


def test_a_request_that_has_ended_is_backed_up_once_there_is_room() -> None:
    """Regression (sglang#39444): a backup that found no room was dropped instead of waiting."""
    pressed = Pressed()
    held = pressed.side.finished(pressed.second, NEWEST)

    assert not held
    assert pressed.make_room() == [tuple(NEWEST)]
    assert pressed.lost == {}


def test_a_request_that_runs_is_backed_up_once_there_is_room() -> None:
    assert Pressed().make_room() == [tuple(NEWEST)]


def test_what_the_engine_has_given_to_others_is_not_copied_and_is_counted() -> None:
    pressed = Pressed()
    pressed.side.finished(pressed.second, NEWEST)

    pressed.pool.hand_out(NEWEST[2])

    assert pressed.make_room() == [tuple(NEWEST[:2])]
    assert "#2" not in pressed.side.cache.inspection.requests


def test_blocks_are_freed_of_a_backup_that_is_given_up_as_its_first_copy_ends() -> None:
    pressed = Pressed(HOST_PAGES + 2)
    held = pressed.side.finished(pressed.second, NEWEST)

    pressed.ranks.now_ms = [pressed.ranks.now_ms[0] + int(PATIENCE_S * 1000) + 1]

    assert held
    assert pressed.copied() == ("second",)


def test_no_block_is_held_while_a_backup_waits() -> None:
    """A waiting backup holds no blocks, so vLLM can reset its prefix cache and finish requests."""
    pressed = Pressed()
    pressed.side.finished(pressed.second, NEWEST)

    assert set(pressed.pool.users.values()) <= {0}
    assert not pressed.side.gives


def test_a_backup_that_comes_no_further_is_given_up_after_a_while() -> None:
    pressed = Pressed()
    pressed.side.finished(pressed.second, NEWEST)
    pressed.side.end_pass(Scheduled())

    pressed.ranks.now_ms = [pressed.ranks.now_ms[0] + int(PATIENCE_S * 1000) + 1]
    pressed.side.end_pass(Scheduled())
    pressed.side.end_pass(Scheduled())

    assert pressed.lost == {"no_host_room": 4}
    assert pressed.make_room() == []


@pytest.mark.parametrize("ends", ["aborted", "preempted", "reset"])
def test_blocks_that_may_be_overwritten_with_nobody_asking_are_not_copied(ends: str) -> None:
    pressed = Pressed()
    endings = {
        "aborted": lambda: abort(pressed),
        "preempted": lambda: pressed.side.end_pass(Scheduled({}, {"second"})),
        "reset": pressed.side.reset,
    }

    endings[ends]()

    assert pressed.make_room() == []


def abort(pressed: Pressed) -> None:
    pressed.second.status = Status.FINISHED_ABORTED
    pressed.side.finished(pressed.second, NEWEST)


@pytest.mark.parametrize("window_tokens", [0, 2 * PAGE_TOKENS - 1])
@pytest.mark.parametrize(
    "last", [[], [7], [7, 8, 9]], ids=["whole pages", "one more", "three more"]
)
@pytest.mark.parametrize(
    ("host_pages", "uri"),
    [(6, "file://{}"), (32, "fault+file://{}?fault.seed=3&fault.error=0.1")],
    ids=["little room", "the store refuses"],
)
def test_prompts_are_found_in_the_next_life(
    tmp_path: Path, window_tokens: int, last: list[int], host_pages: int, uri: str
) -> None:
    """After a restart, prompts are found again, even if host memory was small or writes failed."""
    prompts = [[first, *range(12 * PAGE_TOKENS - 1), *last] for first in (101, 102)]
    with scripted(
        uri.format(tmp_path), host_pages=host_pages, window_tokens=window_tokens
    ) as engine:
        for at, prompt in enumerate(prompts):
            engine.first_block = 16 * at
            engine.serve(prompt)
        engine.write_all()

    with scripted(f"file://{tmp_path}", window_tokens=window_tokens) as engine:
        found = [engine.serve([*each[:-1], 99]).num_computed_tokens for each in prompts]

    assert found == [(len(each) - 1) // PAGE_TOKENS * PAGE_TOKENS for each in prompts]
