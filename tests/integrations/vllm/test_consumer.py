"""How long, in agreed time, a request waits for pages that another engine has promised."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.integrations.vllm.consumer import PrefillConsumer
from lockstep.ranks.group.host_cache import HostCache
from lockstep.ranks.protocol.network_config import Peers

PATIENCE_S = 5.0
AN_HOUR_MS = 3_600_000
"""Agreed time in ms when the engine wakes up. In the idle hour before, agreed time did not change."""
PARAMS = {
    "do_remote_prefill": True,
    "remote_host": "10.0.0.4",
    "remote_port": 7,
    "remote_tokens": 64,
}
IN_THE_STORE = {"do_remote_prefill": True, "remote_tokens": 64}


def taking(peers: Peers | None, clock: SimpleNamespace, *, loads: bool = True) -> PrefillConsumer:
    config = SimpleNamespace(peers=peers, store=None)
    cache: Any = SimpleNamespace(inspection=clock, config=config)
    return PrefillConsumer(cast("HostCache", cache), PATIENCE_S, loads=loads)


class Waiting:
    """A waiting request, and a clock that the test sets."""

    def __init__(self) -> None:
        self.clock = SimpleNamespace(agreed_ms=1)
        self.taking = taking(Peers(), self.clock)
        taken = self.taking.arrived(PARAMS)
        assert taken is not None
        self.taken = taken

    def prefetches_again(self, after_s: float, *, found: int = 0, refused: bool = False) -> bool:
        """Return whether a request with `found` tokens prefetches again `after_s` after the wake-up."""
        self.clock.agreed_ms = AN_HOUR_MS + round(after_s * 1000)
        self.taking.waits(self.taken)
        return self.taking.prefetches_again(self.taken, found, 100, refused=refused)

    def passes(self, after_s: float | None = None) -> None:
        """Run a scheduler pass `after_s` after the wake-up, or without a change of agreed time."""
        if after_s is not None:
            self.clock.agreed_ms = AN_HOUR_MS + round(after_s * 1000)
        self.taking.waits(self.taken)


@pytest.fixture
def waiting() -> Waiting:
    waiting = Waiting()
    waiting.passes()
    waiting.passes()
    return waiting


@pytest.mark.parametrize(
    ("peers", "loads", "params", "message"),
    [
        (Peers(allow_sources=("192.0.2.0/24",)), True, PARAMS, "it is not in allow_sources"),
        (None, True, PARAMS, "set `peers` in kv_connector_extra_config"),
        (None, True, IN_THE_STORE, "set the same store, or `peers`"),
        (Peers(), False, PARAMS, "kv_role is kv_producer, so this engine loads nothing"),
    ],
)
def test_a_request_of_which_nothing_can_be_read_waits_for_nothing_and_says_why(
    peers: Peers | None,
    loads: bool,
    params: dict[str, Any],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = SimpleNamespace(agreed_ms=1)

    assert taking(peers, clock, loads=loads).arrived(params) is None
    assert "a request's pages cannot be read from " in caplog.text
    assert f": {message}" in caplog.text


def test_a_clock_that_has_stood_still_costs_no_patience(waiting: Waiting) -> None:
    assert waiting.prefetches_again(0)
    assert waiting.prefetches_again(PATIENCE_S)
    assert not waiting.prefetches_again(PATIENCE_S + 0.001)


def test_an_engine_that_refuses_to_be_read_from_is_not_waited_for(waiting: Waiting) -> None:
    assert waiting.prefetches_again(0)
    assert not waiting.prefetches_again(0, refused=True)
    assert waiting.taken.given_up


def test_the_time_that_a_lookup_takes_is_a_part_of_the_patience(waiting: Waiting) -> None:
    """A lookup's time counts towards the patience, so an unresponsive host is queried only once."""
    waiting.passes(0)
    waiting.passes(1)

    assert not waiting.prefetches_again(PATIENCE_S + 0.001)


def test_what_has_come_and_was_driven_out_is_asked_for_again(waiting: Waiting) -> None:
    waiting.passes(0)

    assert not waiting.prefetches_again(4 * PATIENCE_S, found=64)
    assert waiting.prefetches_again(5 * PATIENCE_S, found=16)
    assert not waiting.prefetches_again(6 * PATIENCE_S, found=16)


def test_what_still_comes_is_waited_for(waiting: Waiting) -> None:
    waiting.passes(0)

    assert waiting.prefetches_again(4 * PATIENCE_S, found=16)
    assert waiting.prefetches_again(5 * PATIENCE_S, found=16)
    assert not waiting.prefetches_again(5 * PATIENCE_S + 0.001, found=16)
