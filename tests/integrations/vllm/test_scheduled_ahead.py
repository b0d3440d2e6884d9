"""Asynchronous scheduling: steps are scheduled before the outputs of earlier ones are known.

vLLM turns this off on a CPU, so a scripted engine drives the scheduler side and a worker over real
bytes.
To replay a failing seed, run the test with its parameter.
"""

import pytest

from lockstep.ranks.protocol.network_config import Peers
from tests.kit.vllm.overlapping_engine import BLOCKS, OverlappingEngine

REQUESTS = 120


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_overlaps_no_request_reads_what_is_not_its_own(seed: int, depth: int) -> None:
    engine = OverlappingEngine(seed, depth)

    engine.serve(REQUESTS)

    assert engine.wrong == []
    assert engine.ended == REQUESTS
    assert sorted(engine.free) == list(range(BLOCKS))
    assert engine.restored > 0


@pytest.mark.parametrize("seed", range(4))
def test_what_is_backed_up_once_there_is_room_is_what_was_computed(seed: int) -> None:
    """Backups that waited for host memory contain the computed bytes, although blocks are reused."""
    engine = OverlappingEngine(seed, 2, host_pages=8)

    engine.serve(REQUESTS)

    assert engine.wrong == []
    assert sorted(engine.free) == list(range(BLOCKS))


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_requests_that_go_on_elsewhere_give_their_blocks_back_and_are_read_as_they_were(
    seed: int, depth: int
) -> None:
    engine = OverlappingEngine(seed, depth, Peers())

    engine.serve(REQUESTS)

    assert engine.wrong == []
    assert engine.given > REQUESTS // 3
    assert sorted(engine.free) == list(range(BLOCKS))
