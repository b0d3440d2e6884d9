"""No message from outside ends a group that is told of its requests by messages."""

from collections.abc import Callable, Iterator
from contextlib import closing

import msgpack
import numpy as np
import pytest

from lockstep.ranks.cache import Cache
from lockstep.ranks.disaggregation.arrivals import Arrivals
from lockstep.ranks.disaggregation.control import Arrival, encode
from lockstep.ranks.disaggregation.departures import Departures
from lockstep.ranks.disaggregation.refusal import Refusal
from lockstep.ranks.disaggregation.telling import Drain
from lockstep.small_engine.decode_scheduler import DecodeScheduler
from lockstep.small_engine.forward_pass import ForwardPass
from lockstep.small_engine.prefill_scheduler import PrefillScheduler
from tests.kit.ranks.handoffs import terms_of
from tests.kit.ranks.served_group import ServedGroup
from tests.small_engine.test_prefill_and_decode import config_of, limits

TOKENS = np.arange(200, dtype="<i4").tobytes()
SAMPLING: bytes = msgpack.packb([0, 4])

Program = Callable[[Cache, ForwardPass], tuple[int, list[Refusal]]]


def prefills(cache: Cache, _: ForwardPass) -> tuple[int, list[Refusal]]:
    departures = Departures(
        cache, terms_of(cache), lambda to, message: None, directly=True, ttl_s=0.1
    )
    scheduler = PrefillScheduler(cache, departures, limits(output_tokens_max=0))
    scheduler.run()
    return scheduler.counts.requests, list(departures.refusals)


def decodes(cache: Cache, _: ForwardPass) -> tuple[int, list[Refusal]]:
    arrivals = Arrivals(cache, terms_of(cache), lambda to, message: None, patience_s=0.1)
    scheduler = DecodeScheduler(cache, arrivals, limits(output_tokens_max=0))
    scheduler.run()
    return scheduler.counts.requests, list(arrivals.refusals)


@pytest.fixture
def group() -> Iterator[ServedGroup]:
    with closing(ServedGroup(config_of("hybrid-all", store=None), 2)) as group:
        yield group


@pytest.mark.parametrize("program", [prefills, decodes])
@pytest.mark.parametrize(
    ("tokens", "sampling", "refusal"),
    [
        (TOKENS, b"", Refusal.MALFORMED),
        (TOKENS, msgpack.packb(3), Refusal.MALFORMED),
        (TOKENS, msgpack.packb("xx"), Refusal.WRONG_TYPE),
        (TOKENS, msgpack.packb([-1, 4]), Refusal.OUT_OF_BOUNDS),
        (TOKENS, msgpack.packb([0, -4]), Refusal.OUT_OF_BOUNDS),
        (TOKENS, msgpack.packb([0, 1 << 40]), Refusal.OUT_OF_BOUNDS),
        (b"", SAMPLING, Refusal.OUT_OF_BOUNDS),
    ],
)
def test_a_request_that_is_none_is_refused_by_name(
    group: ServedGroup, program: Program, tokens: bytes, sampling: bytes, refusal: Refusal
) -> None:
    running = group.begin(program)
    group.post(encode(Arrival(request="none", tokens=tokens, sampling=sampling, partner="x")))
    group.post(encode(Arrival(request="one", tokens=TOKENS, sampling=SAMPLING, partner="x")))
    group.post(encode(Drain()))

    assert [each.result(60) for each in running] == [(1, [refusal])] * 2


@pytest.mark.parametrize("program", [prefills, decodes])
@pytest.mark.parametrize("partner", ["", "x"])
def test_a_request_that_is_told_of_twice_is_served_once(
    group: ServedGroup, program: Program, partner: str
) -> None:
    arrival = encode(Arrival(request="one", tokens=TOKENS, sampling=SAMPLING, partner=partner))
    group.post(arrival)
    group.post(arrival)
    group.post(encode(Drain()))
    running = group.begin(program)

    assert [each.result(60) for each in running] == [(1, [])] * 2
