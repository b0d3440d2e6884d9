"""Requests handed over by Mooncake's transfer engine: whole, or computed where they are not."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from lockstep.errors import ConfigError
from lockstep.ranks.protocol.outside import Peers
from tests.kit.ranks.pair import PAGE_TOKENS, Pair, config_of
from tests.kit.ranks.served_group import ServedGroup, keyed
from tests.kit.servers.mooncake_master import needs_mooncake
from tests.ranks.page_server.test_handing_over import flip

BY_ENGINE = Peers(transfer="mooncake", insists=True)
WHOLE = 8 * PAGE_TOKENS
TOKENS = keyed(1, WHOLE + 7, PAGE_TOKENS)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)], ids=str)
def test_a_request_goes_on_at_another_tp_size_with_all_that_it_had(
    stack: ExitStack, ranks: tuple[int, int]
) -> None:
    needs_mooncake()
    pair = Pair(stack, "hybrid-all", ranks, peers=BY_ENGINE)
    pair.compute(TOKENS, WHOLE)
    assert pair.goes_on(TOKENS) == WHOLE
    assert pair.wrong_pages(TOKENS, WHOLE) == 0


def test_pages_of_one_rank_that_change_once_they_were_read_are_a_miss_on_every_rank(
    stack: ExitStack,
) -> None:
    needs_mooncake()
    pair = Pair(stack, "hybrid-all", (2, 1), peers=BY_ENGINE)
    # Their checksums are those of the bytes that the first group reads.
    pair.compute(TOKENS, WHOLE)
    assert pair.goes_on(TOKENS) == WHOLE
    flip(pair.prefill, "kv", rank=1)
    config = replace(config_of("hybrid-all"), peers=BY_ENGINE)
    pair.decode = stack.enter_context(closing(ServedGroup(config, 2)))

    assert pair.goes_on(TOKENS) == 0
    assert pair.wrong_pages(TOKENS, 0) == 0


@pytest.fixture
def _without_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)


@pytest.mark.usefixtures("_without_mooncake")
def test_a_group_that_has_no_engine_hands_over_by_connections_and_says_so(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(stack, "llama", (1, 1), peers=replace(BY_ENGINE, insists=False))
    pair.compute(TOKENS, WHOLE)
    assert pair.goes_on(TOKENS) == WHOLE
    assert "pages are served over connections alone: Mooncake's transfer engine" in caplog.text
    assert "the other group has none" in caplog.text


@pytest.mark.usefixtures("_without_mooncake")
def test_a_group_that_insists_on_an_engine_does_not_open_without_one(stack: ExitStack) -> None:
    with pytest.raises(ConfigError, match="pages cannot be served as `peers` insists"):
        Pair(stack, "llama", (1, 1), peers=BY_ENGINE)
