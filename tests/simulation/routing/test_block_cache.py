"""The cheap cache of the simulation keeps, finds and evicts exactly what a replica does."""

from itertools import islice

import pytest

from lockstep.errors import UsageError
from lockstep.simulation.checkers.findings.finding import Violated
from lockstep.simulation.routing.block_cache import BlockCache, PagedPrompt
from lockstep.simulation.routing.replica_check import (
    check_against_replica,
    serve_by_block_cache,
    serve_by_replica,
)
from lockstep.small_engine.request import WorkloadRequest
from lockstep.small_engine.workload import synthetic_requests

TWICE = [WorkloadRequest(number, 1024, 0, (1, 2)) for number in range(2)]


@pytest.mark.parametrize(
    ("seed", "page_tokens", "device_pages"),
    [(0, 512, 12), (1, 512, 40), (2, 512, 100), (3, 64, 90), (4, 128, 300)],
)
def test_on_a_workload_every_request_hits_stores_and_displaces_the_same_pages(
    seed: int, page_tokens: int, device_pages: int
) -> None:
    requests = list(islice(synthetic_requests(seed, 300), 300))

    displaced = check_against_replica(requests, page_tokens, device_pages)

    served = serve_by_block_cache(requests, page_tokens, device_pages)
    assert displaced > 100
    assert len({each.hit_pages for each in served}) > 3


def test_a_prompt_that_is_cached_whole_is_computed_from_its_last_page_on() -> None:
    served = list(serve_by_block_cache(TWICE, 512, 4))

    assert served == list(serve_by_replica(TWICE, 512, 4))
    assert served[1].hit_pages == 1


def test_a_prompt_that_does_not_fit_is_refused_by_the_replica() -> None:
    """The simulation refuses it before it begins."""
    with pytest.raises(UsageError):
        list(serve_by_replica([WorkloadRequest(0, 2048, 0, (1, 2, 3, 4))], 512, 3))


def test_a_cache_that_does_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def match(self: BlockCache, prompt: PagedPrompt) -> int:
        return sum(key in self.keys() for key in prompt.keys)

    monkeypatch.setattr(BlockCache, "match", match)

    with pytest.raises(
        Violated, match="request-1: 2 pages hit and 0 displaced, where a replica has 1"
    ):
        check_against_replica(TWICE, 512, 4)
