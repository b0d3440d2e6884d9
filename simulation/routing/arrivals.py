"""Requests and when they come: a trace's own times, or drawn ones where it has none."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby

from ...small_engine.request import BLOCK_TOKENS, WorkloadRequest
from .block_cache import PagedPrompt


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, and when it comes."""

    at_s: float
    prompt: PagedPrompt


def arrivals_of(requests: Iterable[WorkloadRequest], seed: int) -> list[Arrival]:
    """Return the requests in the order in which they come, the first at about 0 s.

    A recorder that is coarse gives many the same time: they are spread, by the seed, until the next. If
    any has no time, all times are drawn, at one request a second on the mean.
    """
    draw = random.Random(seed)
    known = list(requests)
    times = [each.arrived_ms for each in known if each.arrived_ms is not None]
    if len(times) < len(known):
        at_s = 0.0
        times_s: list[float] = []
        for _ in known:
            at_s += draw.expovariate(1.0)
            times_s.append(at_s)
    else:
        times_s = _spread(times, draw)
    prompts = [_prompt(each) for each in known]
    both = zip(times_s, prompts, strict=True)
    return sorted((Arrival(*each) for each in both), key=lambda each: each.at_s)


def _spread(times_ms: Sequence[int], draw: random.Random) -> list[float]:
    moments = sorted(set(times_ms))
    gaps = {
        now: later - now for now, later in zip(moments, [*moments[1:], moments[-1]], strict=True)
    }
    first = moments[0]
    return [
        (moment - first + draw.random() * gaps[moment]) / 1000
        for moment, equal in groupby(times_ms)
        for _ in equal
    ]


def _prompt(request: WorkloadRequest) -> PagedPrompt:
    """Return the prompt in pages of a trace's block, each with a key for all that comes before it."""
    keys: list[bytes] = []
    key = b""
    for number in request.hash_ids[: request.prompt_length // BLOCK_TOKENS]:
        key = sha256(key + number.to_bytes(8, "little")).digest()
        keys.append(key)
    return PagedPrompt(request.prompt_length, BLOCK_TOKENS, tuple(keys))
