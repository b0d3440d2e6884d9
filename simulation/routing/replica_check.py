"""The cache of the simulation, held against a real replica, request by request."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...ranks.replica.answers import Admission, Wait
from ...ranks.replica.notices import Notice, Removed, Stored, Tier
from ...ranks.replica.replica import Replica
from ...ranks.replica.settings import ReplicaConfig
from ...ranks.replica.tree.page_keys import namespace_seed, page_keys
from ...small_engine.request import WorkloadRequest
from ..checkers.findings.finding import Violated
from ..checkers.findings.routing import CacheDiffers
from .block_cache import BlockCache, PagedPrompt
from .driven_group import held_in

_MODEL = b"model"
_TOKEN_BYTES = 4


class Served(NamedTuple):
    """What one request has come to."""

    hit_pages: int
    removed: frozenset[bytes]
    stored: tuple[bytes, ...]
    held: frozenset[bytes]
    """All that is cached afterwards."""


def check_against_replica(
    requests: Sequence[WorkloadRequest], page_tokens: int, device_pages: int
) -> int:
    """Serve all requests by both; return how many pages were displaced. Raises `Violated`."""
    displaced = 0
    for request, theirs, ours in zip(
        requests,
        serve_by_replica(requests, page_tokens, device_pages),
        serve_by_block_cache(requests, page_tokens, device_pages),
        strict=True,
    ):
        if theirs != ours:
            said, true = ((each.hit_pages, len(each.removed)) for each in (ours, theirs))
            apart = len(ours.held ^ theirs.held)
            raise Violated(CacheDiffers(request.name, said, true, apart))
        displaced += len(ours.removed)
    return displaced


def serve_by_replica(
    requests: Iterable[WorkloadRequest], page_tokens: int, device_pages: int
) -> Iterable[Served]:
    """Yield what becomes of each request in a replica that has device memory alone."""
    replica = Replica(
        ReplicaConfig(
            page_tokens=page_tokens,
            device_pages=device_pages,
            host_pages=0,
            has_store=False,
            model_digest=_MODEL,
            names_pages=True,
        )
    )
    for request in requests:
        tokens = request.prompt_tokens.tobytes()
        answer, admitted = replica.load_back(
            request.name, "", tokens[:-_TOKEN_BYTES], request.prompt_length
        )
        _, inserted = replica.insert(request.name, tokens, final=True)
        _, released = replica.release(request.name)
        notices = [*admitted.notices, *inserted.notices, *released.notices]
        yield Served(
            _cached(answer) // page_tokens,
            frozenset(_named(notices, Removed)),
            _named(notices, Stored),
            held_in(replica.prefixes.tree)[Tier.DEVICE],
        )


def serve_by_block_cache(
    requests: Iterable[WorkloadRequest], page_tokens: int, device_pages: int
) -> Iterable[Served]:
    """Yield what becomes of each request in the cache of the simulation."""
    cache = BlockCache(device_pages)
    for request in requests:
        keys = page_keys(namespace_seed(_MODEL, ""), request.prompt_tokens.tobytes(), page_tokens)
        prompt = PagedPrompt(request.prompt_length, page_tokens, tuple(keys))
        hit, removed = cache.admit(prompt)
        stored = cache.insert(prompt)
        yield Served(hit, frozenset(_named(removed, Removed)), _named(stored, Stored), cache.keys())


def _cached(answer: Admission | Wait) -> int:
    """Return how much was cached; where nobody else holds anything a request never waits."""
    assert isinstance(answer, Admission), answer
    return answer.cached_tokens


def _named(notices: Iterable[Notice], kind: type[Stored | Removed]) -> tuple[bytes, ...]:
    return tuple(key for each in notices if isinstance(each, kind) for key in each.keys)
