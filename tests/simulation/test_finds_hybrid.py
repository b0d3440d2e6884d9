"""Planted bugs of hybrid models: the simulator must find each of them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lockstep.ranks.protocol.orders import KV_POOL, Fork, Order
from lockstep.ranks.replica.core.pages import PageRun
from lockstep.ranks.replica.tree.components import RecurrentComponent, SlidingWindowComponent
from lockstep.simulation.rank.conditions import ObjectPage
from lockstep.simulation.rank.executor import SimulatedExecutor
from tests.kit.planted_bugs import assert_found, making, seeds_from, violations

GEMMA, QWEN_NEXT = "gemma", "qwen-next"
WINDOW = "window"

# Planted bugs of every rank's replica.


def test_a_window_that_is_a_page_too_short_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: a window is one page too short, so that its layers would read a reused page."""

    def needed_from(self: SlidingWindowComponent, end: int) -> int:
        assert self.span is not None
        return max(0, min(end, end - self.span + 1))

    monkeypatch.setattr(SlidingWindowComponent, "needed_from", needed_from)
    assert_found(violations(profile=GEMMA), "page table of pool 'window'")


def test_a_state_that_stays_with_the_wrong_half_of_a_split_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def split(
        self: RecurrentComponent, run: PageRun, pages: int
    ) -> tuple[PageRun | None, PageRun | None]:
        del self, pages
        return run, None

    monkeypatch.setattr(RecurrentComponent, "split", split)
    assert_found(violations(profile=QWEN_NEXT), "the tree offers device state page")


# Planted bugs of one rank's executor.


class _Forgetful(SimulatedExecutor):
    """Planted bug: checkpoints are never copied, so a request continues from a wrong state."""

    def carry_out(self, orders: Sequence[Order]) -> None:
        super().carry_out([order for order in orders if not isinstance(order, Fork)])


class _WrongPool(SimulatedExecutor):
    """Planted bug: reads of window pages get full-attention objects, as both have the same keys."""

    def _read_object(self, page: ObjectPage) -> int | None:
        return super()._read_object(replace(page, pool=KV_POOL) if page.pool == WINDOW else page)


def test_a_checkpoint_that_is_never_copied_is_found() -> None:
    found = violations(profile=QWEN_NEXT, build=making(_Forgetful))
    assert_found(found, "state page")


@seeds_from(8)
def test_a_page_of_full_attention_where_one_of_a_window_belongs_is_found(seeds: range) -> None:
    found = violations(profile=GEMMA, faults="storage", build=making(_WrongPool), seeds=seeds)
    assert_found(found, "the tree offers host window page")
