"""A group says of its requests which are here, which have left, and which it does not know."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing

import msgpack
import numpy as np

from lockstep.ranks.cache import Cache
from lockstep.ranks.disaggregation.arrivals import Arrivals
from lockstep.ranks.disaggregation.control import Arrival, decode, encode
from lockstep.ranks.disaggregation.teller import Teller
from lockstep.ranks.disaggregation.telling import Drain, RequestsTold, RequestsWanted
from lockstep.small_engine.decode_scheduler import DecodeScheduler
from lockstep.small_engine.forward_pass import ForwardPass
from tests.kit.ranks.handoffs import terms_of
from tests.kit.ranks.served_group import ServedGroup
from tests.small_engine.test_prefill_and_decode import PAGE_TOKENS, config_of, limits

ARRIVAL = Arrival(
    request="one",
    tokens=np.arange(200, dtype="<i4").tobytes(),
    sampling=msgpack.packb([0, 4]),
)
QUESTION = RequestsWanted(reader="front", requests=("one", "two"))


def decodes(group: ServedGroup) -> Callable[[Cache, ForwardPass], list[RequestsTold]]:
    """Return the program of a rank that decodes, and is asked once more when a request has left."""

    def program(cache: Cache, _: ForwardPass) -> list[RequestsTold]:
        told: list[RequestsTold] = []

        def send(_: str, data: bytes) -> "Future[int]":
            message = decode(data)
            assert isinstance(message, RequestsTold)
            told.append(message)
            sent = Future[int]()
            sent.set_result(1)
            return sent

        def left(_: int) -> None:
            group.post(encode(QUESTION))
            group.post(encode(Drain()))

        arrivals = Arrivals(cache, terms_of(cache), lambda to, message: None, patience_s=0.1)
        teller = Teller("g", 1, PAGE_TOKENS, send)
        DecodeScheduler(
            cache, arrivals, limits(output_tokens_max=0), teller=teller, on_done=left
        ).run()
        return told

    return program


def test_a_group_says_of_each_request_that_it_is_here_has_left_or_is_unknown() -> None:
    with closing(ServedGroup(config_of("llama", store=None), 1)) as group:
        running = group.begin(decodes(group))
        group.post(encode(ARRIVAL))
        group.post(encode(QUESTION))
        before, after = running[0].result(60)

    assert (before.here, before.ended, before.unknown) == (("one",), (), ("two",))
    assert [(each.request, each.stage) for each in after.ended] == [("one", "done")]
    assert (after.here, after.unknown) == ((), ("two",))
