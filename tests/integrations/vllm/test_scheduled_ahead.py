"""Steps that are scheduled ahead of the outputs of those before, as with asynchronous scheduling.

A CPU engine turns that off, so a scripted one drives the scheduler's half and a worker, over real
bytes. A failing seed is replayed by the test's own name.
"""

import pytest

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
