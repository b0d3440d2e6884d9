"""Handoffs through Mooncake's transfer engine: complete, or recomputed if a page is missing."""

import sys
from contextlib import ExitStack
from dataclasses import replace

import pytest

from lockstep.errors import ConfigError
from lockstep.ranks.protocol.network_config import Peers
from tests.kit.ranks.pair import PAGE_TOKENS, Pair
from tests.kit.ranks.served_group import keyed
from tests.kit.servers.mooncake_master import needs_mooncake

BY_ENGINE = Peers(transfer="mooncake", insists=True)
WHOLE = 8 * PAGE_TOKENS
TOKENS = keyed(1, WHOLE + 7, PAGE_TOKENS)


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)], ids=str)
def test_a_request_goes_on_at_another_tp_size_with_all_that_it_had(
    stack: ExitStack, ranks: tuple[int, int]
) -> None:
    needs_mooncake()
    pair = Pair(stack, "hybrid-all", ranks, peers=BY_ENGINE)
    pair.compute(TOKENS, WHOLE)
    assert pair.goes_on(TOKENS) == WHOLE
    assert pair.wrong_pages(TOKENS, WHOLE) == 0


@pytest.fixture
def _without_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)


@pytest.mark.usefixtures("_without_mooncake")
def test_a_group_that_has_no_engine_hands_over_by_connections_and_says_so(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(stack, "llama", (1, 1), peers=replace(BY_ENGINE, insists=False))
    pair.compute(TOKENS, WHOLE)
    assert pair.goes_on(TOKENS) == WHOLE
    assert "pages are served over connections only: Mooncake's transfer engine" in caplog.text
    assert "the other group has no engine" in caplog.text


@pytest.mark.usefixtures("_without_mooncake")
def test_a_group_that_insists_on_an_engine_does_not_open_without_one(stack: ExitStack) -> None:
    with pytest.raises(ConfigError, match="the transfer engine that `peers` insists on failed"):
        Pair(stack, "llama", (1, 1), peers=BY_ENGINE)
