"""Handoff between scripted engines with real servers and bytes: one computes, another continues."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from lockstep.integrations.vllm.connector_settings import HandingOver
from lockstep.ranks.page_server.page_server import HostPageServer
from lockstep.ranks.protocol.network_config import Peers
from lockstep.ranks.protocol.orders import ObjectTransfer
from lockstep.ranks.replica.device.lent_device import LentDevice
from lockstep.storage_backends.peer.connection import connect
from tests.kit.vllm.scripted import PAGE_TOKENS, ScriptedEngine, scripted
from tests.kit.vllm.sent_requests import Blocks, Scheduled, Sent, Status

TOKENS = list(range(1, 6 * PAGE_TOKENS + 3))
"""Tokens of six whole pages and half a page."""
WHOLE = 6 * PAGE_TOKENS
FOR_ANOTHER = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}
"""The parameters that vLLM's routers send with a prompt to compute for another engine."""
HASTE = HandingOver(ttl_s=0.05, patience_s=0.05)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def prefill(stack: ExitStack) -> ScriptedEngine:
    engine = stack.enter_context(scripted(peers=Peers()))
    engine.memory[:] = torch.rand_like(engine.memory)
    return engine


@pytest.fixture
def decode(stack: ExitStack) -> ScriptedEngine:
    return stack.enter_context(scripted(peers=Peers(), handing_over=HASTE))


def computed(engine: ScriptedEngine, tokens: list[int] = TOKENS, **attributes: Any) -> Any:
    engine.serve(tokens, kv_transfer_params=FOR_ANOTHER, **attributes)
    return engine.answer


def loaded(engine: ScriptedEngine, params: Any, tokens: list[int] = TOKENS) -> int:
    return engine.serve(tokens, kv_transfer_params=params).num_computed_tokens


def hit_tokens(engine: ScriptedEngine, request: Sent) -> int | None:
    found = engine.side.hit(request, 0)
    engine.rest()
    return found


def answered(engine: ScriptedEngine, request: Sent) -> int:
    while (found := hit_tokens(engine, request)) is None:
        pass
    return found


def rest_until(engine: ScriptedEngine, done: Callable[[], bool]) -> None:
    while not done():
        engine.rest()


@pytest.mark.parametrize("window_tokens", [0, PAGE_TOKENS, 2 * PAGE_TOKENS - 1])
def test_a_prompt_of_whole_pages_leaves_its_last_page_to_be_computed(
    stack: ExitStack, window_tokens: int
) -> None:
    """A handoff of whole pages omits the last page, and the window pages that only this page needs."""
    prefill, decode = (
        stack.enter_context(scripted(peers=Peers(), window_tokens=window_tokens)) for _ in range(2)
    )
    prefill.window[:] = torch.rand_like(prefill.window)
    tokens, last = TOKENS[:WHOLE], WHOLE - PAGE_TOKENS
    params = computed(prefill, tokens)
    first = decode.cache.needed_from(last).get("window", last)
    window = slice(first // PAGE_TOKENS, last // PAGE_TOKENS)

    assert params["remote_tokens"] == last
    assert loaded(decode, params, tokens) == last
    assert torch.equal(decode.window[window], prefill.window[window])


def test_a_request_waits_for_what_the_other_engine_has_only_promised(
    prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    """A decode request waits for promised pages that the prefill side has not yet computed."""
    sent = Sent(TOKENS, request_id="asks early", kv_transfer_params={})
    promised = {
        "do_remote_prefill": True,
        "remote_host": "127.0.0.1",
        "remote_port": int(prefill.cache.serving_uri.rpartition(":")[2]),
        "remote_tokens": WHOLE,
    }
    sent.kv_transfer_params = promised
    decode.side.arrived(sent)
    early = [hit_tokens(decode, sent) for _ in range(3)]
    computed(prefill)

    assert early == [None] * 3
    assert answered(decode, sent) == WHOLE


def test_a_page_that_is_lost_is_computed_with_all_that_follow(
    prefill: ScriptedEngine, decode: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = HostPageServer.serve

    def serve_four(
        self: HostPageServer, operation: int, transfers: Sequence[ObjectTransfer]
    ) -> None:
        [each] = transfers
        four = structs.replace(each, keys=each.keys[:4], pages=each.pages[:4])
        serve(
            self, operation, [four, structs.replace(each, keys=each.keys[5:], pages=each.pages[5:])]
        )

    monkeypatch.setattr(HostPageServer, "serve", serve_four)

    assert loaded(decode, computed(prefill)) == 4 * PAGE_TOKENS
    assert torch.equal(decode.memory[:4], prefill.memory[:4])


def test_an_engine_that_is_gone_costs_its_readers_one_refused_connection_and_no_patience(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected: list[str] = []

    async def counting(address: str, *arguments: Any, **options: Any) -> Any:
        connected.append(address)
        return await connect(address, *arguments, **options)

    monkeypatch.setattr("lockstep.storage_backends.peer.group.connect", counting)
    decode = stack.enter_context(
        scripted(peers=Peers(), handing_over=HandingOver(patience_s=10_000))
    )
    with scripted(peers=Peers()) as prefill:
        params = computed(prefill)

    prompts = [[100 * number + token for token in TOKENS] for number in range(3)]

    assert [loaded(decode, params, tokens) for tokens in prompts] == [0, 0, 0]
    assert len(connected) == 1


def test_where_the_other_engine_is_gone_its_store_is_asked(
    stack: ExitStack, tmp_path: Path
) -> None:
    store = f"file://{tmp_path}"
    with scripted(store, peers=Peers()) as prefill:
        params = computed(prefill)
    decode = stack.enter_context(scripted(store, peers=Peers(), handing_over=HASTE))

    assert loaded(decode, params) == WHOLE
    assert decode.sources == [{"disk": WHOLE}]


def test_what_comes_from_the_other_engine_is_told_apart_from_what_the_store_has(
    stack: ExitStack, prefill: ScriptedEngine, tmp_path: Path
) -> None:
    decode = stack.enter_context(scripted(f"file://{tmp_path}", peers=Peers()))

    loaded(decode, computed(prefill))

    assert decode.sources == [{"p2p": WHOLE}]


def test_engines_that_serve_nothing_hand_over_by_the_store(
    stack: ExitStack, tmp_path: Path
) -> None:
    prefill, decode = (stack.enter_context(scripted(f"file://{tmp_path}")) for _ in range(2))
    params = computed(prefill)

    assert params["remote_host"] is params["remote_port"] is None
    assert loaded(decode, params) == WHOLE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set `peers`, or a store"),
        ({"peers": Peers(), "backs_up": False}, "kv_role is kv_consumer, so this engine saves"),
    ],
)
def test_an_engine_that_nobody_can_read_from_says_so_once_and_promises_nothing(
    stack: ExitStack, options: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = stack.enter_context(scripted(**options))

    assert [computed(prefill), computed(prefill)] == [None, None]
    assert [message in each for each in caplog.messages] == [True]


def test_what_another_engine_did_not_say_is_no_use_and_is_computed(
    decode: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    params = {"do_remote_prefill": True, "remote_host": "a b", "remote_port": 7, "remote_tokens": 9}

    assert loaded(decode, params) == 0
    assert "remote_host is 'a b'" in caplog.text


def test_nobody_is_promised_or_waits_for_what_weights_without_a_name_have_computed(
    prefill: ScriptedEngine, decode: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    params = computed(prefill)
    for each in (prefill, decode):
        each.side.reset()
    sent = Sent(TOKENS, kv_transfer_params=params)
    decode.side.arrived(sent)

    assert hit_tokens(decode, sent) == 0
    assert computed(prefill) is None
    assert "the weights have not been named" in caplog.text


def test_of_a_request_that_was_aborted_nothing_is_served(prefill: ScriptedEngine) -> None:
    prefill.serve(TOKENS, kv_transfer_params=FOR_ANOTHER, status=Status.FINISHED_ABORTED)

    assert prefill.answer is None
    assert prefill.cache.inspection.idle


def test_what_was_promised_is_served_by_an_engine_that_stops_after_one_step(
    prefill: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host keeps promised pages if the engine, and so its agreed time, stops after one step."""
    sent = in_one_pass(prefill)
    prefill.cache.begin_backups()
    slow = iter([True] * 6)
    lends = prefill.cache.awaits_copies

    def lends_longer(name: str) -> bool:
        return next(slow, False) or lends(name)

    monkeypatch.setattr(prefill.cache, "awaits_copies", lends_longer)

    assert prefill.side.handoff(sent) is not None
    prefill.side.finished(sent, range(len(TOKENS)))
    prefill.side.settle()

    assert not prefill.side.gives
    assert sum(map(sum, prefill.cache.inspection.prefixes.allocator.ref_counts.kept_pages)) == 6


def in_one_pass(engine: ScriptedEngine) -> Sent:
    """Compute a request for another engine in a single scheduler pass."""
    sent = Sent(TOKENS, kv_transfer_params=FOR_ANOTHER)
    engine.side.arrived(sent)
    assert engine.side.hit(sent, 0) == 0
    blocks = Blocks(lambda _: (range(len(TOKENS)),))
    engine.side.end_pass(Scheduled({sent.request_id: len(TOKENS)}, None, blocks))
    return sent


def ended_before_its_copies(engine: ScriptedEngine) -> None:
    """Finish a request before any of its copies has started."""
    sent = in_one_pass(engine)
    assert engine.side.handoff(sent) is not None
    assert engine.side.finished(sent, range(len(TOKENS)))
    engine.side.end_pass(Scheduled())


def test_blocks_that_are_still_copied_are_waited_for_and_nobody_is_preempted_for_them(
    prefill: ScriptedEngine,
) -> None:
    ended_before_its_copies(prefill)
    before = prefill.side.pending_frees
    rest_until(prefill, lambda: not prefill.side.gives)

    assert (before, prefill.side.pending_frees) == (True, False)


def test_a_copy_that_hangs_keeps_no_engine_stepping(
    prefill: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs(_: LentDevice, copy: int) -> bool:
        return copy > 0

    monkeypatch.setattr(LentDevice, "_hangs", hangs)
    ended_before_its_copies(prefill)
    for _ in range(4):
        prefill.side.end_pass(Scheduled())

    assert not prefill.side.gives
    assert not prefill.side.pending_frees


def test_what_was_served_longest_gives_way_to_what_comes(
    prefill: ScriptedEngine, decode: ScriptedEngine
) -> None:
    """New handoffs evict the oldest ones, because host memory has room for four of eight prompts."""
    prompts = [[100 * number + token for token in TOKENS] for number in range(8)]

    found = [loaded(decode, computed(prefill, tokens), tokens) for tokens in prompts]

    assert found == [WHOLE] * 8


def test_what_nobody_came_for_is_held_no_longer_than_was_said(stack: ExitStack) -> None:
    prefill = stack.enter_context(scripted(peers=Peers(), handing_over=HASTE))
    kept = prefill.cache.inspection.prefixes.allocator.ref_counts.kept_pages
    params = computed(prefill)
    held = sum(map(sum, kept))
    rest_until(prefill, lambda: not sum(map(sum, kept)))

    assert params is not None
    assert held == 6
