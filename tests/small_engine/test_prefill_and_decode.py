"""A workload that one group prefills and another decodes: every page is compared where it arrives."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import islice

import pytest

from lockstep.ranks.cache import Cache
from lockstep.ranks.config import CacheConfig
from lockstep.ranks.disaggregation.arrivals import Arrivals, Outcome
from lockstep.ranks.disaggregation.control import encode
from lockstep.ranks.disaggregation.departures import Departures
from lockstep.ranks.outside import Peers
from lockstep.small_engine.decode_scheduler import DecodeScheduler
from lockstep.small_engine.forward_pass import ForwardPass
from lockstep.small_engine.handed_requests import arrival_of
from lockstep.small_engine.limits import EngineLimits
from lockstep.small_engine.prefill_scheduler import PrefillScheduler
from lockstep.small_engine.profiles import find_profile
from lockstep.small_engine.request import WorkloadRequest
from lockstep.small_engine.workload import synthetic_requests
from tests.kit.ranks.handoffs import Post, terms_of
from tests.kit.ranks.served_group import ServedGroup

PAGE_TOKENS = 64
REQUESTS = 8
DEVICE_PAGES = 96
SHORT_PAGES = 40
ALL_RECEIVED = {"received": REQUESTS}


def config_of(profile: str, *, store: str | None, device_pages: int = DEVICE_PAGES) -> CacheConfig:
    found = find_profile(profile)
    return CacheConfig(
        model=found.name,
        layout=found.layout(PAGE_TOKENS),
        components=found.components(PAGE_TOKENS, device_pages, 256),
        device_pages=device_pages,
        host_pages=256,
        store=store,
        peers=None if store else Peers(),
    )


def limits(device_pages: int = DEVICE_PAGES, output_tokens_max: int = 6) -> EngineLimits:
    return EngineLimits(
        concurrency=REQUESTS,
        page_tokens=PAGE_TOKENS,
        device_pages=device_pages,
        prefill_tokens=512,
        output_tokens_max=output_tokens_max,
        idle_s=0.002,
        idle_steps_max=20_000,
    )


@dataclass(frozen=True)
class Served:
    """What a rank of the group that decodes has counted."""

    requests: int
    corrupt: int
    compared: int
    outcomes: tuple[tuple[Outcome, int], ...]
    retracted: int = 0
    not_resumed: int = 0


@dataclass(frozen=True)
class Left:
    """What a rank of the group that prefills has counted."""

    outcomes: dict[str, int]
    computed_tokens: int


def prefills(post: Post, *, directly: bool) -> Callable[[Cache, ForwardPass], Left]:
    def program(cache: Cache, _: ForwardPass) -> Left:
        departures = Departures(
            cache, terms_of(cache), post.sender(cache), directly=directly, ttl_s=20.0
        )
        scheduler = PrefillScheduler(
            cache,
            departures,
            limits(),
            stopped=lambda: departures.outcomes.total() == REQUESTS,
        )
        scheduler.run()
        return Left(dict(departures.outcomes), scheduler.counts.computed_tokens)

    return program


def decodes(
    post: Post,
    bounds: EngineLimits | None = None,
    stopped: Callable[[DecodeScheduler], bool] = lambda all_of: all_of.counts.requests == REQUESTS,
) -> Callable[[Cache, ForwardPass], Served]:
    def program(cache: Cache, _: ForwardPass) -> Served:
        arrivals = Arrivals(cache, terms_of(cache), post.sender(cache), patience_s=20.0)
        scheduler = DecodeScheduler(
            cache,
            arrivals,
            bounds or limits(),
            stopped=lambda: stopped(scheduler),
        )
        scheduler.run()
        pools = scheduler.counts.pools.values()
        return Served(
            requests=scheduler.counts.requests,
            corrupt=sum(each.pages_corrupt for each in pools),
            compared=sum(each.pages_verified for each in pools),
            outcomes=tuple(sorted(arrivals.outcomes.items())),
            retracted=scheduler.counts.retractions,
            not_resumed=scheduler.counts.retractions - scheduler.counts.resumes,
        )

    return program


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def workload() -> list[WorkloadRequest]:
    return list(islice(synthetic_requests(seed=3), REQUESTS))


def growing() -> list[WorkloadRequest]:
    """Return requests of six pages that have sixteen in the end."""
    return [
        WorkloadRequest(index=n, prompt_length=350 + n, output_length=650, hash_ids=(n,))
        for n in range(REQUESTS)
    ]


@pytest.mark.parametrize("store", [None, "memory://prefill-decode"], ids=["directly", "by a store"])
@pytest.mark.parametrize(
    ("profile", "ranks"), [("hybrid-all", (2, 2)), ("hybrid-all", (2, 1)), ("llama", (1, 2))]
)
def test_every_request_goes_on_with_the_right_bytes(
    stack: ExitStack, profile: str, ranks: tuple[int, int], store: str | None
) -> None:
    config = config_of(profile, store=store and f"{store}-{profile}-{ranks[0]}-{ranks[1]}")
    groups = {
        "prefill": stack.enter_context(closing(ServedGroup(config, ranks[0]))),
        "decode": stack.enter_context(closing(ServedGroup(config, ranks[1]))),
    }
    post = Post(groups)
    leaving = groups["prefill"].begin(prefills(post, directly=store is None))
    coming = groups["decode"].begin(decodes(post))
    for request in workload():
        groups["decode"].post(encode(arrival_of(request, "prefill")))
        groups["prefill"].post(encode(arrival_of(request, "decode")))
    assert [each.result(100).outcomes for each in leaving] == [ALL_RECEIVED] * ranks[0]
    told = [each.result(100) for each in coming]
    assert [replace(each, compared=0, retracted=0) for each in told] == [
        Served(REQUESTS, 0, 0, ((Outcome.OK, REQUESTS),))
    ] * ranks[1]
    assert min(each.compared for each in told) > REQUESTS


@pytest.mark.parametrize("profile", ["llama", "hybrid-all"])
def test_a_group_under_pressure_puts_aside_what_it_was_handed_and_loses_none_of_it(
    stack: ExitStack, profile: str
) -> None:
    small = config_of(profile, store=None, device_pages=SHORT_PAGES)
    groups = {
        "prefill": stack.enter_context(closing(ServedGroup(config_of(profile, store=None), 1))),
        "decode": stack.enter_context(closing(ServedGroup(small, 2))),
    }
    post = Post(groups)
    leaving = groups["prefill"].begin(prefills(post, directly=True))
    coming = groups["decode"].begin(decodes(post, limits(SHORT_PAGES, output_tokens_max=0)))

    for request in growing():
        groups["decode"].post(encode(arrival_of(request, "prefill")))
        groups["prefill"].post(encode(arrival_of(request, "decode")))

    assert leaving[0].result(100).outcomes == ALL_RECEIVED
    told = [each.result(100) for each in coming]
    assert [replace(each, compared=0, retracted=0) for each in told] == [
        Served(REQUESTS, 0, 0, ((Outcome.OK, REQUESTS),))
    ] * 2
    assert min(each.retracted for each in told) > 0


def refuses(
    post: Post, heard: threading.Event, is_over: threading.Event
) -> Callable[[Cache, ForwardPass], int]:
    """Return the program of a rank that refuses every request, and says when it has heard of all."""

    def program(cache: Cache, _: ForwardPass) -> int:
        arrivals = Arrivals(cache, terms_of(cache), post.sender(cache), patience_s=20.0)

        def is_stopped() -> bool:
            if scheduler.counts.refused == REQUESTS:
                heard.set()
            return is_over.is_set()

        scheduler = DecodeScheduler(cache, arrivals, limits(device_pages=1), stopped=is_stopped)
        scheduler.run()
        return scheduler.counts.refused

    return program


@pytest.mark.parametrize("order", [("prefill", "decode"), ("decode", "prefill")], ids=str)
def test_a_request_that_is_too_long_to_go_on_is_offered_to_nobody(
    stack: ExitStack, order: tuple[str, str]
) -> None:
    config = config_of("llama", store=None)
    groups = {name: stack.enter_context(closing(ServedGroup(config, 1))) for name in order}
    post, heard, is_over = Post(groups), threading.Event(), threading.Event()
    waits_for = {"decode": heard, "prefill": threading.Event()}
    waits_for["prefill"].set()
    leaving = groups["prefill"].begin(prefills(post, directly=True))
    coming = groups["decode"].begin(refuses(post, heard, is_over))

    for name, partner in zip(order, reversed(order), strict=True):
        for request in workload():
            groups[name].post(encode(arrival_of(request, partner)))
        waits_for[name].wait(60)
    left = leaving[0].result(100)
    is_over.set()

    assert left.outcomes == {"withdrawn": REQUESTS}
    assert coming[0].result(100) == REQUESTS


def of_tenants() -> list[WorkloadRequest]:
    """Return requests of as many tenants, which all have the same prompt."""
    return [
        WorkloadRequest(
            index=n, prompt_length=350, output_length=4, hash_ids=(7,), namespace=f"tenant-{n}"
        )
        for n in range(REQUESTS)
    ]


def test_tenants_with_the_same_prompt_share_nothing_where_it_is_computed(stack: ExitStack) -> None:
    config = config_of("hybrid-all", store=None)
    groups = {
        name: stack.enter_context(closing(ServedGroup(config, 1))) for name in ("prefill", "decode")
    }
    post = Post(groups)
    leaving = groups["prefill"].begin(prefills(post, directly=True))
    coming = groups["decode"].begin(decodes(post))

    for request in of_tenants():
        groups["decode"].post(encode(arrival_of(request, "prefill")))
        groups["prefill"].post(encode(arrival_of(request, "decode")))

    assert leaving[0].result(100) == Left(ALL_RECEIVED, 350 * REQUESTS)
    told = replace(coming[0].result(100), compared=0, retracted=0)
    assert told == Served(REQUESTS, 0, 0, ((Outcome.OK, REQUESTS),))


def test_a_group_that_has_as_many_requests_as_it_may_have_refuses_more(stack: ExitStack) -> None:
    config = config_of("llama", store=None)
    groups = {
        name: stack.enter_context(closing(ServedGroup(config, 1))) for name in ("prefill", "decode")
    }
    post, is_over = Post(groups), threading.Event()
    bounds = replace(limits(), requests_max=REQUESTS - 3)

    for request in workload():
        groups["decode"].post(encode(arrival_of(request, "prefill")))
    coming = groups["decode"].begin(decodes(post, bounds, lambda _: is_over.is_set()))
    leaving = groups["prefill"].begin(prefills(post, directly=True))
    for request in workload():
        groups["prefill"].post(encode(arrival_of(request, "decode")))
    left = leaving[0].result(100)
    is_over.set()

    assert left.outcomes == {"received": REQUESTS - 3, "withdrawn": 3}
    assert coming[0].result(100).corrupt == 0
