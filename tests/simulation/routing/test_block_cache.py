"""The cheap cache of the simulation keeps, finds and evicts exactly what a replica does."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import pytest

from lockstep.errors import UsageError
from lockstep.ranks.replica.answers import Admission
from lockstep.ranks.replica.notices import Notice, Removed, Stored, Tier
from lockstep.ranks.replica.replica import Replica
from lockstep.ranks.replica.settings import ReplicaConfig
from lockstep.ranks.replica.tree.page_keys import namespace_seed, page_keys
from lockstep.simulation.routing.block_cache import BlockCache, PagedPrompt
from lockstep.simulation.routing.driven_group import held_in
from lockstep.small_engine.request import WorkloadRequest
from lockstep.small_engine.workload import synthetic_requests

MODEL = b"model"


class Served(NamedTuple):
    """What one request has come to."""

    hit_pages: int
    removed: frozenset[bytes]
    stored: tuple[bytes, ...]
    held: frozenset[bytes]


def named(notices: Iterable[Notice], kind: type[Stored | Removed]) -> tuple[bytes, ...]:
    return tuple(key for each in notices if isinstance(each, kind) for key in each.keys)


def serve_by_replica(
    requests: Sequence[WorkloadRequest], page_tokens: int, device_pages: int
) -> list[Served]:
    replica = Replica(
        ReplicaConfig(
            page_tokens=page_tokens,
            device_pages=device_pages,
            host_pages=0,
            has_store=False,
            model_digest=MODEL,
            names_pages=True,
        )
    )
    served: list[Served] = []
    for request in requests:
        tokens, total = request.prompt_tokens.tobytes(), request.prompt_length
        answer, admitted = replica.load_back(request.name, "", tokens[:-4], total)
        assert isinstance(answer, Admission), answer
        _, inserted = replica.insert(request.name, tokens, final=True)
        _, released = replica.release(request.name)
        notices = [*admitted.notices, *inserted.notices, *released.notices]
        served.append(
            Served(
                answer.cached_tokens // page_tokens,
                frozenset(named(notices, Removed)),
                named(notices, Stored),
                held_in(replica.prefixes.tree)[Tier.DEVICE],
            )
        )
    return served


def serve_by_block_cache(
    requests: Sequence[WorkloadRequest], page_tokens: int, device_pages: int
) -> list[Served]:
    cache = BlockCache(device_pages)
    served: list[Served] = []
    for request in requests:
        keys = page_keys(namespace_seed(MODEL, ""), request.prompt_tokens.tobytes(), page_tokens)
        prompt = PagedPrompt(request.prompt_length, page_tokens, tuple(keys))
        hit, removed = cache.admit(prompt)
        stored = cache.insert(prompt)
        served.append(
            Served(hit, frozenset(named(removed, Removed)), named(stored, Stored), cache.keys())
        )
    return served


@pytest.mark.parametrize(
    ("seed", "page_tokens", "device_pages"),
    [(0, 512, 12), (1, 512, 40), (2, 512, 400), (3, 64, 90), (4, 128, 300)],
)
def test_on_a_workload_every_request_hits_stores_and_displaces_the_same_pages(
    seed: int, page_tokens: int, device_pages: int
) -> None:
    requests = list(islice(synthetic_requests(seed, 300), 300))

    by_replica = serve_by_replica(requests, page_tokens, device_pages)

    assert serve_by_block_cache(requests, page_tokens, device_pages) == by_replica
    hits = Counter(each.hit_pages > 0 for each in by_replica)
    assert hits[True]
    assert hits[False]


def test_a_prompt_that_is_cached_whole_is_computed_from_its_last_page_on() -> None:
    whole = WorkloadRequest(0, 1024, 0, (1, 2))
    again = WorkloadRequest(1, 1024, 0, (1, 2))

    served = serve_by_block_cache([whole, again], 512, 4)

    assert served == serve_by_replica([whole, again], 512, 4)
    assert served[1].hit_pages == 1


def test_a_prompt_that_does_not_fit_is_refused_by_the_replica() -> None:
    """The simulation refuses it before it begins."""
    with pytest.raises(UsageError):
        serve_by_replica([WorkloadRequest(0, 2048, 0, (1, 2, 3, 4))], 512, 3)
