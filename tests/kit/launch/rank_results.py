"""Invented results of one rank's replay, so that tests of reports need not run a replay."""

from lockstep.launch.replay.report import RankResult
from lockstep.small_engine.counts import PoolCounts, ReplayCounts


def result(**changes: object) -> RankResult:
    fields: dict[str, object] = {
        "counts": ReplayCounts(
            requests=2,
            retractions=4,
            resumes=3,
            preempted=1,
            prompt_tokens=100,
            computed_tokens=40,
            hit_host_tokens=60,
            pools={"kv": PoolCounts(pages_verified=5, pages_rechecked=7)},
        ),
        "refusals": [],
        "steps": 9,
        "rounds": 9,
        "transport": "shm: all 2 ranks are on one host",
        "collectives": 9,
        "round_us": [1.0, 3.0],
        "operations": {"backup": {"complete": 2}},
        "operations_left": 0,
        "violation": "",
        "bytes_moved": {"l1_to_l2": 1, "l2_to_l1": 2, "l2_to_l3": 3, "l3_to_l2": 4},
        "storage_corrupt": 0,
        "storage_late_calls": 0,
        "storage_waited_s": 0.0,
        "digest": 0x1234,
        "wall_s": 1.0,
        "flush_s": 0.5,
    }
    return RankResult(**{**fields, **changes})  # type: ignore[arg-type]
