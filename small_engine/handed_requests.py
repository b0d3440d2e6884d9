"""Requests that come to a group as messages: what of a workload's request a message says."""

from dataclasses import dataclass

import msgpack
import numpy as np

from ..ranks.disaggregation.control import Arrival
from .request import Requested, TokenIds


@dataclass(frozen=True)
class HandedRequest:
    """A request of a workload as a message brings it; see `Requested`."""

    index: int
    name: str
    prompt_length: int
    output_length: int
    prompt_tokens: TokenIds


def arrival_of(request: Requested, partner: str, *, name: str = "") -> Arrival:
    """Return the message by which a group hears of a request, under another name if one is given."""
    sampling: bytes = msgpack.packb([request.index, request.output_length])
    tokens = np.ascontiguousarray(request.prompt_tokens, dtype="<i4").tobytes()
    name = name or request.name
    return Arrival(request=name, tokens=tokens, sampling=sampling, partner=partner)


def request_of(arrival: Arrival, *, decodes: bool) -> HandedRequest:
    """Return the request of a message; without output for a group that only computes its prompt."""
    index, outputs = msgpack.unpackb(arrival.sampling)
    tokens = np.frombuffer(arrival.tokens, dtype="<i4").astype(np.int32, copy=False)
    return HandedRequest(index, arrival.request, len(tokens), outputs if decodes else 0, tokens)
