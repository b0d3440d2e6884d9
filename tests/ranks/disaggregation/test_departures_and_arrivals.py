"""Handoffs as groups do them: messages, manifests, receipts, and what is done where one falls short."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import pytest

from lockstep.errors import UsageError
from lockstep.ranks.cache import Cache
from lockstep.ranks.config import CacheConfig, Timeouts
from lockstep.ranks.disaggregation.arrivals import Arrivals, Outcome
from lockstep.ranks.disaggregation.control import (
    Announce,
    Control,
    Receipt,
    Resend,
    Withdrawn,
    encode,
)
from lockstep.ranks.disaggregation.departures import AGAIN_MS_MIN, Departures
from lockstep.ranks.disaggregation.manifest import HandoffManifest
from lockstep.ranks.outside import Peers
from lockstep.small_engine.forward_pass import ForwardPass, TokenSpan
from lockstep.small_engine.profiles import find_profile
from tests.kit.ranks.handoffs import (
    FIRST_TOKEN,
    Post,
    Reception,
    Tamper,
    compute_and_leave,
    steps,
    take_up,
    terms_of,
)
from tests.kit.ranks.served_group import ServedGroup, keyed

PAGE_TOKENS = 16
NAME = "r"
CHUNKS = (2 * PAGE_TOKENS, 4 * PAGE_TOKENS)
TOKENS = keyed(1, 5 * PAGE_TOKENS + 7, PAGE_TOKENS)
LENGTH = len(TOKENS.ids)


def config_of(store: str | None, profile: str = "hybrid-all") -> CacheConfig:
    found = find_profile(profile)
    return CacheConfig(
        model=found.name,
        layout=found.layout(PAGE_TOKENS),
        components=found.components(PAGE_TOKENS, 64, 128),
        device_pages=64,
        host_pages=128,
        store=store,
        peers=None if store else Peers(),
    )


def as_it_is(message: Control) -> Control:
    return message


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def hand_over(
    stack: ExitStack,
    *,
    ranks: tuple[int, int] = (2, 2),
    store: str | None = None,
    tamper: Tamper = as_it_is,
    weights_version: str = "0",
    patience_s: float = 10.0,
) -> tuple[dict[str, int], Reception]:
    """Hand one request over; return what the first group counted, and how the second took it up."""
    config = config_of(store)
    other = replace(config, weights_version=weights_version)
    groups = {
        "prefill": stack.enter_context(closing(ServedGroup(config, ranks[0]))),
        "decode": stack.enter_context(closing(ServedGroup(other, ranks[1]))),
    }
    post = Post(groups, tamper)
    coming = groups["decode"].begin(take_up(NAME, TOKENS, post, patience_s=patience_s))
    leaving = groups["prefill"].begin(
        compute_and_leave(NAME, TOKENS, CHUNKS, post, directly=store is None)
    )
    receptions = [each.result(60) for each in coming]
    outcomes = [each.result(60) for each in leaving]
    assert len(set(receptions)) == 1
    assert all(each == outcomes[0] for each in outcomes)
    return outcomes[0], receptions[0]


WHOLE = Reception(LENGTH, 0, Outcome.OK, FIRST_TOKEN, ())


@pytest.mark.parametrize("store", [None, "memory://departures"], ids=["directly", "by a store"])
@pytest.mark.parametrize("ranks", [(2, 2), (2, 1), (1, 2)], ids=str)
def test_a_request_arrives_with_all_that_it_had_and_its_offer_ends_with_a_receipt(
    stack: ExitStack, ranks: tuple[int, int], store: str | None
) -> None:
    told, reception = hand_over(
        stack, ranks=ranks, store=store and f"{store}-{ranks[0]}-{ranks[1]}"
    )
    assert reception == WHOLE
    assert told == {"received": 1}


def test_what_a_store_damages_or_loses_is_asked_for_again_or_computed(stack: ExitStack) -> None:
    store = "fault+memory://departures-faults?fault.seed=5&fault.flip=0.15&fault.lost=0.1"
    told, reception = hand_over(stack, store=store)
    assert reception.wrong_pages == 0
    assert told == {"received": 1}


def test_a_source_that_nobody_serves_costs_the_hit_and_not_the_request(stack: ExitStack) -> None:
    def tamper(message: Control) -> Control:
        elsewhere: dict[str, Any] = {"source": "peer://127.0.0.1:1"}
        has_source = isinstance(message, HandoffManifest | Announce)
        return replace(message, **elsewhere) if has_source else message

    told, reception = hand_over(stack, tamper=tamper)
    assert reception == Reception(0, 0, Outcome.RECOMPUTED, None, ())
    assert told == {"received": 1}


def test_a_group_that_is_heard_of_no_more_is_waited_for_no_longer_than_agreed(
    stack: ExitStack,
) -> None:
    _, reception = hand_over(
        stack,
        tamper=lambda message: None if isinstance(message, HandoffManifest) else message,
        patience_s=0.2,
    )
    assert reception.wrong_pages == 0
    assert reception.outcome is Outcome.RECOMPUTED


@pytest.mark.parametrize(
    ("field", "value", "refusal"),
    [
        ("weights_version", "other", "weights"),
        ("layout_fingerprint", "0" * 64, "layout"),
        ("namespace_digest", "0" * 64, "namespace"),
        ("tail_key", b"0" * 32, "namespace"),
        ("tokens", LENGTH - 1, "namespace"),
    ],
)
def test_a_manifest_of_something_else_is_refused_by_name_and_the_request_computed(
    stack: ExitStack, field: str, value: Any, refusal: str
) -> None:
    def tamper(message: Control) -> Control:
        is_manifest = isinstance(message, HandoffManifest)
        return replace(message, **{field: value}) if is_manifest else message

    _, reception = hand_over(stack, tamper=tamper)
    assert reception.refusals == (refusal,)
    assert reception.wrong_pages == 0
    assert reception.outcome is Outcome.RECOMPUTED


def test_a_group_with_other_weights_takes_nothing_and_computes(stack: ExitStack) -> None:
    _, reception = hand_over(stack, weights_version="1")
    assert reception == Reception(0, 0, Outcome.RECOMPUTED, None, ("weights",))


GONE = "peer://127.0.0.1:1"
"""A source that nobody serves."""


def stored(stack: ExitStack, store: str) -> CacheConfig:
    """Let a group write the whole pages of the prompt to a store; return what it was opened with."""
    config = replace(config_of(store, "llama"), peers=Peers())
    group = stack.enter_context(closing(ServedGroup(config, 1)))
    group.admit(NAME, keyed(1, 0, PAGE_TOKENS), reserve=LENGTH)
    group.compute(NAME, TOKENS, 0, LENGTH)
    group.until(lambda cache: cache.inspection.idle)
    return config


@pytest.mark.parametrize(
    "messages", [(Withdrawn(request=NAME),), ()], ids=["withdrawn", "heard of no more"]
)
def test_what_the_other_group_has_no_more_the_own_store_may_have(
    stack: ExitStack, messages: tuple[Control, ...]
) -> None:
    config = stored(stack, f"memory://arrivals-without-a-group-{len(messages)}")
    prefill = stack.enter_context(closing(ServedGroup(config, 1)))
    decode = stack.enter_context(closing(ServedGroup(config, 1)))
    post = Post({"prefill": prefill, "decode": decode})
    coming = decode.begin(take_up(NAME, TOKENS, post, patience_s=0.3))

    for message in (Announce(request=NAME, tokens=0, source=GONE), *messages):
        decode.post(encode(message))

    whole = LENGTH // PAGE_TOKENS * PAGE_TOKENS
    assert coming[0].result(60) == Reception(whole, 0, Outcome.RECOMPUTED, None, ())


def test_a_request_that_no_other_group_computes_is_refused_without_a_word(stack: ExitStack) -> None:
    group = stack.enter_context(closing(ServedGroup(config_of(None), 1)))
    cache, said = group.caches[0], list[tuple[str, Control]]()
    arrivals = Arrivals(cache, terms_of(cache), lambda to, message: said.append((to, message)))

    arrivals.refuse("alone", "")
    arrivals.refuse("handed over", "prefill")

    assert said == [("prefill", Withdrawn(request="handed over"))]


def test_a_group_that_is_lost_while_it_is_read_from_is_asked_for_nothing_more(
    stack: ExitStack,
) -> None:
    group = stack.enter_context(closing(ServedGroup(config_of(None), 2)))
    ids = TOKENS.ids
    said: list[Control] = []

    def program(cache: Cache, _forward: ForwardPass) -> dict[Outcome, int]:
        terms = terms_of(cache)
        # Nobody answers here, and the test would wait as long as this for it.
        arrivals = Arrivals(cache, terms, lambda to, message: said.append(message), patience_s=1e6)
        end_key, tail_key = cache.keys(ids)
        manifest = HandoffManifest(
            request=NAME,
            namespace_digest=terms.namespace_digest,
            namespace="",
            weights_version=terms.weights_version,
            layout_fingerprint=terms.layout_fingerprint,
            tokens=LENGTH,
            end_key=end_key,
            tail_key=tail_key,
            pools=(),
            first_token=FIRST_TOKEN,
            source=GONE,
        )
        arrivals.expect(NAME, ids, "prefill")
        arrivals.hear(manifest)
        arrivals.step()
        arrivals.hear(Withdrawn(request=NAME))
        steps(cache, arrivals.hear, lambda: bool(arrivals.step()))
        return dict(arrivals.outcomes)

    ranks = [each.result(60) for each in group.begin(program)]
    assert ranks == [{Outcome.RECOMPUTED: 1}] * 2
    assert said == [Receipt(request=NAME)] * 2


def test_a_group_that_is_asked_to_offer_anew_has_its_time_however_long_the_fetches_took(
    stack: ExitStack,
) -> None:
    group = stack.enter_context(closing(ServedGroup(config_of(None), 1)))
    ids, patience_ms = TOKENS.ids, 200
    asked_ms: list[int] = []

    def program(cache: Cache, _forward: ForwardPass) -> int:
        terms, seen = terms_of(cache), cache.inspection

        def send(_to: str, message: Control) -> None:
            asked_ms.extend([seen.agreed_ms] if isinstance(message, Resend) else [])

        arrivals = Arrivals(cache, terms, send, patience_s=patience_ms / 1000)
        end_key, tail_key = cache.keys(ids)
        steps(cache, arrivals.hear, lambda: seen.agreed_ms > 0)
        arrivals.expect(NAME, ids, "prefill")
        arrivals.hear(
            HandoffManifest(
                request=NAME,
                namespace_digest=terms.namespace_digest,
                namespace="",
                weights_version=terms.weights_version,
                layout_fingerprint=terms.layout_fingerprint,
                tokens=LENGTH,
                end_key=end_key,
                tail_key=tail_key,
                pools=(),
                first_token=FIRST_TOKEN,
                source=GONE,
            )
        )
        arrivals.step()
        until_ms = seen.agreed_ms + 2 * patience_ms
        steps(cache, arrivals.hear, lambda: seen.agreed_ms > until_ms)
        steps(cache, arrivals.hear, lambda: bool(arrivals.step()))
        return seen.agreed_ms - asked_ms[0]

    assert [each.result(60) > patience_ms for each in group.begin(program)] == [True]


def test_what_the_other_group_cannot_give_is_asked_of_the_own_store_before_it_is_computed(
    stack: ExitStack,
) -> None:
    config = stored(stack, "memory://arrivals-without-a-source")
    prefill = stack.enter_context(closing(ServedGroup(config, 1)))
    decode = stack.enter_context(closing(ServedGroup(config, 1)))

    def tamper(message: Control) -> Control:
        elsewhere: dict[str, Any] = {"source": GONE}
        has_source = isinstance(message, HandoffManifest | Announce)
        return replace(message, **elsewhere) if has_source else message

    post = Post({"prefill": prefill, "decode": decode}, tamper)
    coming = decode.begin(take_up(NAME, TOKENS, post))
    leaving = prefill.begin(compute_and_leave(NAME, TOKENS, CHUNKS, post, directly=True))

    whole = LENGTH // PAGE_TOKENS * PAGE_TOKENS
    assert coming[0].result(60) == Reception(whole, 0, Outcome.RECOMPUTED, None, ())
    assert leaving[0].result(60) == {"received": 1}


def test_nobody_is_waited_for_longer_than_the_group_allows_whatever_an_arrival_says(
    stack: ExitStack,
) -> None:
    group = stack.enter_context(closing(ServedGroup(config_of(None), 2)))

    def program(cache: Cache, _forward: ForwardPass) -> dict[Outcome, int]:
        arrivals = Arrivals(cache, terms_of(cache), lambda to, message: None, patience_s=0.1)
        arrivals.expect(NAME, TOKENS.ids, "prefill", patience_ms=1 << 40)
        steps(cache, arrivals.hear, lambda: bool(arrivals.step()))
        return dict(arrivals.outcomes)

    ranks = [each.result(60) for each in group.begin(program)]
    assert ranks == [{Outcome.RECOMPUTED: 1}] * 2


def test_a_group_that_is_heard_of_and_computes_nothing_is_not_waited_for_for_ever(
    stack: ExitStack,
) -> None:
    group = stack.enter_context(closing(ServedGroup(config_of(None), 2)))

    def program(cache: Cache, _forward: ForwardPass) -> dict[Outcome, int]:
        arrivals = Arrivals(cache, terms_of(cache), lambda to, message: None, patience_s=0.02)
        arrivals.expect(NAME, TOKENS.ids, "prefill")

        def has_arrived() -> bool:
            arrivals.hear(Announce(request=NAME, tokens=0))
            return bool(arrivals.step())

        steps(cache, arrivals.hear, has_arrived)
        return dict(arrivals.outcomes)

    ranks = [each.result(60) for each in group.begin(program)]
    assert ranks == [{Outcome.RECOMPUTED: 1}] * 2


def test_a_request_whose_tail_the_device_has_no_page_for_can_never_be_admitted(
    stack: ExitStack,
) -> None:
    config = config_of("memory://departures-full", "llama")
    tokens = keyed(3, 16 * PAGE_TOKENS + 5, PAGE_TOKENS)
    small = replace(config, device_pages=16)
    groups = {
        "prefill": stack.enter_context(closing(ServedGroup(config, 1))),
        "decode": stack.enter_context(closing(ServedGroup(small, 1))),
    }
    post = Post(groups, as_it_is)

    def program(cache: Cache, _forward: ForwardPass) -> str:
        arrivals = Arrivals(cache, terms_of(cache), post.sender(cache))
        arrivals.expect(NAME, tokens.ids, "prefill")
        steps(cache, arrivals.hear, lambda: bool(arrivals.step()))
        with pytest.raises(UsageError) as refused:
            cache.load_back(NAME, tokens.ids)
        return str(refused.value)

    leaving = groups["prefill"].begin(
        compute_and_leave(NAME, tokens, (4 * PAGE_TOKENS,), post, directly=False)
    )
    assert "needs 17 device pages" in groups["decode"].begin(program)[0].result(60)
    assert leaving[0].result(60) == {"received": 1}


def test_who_waits_for_a_request_hears_of_it_while_the_request_waits_for_its_turn(
    stack: ExitStack,
) -> None:
    group = stack.enter_context(closing(ServedGroup(config_of(None), 2)))
    patience_ms = 4 * AGAIN_MS_MIN

    def program(cache: Cache, _forward: ForwardPass) -> tuple[bool, dict[Outcome, int]]:
        terms, seen = terms_of(cache), cache.inspection
        arrivals = Arrivals(cache, terms, lambda to, message: None, patience_s=1e6)
        departures = Departures(
            cache, terms, lambda to, message: arrivals.hear(message), directly=True
        )
        steps(cache, arrivals.hear, lambda: seen.agreed_ms > 0)
        arrivals.expect(NAME, TOKENS.ids, "prefill", patience_ms=patience_ms)
        departures.begin(NAME, "decode", patience_ms=patience_ms)
        until_ms = seen.agreed_ms + 3 * patience_ms // 2

        def time_is_over() -> bool:
            departures.step()
            arrivals.step()
            return seen.agreed_ms > until_ms

        steps(cache, arrivals.hear, time_is_over)
        waited = NAME in arrivals
        steps(cache, arrivals.hear, lambda: bool(arrivals.step()))
        return waited, dict(arrivals.outcomes)

    ranks = [each.result(60) for each in group.begin(program)]
    assert ranks == [(True, {Outcome.RECOMPUTED: 1})] * 2


def test_what_goes_out_no_further_is_let_go_of_though_nobody_says_so(stack: ExitStack) -> None:
    group = stack.enter_context(closing(ServedGroup(config_of(None), 2)))
    ids = TOKENS.ids

    def program(cache: Cache, forward: ForwardPass) -> tuple[list[str], dict[str, int]]:
        departures = Departures(
            cache, terms_of(cache), lambda to, message: None, directly=True, ttl_s=0.1
        )
        cache.load_back(NAME, ids[:0], reserve_tokens=LENGTH)
        departures.begin(NAME, "decode")
        forward.compute([TokenSpan(request=NAME, tokens=TOKENS, start=0, stop=CHUNKS[0])])
        cache.insert(NAME, ids[: CHUNKS[0]], final=False)
        departures.computed(NAME, ids[: CHUNKS[0]])
        gone: list[str] = []

        def is_let_go() -> bool:
            gone.extend(departures.step())
            return bool(gone)

        steps(cache, departures.hear, is_let_go)
        cache.abort(NAME)
        return gone, dict(departures.outcomes)

    ranks = [each.result(60) for each in group.begin(program)]
    assert ranks == [([NAME], {"expired": 1})] * 2


def test_a_reader_that_stalls_is_cut_off_before_its_pages_count_as_lost(stack: ExitStack) -> None:
    config = replace(config_of(None), timeouts=Timeouts(quiesce_s=1.0))
    group = stack.enter_context(closing(ServedGroup(config, 1)))
    executor: Any = group.caches[0].inspection.executor
    assert executor._server_of_pages._bounds.quiet_s == 0.5
