"""Commands of a replica with engine-owned device pages: their effects, and no effect if refused."""

from array import array

import pytest

from lockstep.errors import UsageError
from lockstep.ranks.protocol.replica_config import ReplicaConfig
from lockstep.ranks.replica.check import check
from lockstep.ranks.replica.core.pages import page_run
from lockstep.ranks.replica.replica import Replica

PAGE_TOKENS = 4
TOKENS = array("i", range(4 * PAGE_TOKENS)).tobytes()


@pytest.fixture
def replica() -> Replica:
    config = ReplicaConfig(
        page_tokens=PAGE_TOKENS, device_pages=0, host_pages=16, has_store=True, model_digest=b"m"
    )
    return Replica(config)


def test_a_back_up_that_is_refused_makes_no_request_known(replica: Replica) -> None:
    """A refused backup registers no request, because its pages are validated first."""
    with pytest.raises(UsageError, match="lends 3 device pages for 4 pages of tokens"):
        replica.back_up("r", "", TOKENS, [page_run(range(3))])

    assert not replica.requests


def test_a_load_that_is_refused_leaves_the_prefetch_alone(replica: Replica) -> None:
    """A refused load does not end the request's prefetch, because the load is validated first."""
    started, _ = replica.prefetch("r", "", TOKENS)
    assert started
    before = replica.digest

    with pytest.raises(UsageError, match="host memory has 0; call `match_host`"):
        replica.load("r", TOKENS, 0, [page_run(range(4))])

    assert replica.digest == before
    assert replica.requests.known("r").prefetch is not None


def test_a_fence_after_a_reset_ends_a_prefetch_into_what_was_reset(replica: Replica) -> None:
    """A fence ends a prefetch only if a reset has dropped the tree node that the prefetch extends."""
    replica.prefetch("r", "", TOKENS)
    replica.back_up("r", "", b"", [page_run()])
    replica.reset()

    replica.fence("r")

    check(replica)
    assert replica.requests.known("r").prefetch is None
    assert not replica.operation_table.in_flight
    assert not replica.prefixes.tree.roots


def test_a_fence_without_a_reset_leaves_the_prefetch_alone(replica: Replica) -> None:
    replica.prefetch("r", "", TOKENS)
    replica.back_up("r", "", b"", [page_run()])

    replica.fence("r")

    check(replica)
    assert replica.requests.known("r").prefetch is not None
