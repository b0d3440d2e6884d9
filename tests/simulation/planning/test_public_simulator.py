"""LRU, FIFO and the optimum hit as many blocks here as in the public `kvcache-simulator`.

Both simulators model one tier of blocks that prompts share from their start. The public simulator
counts a partial last block as usable and may serve a whole prompt from the cache, so every block here
is full and usable. The public simulator counts only hits of the second half of the requests, after
the first half has filled the cache.
"""

import json
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import pytest
from kvcache_sim.plan import build_execution_plan
from kvcache_sim.policies import simulate_policy
from kvcache_sim.trace import parse_trace_lines

from lockstep.ranks.protocol.replica_config import ReplicaConfig
from lockstep.simulation.planning.group import InstantGroup
from lockstep.simulation.planning.oracles import belady, fifo, paths
from lockstep.simulation.planning.prompts import PagedPrompt
from lockstep.small_engine.request import BLOCK_TOKENS, WorkloadRequest
from lockstep.small_engine.workload import synthetic_requests


class Hits(NamedTuple):
    lru: int
    fifo: int
    optimal: int


def public_hits(requests: Sequence[WorkloadRequest], blocks: int) -> Hits:
    lines = [
        json.dumps(
            {
                "hash_ids": each.hash_ids,
                "input_length": BLOCK_TOKENS * len(each.hash_ids),
                "block_size": BLOCK_TOKENS,
            }
        )
        for each in requests
    ]
    plan = build_execution_plan(parse_trace_lines(lines))
    results = {name: simulate_policy(plan, name, blocks) for name in Hits._fields}
    assert {each.measurementMode for each in results.values()} == {"fixed_window"}
    return Hits(**{name: each.hitTokens // BLOCK_TOKENS for name, each in results.items()})


def our_hits(requests: Sequence[WorkloadRequest], blocks: int) -> Hits:
    prompts = [
        PagedPrompt(
            tokens=BLOCK_TOKENS * len(each.hash_ids),
            ids=np.array(each.hash_ids, dtype="<i4").tobytes(),
            usable=len(each.hash_ids),
            reserved=len(each.hash_ids),
        )
        for each in requests
    ]
    config = ReplicaConfig(
        page_tokens=1, device_pages=blocks, host_pages=0, has_store=False, model_digest=b"model"
    )
    group = InstantGroup(config, chunk_pages=blocks)
    half = len(prompts) // 2
    chains, _ = paths(prompts)
    served = [group.serve(each) for each in prompts]
    return Hits(
        lru=sum(each.device for each in served[half:] if each is not None),
        fifo=sum(fifo(chains, blocks)[half:]),
        optimal=sum(belady(chains, blocks)[half:]),
    )


def workload(seed: int, count: int) -> list[WorkloadRequest]:
    return list(islice(synthetic_requests(seed, count), count))


@pytest.mark.parametrize(
    ("seed", "blocks"), [(0, 12), (1, 20), (2, 30), (3, 45), (4, 60), (5, 100), (6, 200)]
)
def test_on_a_workload_all_three_hit_the_same_blocks(seed: int, blocks: int) -> None:
    requests = workload(seed, 800)

    hits = our_hits(requests, blocks)

    assert hits == public_hits(requests, blocks)
    assert hits.optimal >= max(hits)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [12, 50, 200, 1000])
def test_on_as_many_requests_as_a_recorded_hour_has_all_three_hit_the_same_blocks(
    blocks: int,
) -> None:
    requests = workload(7, 12_000)

    assert our_hits(requests, blocks) == public_hits(requests, blocks)
