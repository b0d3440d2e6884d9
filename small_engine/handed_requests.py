"""Requests that come to a group as messages: what of a workload's request a message says."""

from collections import Counter
from dataclasses import dataclass

import msgpack
import numpy as np

from ..ranks.disaggregation.control import Arrival, Control, decode
from ..ranks.disaggregation.refusal import Refusal, Refused
from ..ranks.rank_cache import RankCache
from .request import Requested, TokenIds

OUTPUT_TOKENS_MAX = 1 << 20
"""The most tokens that a message may ask for, which is as many as a prompt in one may have."""


@dataclass(frozen=True)
class HandedRequest:
    """A request of a workload as a message brings it; see `Requested`."""

    index: int
    name: str
    namespace: str
    prompt_length: int
    output_length: int
    prompt_tokens: TokenIds


def control_messages(cache: RankCache, refusals: Counter[Refusal]) -> list[Control]:
    """Return what has been said to this group since the last step; what cannot be read is counted."""
    messages: list[Control] = []
    for data in cache.messages():
        try:
            messages.append(decode(data))
        except Refused as refused:
            refusals[refused.refusal] += 1
    return messages


def arrival_of(request: Requested, partner: str, *, name: str = "") -> Arrival:
    """Return the message by which a group hears of a request, under another name if one is given."""
    sampling: bytes = msgpack.packb([request.index, request.output_length])
    tokens = np.ascontiguousarray(request.prompt_tokens, dtype="<i4").tobytes()
    name = name or request.name
    return Arrival(
        request=name,
        tokens=tokens,
        namespace=request.namespace,
        sampling=sampling,
        partner=partner,
    )


def request_of(arrival: Arrival, *, decodes: bool) -> HandedRequest:
    """Return the request of a message; without output for a group that only computes its prompt.

    Raises `Refused` for one that no engine can serve.
    """
    index, outputs = _sampling_of(arrival)
    if not arrival.tokens:
        raise Refused(Refusal.OUT_OF_BOUNDS, f"request {arrival.request!r} has no prompt")
    tokens = np.frombuffer(arrival.tokens, dtype="<i4").astype(np.int32, copy=False)
    return HandedRequest(
        index=index,
        name=arrival.request,
        namespace=arrival.namespace,
        prompt_length=len(tokens),
        output_length=outputs if decodes else 0,
        prompt_tokens=tokens,
    )


def _sampling_of(arrival: Arrival) -> tuple[int, int]:
    """Return a request's place in the workload, and how many tokens it generates."""
    try:
        index, outputs = msgpack.unpackb(arrival.sampling)
    except (TypeError, ValueError, msgpack.UnpackException) as error:
        raise Refused(
            Refusal.MALFORMED,
            f"the sampling of request {arrival.request!r} cannot be read: {error}",
        ) from error
    if type(index) is not int or type(outputs) is not int:
        raise Refused(
            Refusal.WRONG_TYPE, f"the sampling of request {arrival.request!r} is not two integers"
        )
    if not 0 <= index < 1 << 63 or not 0 <= outputs <= OUTPUT_TOKENS_MAX:
        raise Refused(
            Refusal.OUT_OF_BOUNDS,
            f"request {arrival.request!r} is number {index} with {outputs} tokens of output, must be"
            f" 0 or more, and at most {OUTPUT_TOKENS_MAX} tokens",
        )
    return index, outputs
