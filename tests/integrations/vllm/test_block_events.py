"""KV events have vLLM's block hashes, and match the content of host memory."""

from pathlib import Path
from weakref import ref

from lockstep.integrations.vllm.block_events import (
    NAMESPACES_MAX,
    BlockEvents,
    PagesRemoved,
    PagesStored,
)
from lockstep.ranks.protocol.events import Cause, Removed, Reset, Stored, Tier
from lockstep.ranks.protocol.orders import KV_POOL
from tests.kit.vllm.scripted import PAGE_TOKENS, ChainedHasher, ScriptedEngine, scripted
from tests.kit.vllm.sent_requests import Item, Position, Sent

PROMPT = list(range(4 * PAGE_TOKENS))
LONGER = [*PROMPT, *range(100, 100 + 2 * PAGE_TOKENS)]


def hashes(change: PagesStored | PagesRemoved) -> list[bytes]:
    if isinstance(change, PagesRemoved):
        return [*change.hashes]
    return [each for page in change.pages for each in page.hashes]


def held(events: list[PagesStored | PagesRemoved], tier: Tier = Tier.HOST) -> set[bytes]:
    """Return the block hashes that a router expects in a tier after it has received these events."""
    known: set[bytes] = set()
    for each in events:
        if each.tier is tier:
            known = (
                known | {*hashes(each)}
                if isinstance(each, PagesStored)
                else known - {*hashes(each)}
            )
    return known


def chain(engine: ScriptedEngine, request: Sent) -> list[bytes]:
    return engine.hasher.chain(request)


def test_pages_that_another_engine_has_written_are_told_once_a_request_brings_them(
    tmp_path: Path,
) -> None:
    with scripted(f"file://{tmp_path}") as engine:
        engine.serve(PROMPT)
    with scripted(f"file://{tmp_path}") as restarted:
        request = restarted.serve(LONGER)

        changes = restarted.published_events()

    assert restarted.sources == [{"disk": len(PROMPT)}]
    first, *_ = changes
    assert hashes(first) == chain(restarted, request)[:4]
    assert held(changes) == held(changes, Tier.STORAGE) == {*chain(restarted, request)}


def test_salts_and_images_are_hashed_as_the_engine_hashes_them() -> None:
    image = Item("a cat", Position(offset=PAGE_TOKENS + 1, length=PAGE_TOKENS))
    with scripted() as engine:
        requests = [
            engine.serve(PROMPT),
            engine.serve(PROMPT, cache_salt="tenant"),
            engine.serve(PROMPT, mm_features=[image]),
        ]

        changes = engine.published_events()

    chains = [chain(engine, each) for each in requests]
    assert [hashes(each) for each in changes] == chains
    assert len({each for hashed in chains for each in hashed}) == 3 * 4 - 1


def test_what_leaves_host_memory_for_others_is_taken_back_by_name() -> None:
    with scripted(host_pages=6) as engine:
        engine.serve(PROMPT)
        second = engine.serve([50 + each for each in PROMPT])

        changes = engine.published_events()
        cached = engine.cache.stats().pools[KV_POOL][Tier.HOST].cached

    known = held(changes)
    assert any(isinstance(each, PagesRemoved) for each in changes)
    assert {*chain(engine, second)} <= known
    assert len(known) == cached


def test_a_reset_takes_back_all_and_what_is_computed_anew_has_the_hashes_it_had() -> None:
    """A reset announces the removal of all blocks, because later requests cannot hit them."""
    with scripted() as engine:
        request = engine.serve(PROMPT)
        engine.published_events()

        assert engine.side.reset()
        engine.events.listen([Reset(0, None)])
        taken_back = engine.published_events()
        engine.serve(PROMPT)
        changes = engine.published_events()

    assert [type(each) for each in taken_back] == [PagesRemoved]
    assert hashes(taken_back[0]) == chain(engine, request) == hashes(changes[0])
    assert isinstance(changes[0], PagesStored)


def test_what_a_request_computes_that_waited_while_the_weights_changed_is_told() -> None:
    with scripted() as engine:
        request = engine.arrive(PROMPT)

        engine.side.weights_are("step-1")
        engine.answer_to(request)

        assert held(engine.published_events()) == {*chain(engine, request)}


def test_a_hash_may_take_in_fewer_tokens_than_a_block_has() -> None:
    hasher = ChainedHasher(hash_tokens=2, block_tokens=4)
    events = BlockEvents(hasher)
    request = Sent(PROMPT)
    events.saw(request, "", str.encode)
    tokens = b"".join(each.to_bytes(4, "little") for each in PROMPT)

    # A page of eight tokens has two vLLM blocks, so its event lists two hashes.
    events.listen([Stored(Tier.HOST, KV_POOL, 2, Cause.BACKED_UP, b"", (b"1", b"2"), tokens)])
    [change] = events.take(str.encode)

    assert hashes(change) == hasher.chain(request)


def stored(keys: tuple[bytes, ...], after: bytes) -> Stored:
    tokens = b"\0" * (4 * PAGE_TOKENS * len(keys))
    return Stored(Tier.HOST, KV_POOL, len(keys), Cause.BACKED_UP, after, keys, tokens)


def test_pages_of_before_a_reset_that_requests_still_hold_are_not_told_again() -> None:
    """After a reset, no event names an older page, because no request can match it.

    This includes pages that a request still holds.
    """
    events = BlockEvents(ChainedHasher())
    events.saw(Sent(), "", lambda _: b"old")
    events.listen([stored((b"1",), b"old"), Reset(1, None)])

    first = [*events.take(lambda _: b"new")]
    events.listen([stored((b"2",), b"1"), Removed(Tier.HOST, KV_POOL, 1, Cause.ROOM, (b"1",))])
    later = [*events.take(lambda _: b"new")]

    assert [type(each) for each in first] == [PagesStored, PagesRemoved]
    assert later == []


def test_of_two_pages_of_one_key_the_first_to_leave_takes_nothing_back() -> None:
    """If two pages have one key, evicting the first sends no removal: the second is still cached."""
    events = BlockEvents(ChainedHasher())
    events.saw(Sent(), "", lambda _: b"")
    gone = Removed(Tier.HOST, KV_POOL, 1, Cause.ROOM, (b"1",))
    events.listen([stored((b"1",), b""), stored((b"1", b"2"), b""), gone])

    first = [*events.take(lambda _: b"")]
    events.listen([gone])
    later = [*events.take(lambda _: b"")]

    assert [len(hashes(each)) for each in first] == [1, 1]
    assert [type(each) for each in later] == [PagesRemoved]


def test_a_namespace_keeps_nothing_of_an_image_but_what_is_hashed() -> None:
    """A remembered namespace must not keep an image's pixels in memory."""
    events, image = BlockEvents(ChainedHasher()), Item("cat", Position(0, PAGE_TOKENS))
    pixels = ref(image)

    events.saw(Sent(mm_features=[image]), "of the image", str.encode)
    del image

    assert pixels() is None


def test_salts_without_end_do_not_fill_memory() -> None:
    events = BlockEvents(ChainedHasher())
    for salt in range(NAMESPACES_MAX + 1):
        events.saw(Sent(), str(salt), str.encode)

    events.listen([stored((b"1",), b"0"), stored((b"2",), b"1")])

    # Only `NAMESPACES_MAX` namespaces are remembered. The namespace of the first page was dropped, so
    # only the second page has an event.
    assert len([*events.take(str.encode)]) == 1
