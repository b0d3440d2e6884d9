"""Lockstep's tier in vLLM's own `TieringOffloadingManager`, as of vLLM 0.32.

What vLLM's tests of that manager claim (`tests/v1/kv_offload/tiering/test_tiering_offloading.py`,
`test_metrics.py` and `test_backpressure.py`), as far as it holds for a tier of another package.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from .conftest import Opens

if TYPE_CHECKING:
    from tests.kit.vllm.tier.tiering import Tiered

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


def names(results: Sequence[object]) -> list[str]:
    return [str(each).partition(".")[2] for each in results]


def test_chunks_go_to_host_memory_and_are_hits_there(kit: ModuleType, tiered: "Tiered") -> None:
    tiered.store(kit.keys(1, 2, 3))

    assert tiered.hits(kit.keys(1, 2, 3, 4)) == [True] * 3 + [False]


def test_chunks_go_to_every_tier(kit: ModuleType, opens: Opens, store: str) -> None:
    both = opens(kit.tier_of(store + "-1"), kit.tier_of(store + "-2"))
    both.store(kit.keys(1, 2, 3))
    both.settle()
    alone = [opens(kit.tier_of(store + end)) for end in ("-1", "-2")]

    assert [each.hits(kit.keys(1, 2, 3)) for each in alone] == [[True] * 3] * 2


def test_a_chunk_is_brought_back_from_the_tier(kit: ModuleType, tiered: "Tiered") -> None:
    tiered.store(kit.keys(1, 2, 3))
    tiered.forget()

    assert tiered.hits(kit.keys(1, 2, 3)) == [True] * 3


def test_a_lookup_says_later_then_on_its_way_then_there(kit: ModuleType, tiered: "Tiered") -> None:
    tiered.store(kit.keys(1))
    tiered.forget()
    (one,) = kit.keys(1)
    seen = [tiered.manager.lookup(one, kit.ME)]
    tiered.step()
    kit.wait_for(lambda: not tiered.is_unknown(one))
    seen.append(tiered.manager.lookup(one, kit.ME))
    tiered.settle()
    seen.append(tiered.manager.lookup(one, kit.ME))

    assert names(seen) == ["RETRY", "HIT_PENDING", "HIT"]


def test_another_engine_finds_what_the_first_has_left(
    kit: ModuleType, opens: Opens, store: str
) -> None:
    first = opens(kit.tier_of(store))
    first.store(kit.keys(1, 2))
    first.settle()

    assert opens(kit.tier_of(store)).hits(kit.keys(1, 2, 3)) == [True, True, False]


def test_the_end_of_an_engine_writes_what_is_on_its_way(
    kit: ModuleType, opens: Opens, store: str
) -> None:
    first = kit.Tiered(kit.configuration(kit.tier_of(store)))
    first.store(kit.keys(1, 2))
    first.close()

    assert opens(kit.tier_of(store)).hits(kit.keys(1, 2)) == [True, True]


def test_a_failed_copy_from_the_device_reaches_no_tier(kit: ModuleType, tiered: "Tiered") -> None:
    tiered.store(kit.keys(1), ok=False)
    tiered.settle()

    assert tiered.hits(kit.keys(1)) == [False]
    assert tiered.counted("lockstep_tier_chunks_written") == {}


def test_chunks_are_pinned_while_they_are_written_and_no_longer(
    kit: ModuleType, tiered: "Tiered"
) -> None:
    tiered.store(kit.keys(1, 2))
    pinned = [tiered.pins(each) for each in kit.keys(1, 2)]
    tiered.settle()

    assert pinned == [1, 1]
    assert [tiered.pins(each) for each in kit.keys(1, 2)] == [0, 0]


def test_a_host_memory_that_is_full_gives_up_what_has_been_written(
    kit: ModuleType, tiered: "Tiered"
) -> None:
    tiered.store(kit.keys(1, 2, 3, 4, 5))
    tiered.settle()
    tiered.store(kit.keys(6, 7))
    tiered.settle()

    assert tiered.hits(kit.keys(6, 7)) == [True, True]
    assert tiered.hits(kit.keys(1, 2), kit.someone("another")) == [True, True]


def test_a_chunk_that_does_not_fit_into_host_memory_is_a_miss(
    kit: ModuleType, tiered: "Tiered"
) -> None:
    tiered.store(kit.keys(9))
    tiered.forget()
    tiered.start()
    tiered.manager.prepare_store(kit.keys(1, 2, 3, 4, 5), kit.ME)

    assert names(tiered.found(kit.keys(9), kit.someone("another"))) == ["MISS"]


def test_the_chunks_of_a_request_are_one_job(kit: ModuleType, tiered: "Tiered") -> None:
    tiered.store(kit.keys(1, 2, 3, 4))
    tiered.forget()
    first, second = kit.someone("first"), kit.someone("second")
    tiered.know(kit.keys(1, 2), first)
    tiered.know(kit.keys(3, 4), second)
    for number, request in [(1, first), (2, first), (3, second), (4, second)]:
        tiered.manager.lookup(kit.key(number), request)
    before = tiered.jobs()
    tiered.step()

    assert (before, tiered.jobs()) == ([], [2, 2])


def test_a_chunk_that_two_requests_want_is_brought_once(kit: ModuleType, tiered: "Tiered") -> None:
    tiered.store(kit.keys(1))
    tiered.forget()
    first, second = kit.someone("first"), kit.someone("second")
    tiered.know(kit.keys(1), first)
    found = [tiered.manager.lookup(kit.key(1), each) for each in (first, second)]
    tiered.step()

    assert names(found) == ["HIT_PENDING"] * 2
    assert tiered.jobs() == [1]


@pytest.mark.parametrize("ok", [True, False])
def test_a_request_is_over_for_the_tier_when_its_last_copy_is_submitted(
    kit: ModuleType, tiered: "Tiered", ok: bool
) -> None:
    tiered.know(kit.keys(1))
    prepared = tiered.manager.prepare_store(kit.keys(1), kit.ME)
    tiered.manager.on_request_finished(kit.ME)
    before = tiered.remembered()
    tiered.manager.complete_store(prepared.keys_to_store, kit.ME, success=ok)
    tiered.settle()

    assert (before, tiered.remembered()) == (1, 0)


def test_a_request_that_stores_nothing_is_over_at_once(kit: ModuleType, tiered: "Tiered") -> None:
    tiered.know(kit.keys(1))
    tiered.manager.on_request_finished(kit.ME)

    assert tiered.remembered() == 0


def test_a_reset_ends_what_is_on_its_way_and_leaves_the_store_alone(
    kit: ModuleType, tiered: "Tiered"
) -> None:
    tiered.store(kit.keys(1, 2, 3))
    tiered.manager.reset_cache()
    after = tiered.jobs()
    in_memory = [tiered.manager.primary_tier.lookup(each, kit.ME) for each in kit.keys(1, 2, 3)]

    assert (after, names(in_memory)) == ([], ["MISS"] * 3)
    assert tiered.hits(kit.keys(1, 2, 3)) == [True] * 3


def test_after_a_reset_nothing_of_other_weights_is_served_or_stored(
    kit: ModuleType, opens: Opens, store: str
) -> None:
    tiered = opens(kit.tier_of(store, on_reset="leave"))
    tiered.store(kit.keys(1))
    tiered.forget()
    hits = tiered.hits(kit.keys(1))
    tiered.store(kit.keys(1, 2))
    tiered.forget()
    later = opens(kit.tier_of(store))

    assert hits == [False]
    assert tiered.jobs() == []
    assert later.hits(kit.keys(1, 2)) == [True, False]


def test_a_reset_forgets_loads_that_were_not_submitted(kit: ModuleType, tiered: "Tiered") -> None:
    tiered.store(kit.keys(1))
    tiered.forget()
    tiered.know(kit.keys(1))
    pending = tiered.manager.lookup(kit.key(1), kit.ME)
    tiered.manager.reset_cache()

    assert names([pending]) == ["HIT_PENDING"]
    assert tiered.jobs() == []
    assert tiered.hits(kit.keys(1)) == [True]


def test_a_reset_ends_requests_that_are_over(kit: ModuleType, tiered: "Tiered") -> None:
    tiered.know(kit.keys(1))
    tiered.manager.prepare_store(kit.keys(1), kit.ME)
    tiered.manager.on_request_finished(kit.ME)
    tiered.manager.reset_cache()

    assert tiered.remembered() == 0


def test_a_request_goes_on_after_a_reset(kit: ModuleType, tiered: "Tiered") -> None:
    tiered.start()
    tiered.manager.prepare_store(kit.keys(1, 2), kit.ME)
    tiered.manager.reset_cache()
    tiered.store(kit.keys(3, 4))
    tiered.settle()
    tiered.manager.on_request_finished(kit.ME)
    tiered.forget()

    assert tiered.hits(kit.keys(1, 3, 4), kit.someone("later")) == [False, True, True]


def test_the_tier_asks_for_new_chunks_alone(kit: ModuleType, tiered: "Tiered") -> None:
    assert tiered.manager.on_new_request(kit.ME).policy.name == "CHUNK_LEVEL"


def test_chunks_that_are_used_are_told_to_the_tier(kit: ModuleType, tiered: "Tiered") -> None:
    tiered.store(kit.keys(1, 2))
    tiered.settle()
    tiered.manager.touch(kit.keys(1, 2), kit.ME)

    assert tiered.hits(kit.keys(1, 2)) == [True, True]


@pytest.mark.parametrize("wanted", [None, ("STORAGE", None), ("STORAGE", "REMOTE"), (None, None)])
def test_a_request_that_allows_the_tier_is_served_by_it(
    kit: ModuleType, opens: Opens, store: str, wanted: tuple[str, str] | None
) -> None:
    tiered = opens(kit.tier_of(store, locality="REMOTE"))
    tiered.store(kit.keys(1))
    tiered.forget()

    assert tiered.hits(kit.keys(1), kit.filtered("r", wanted)) == [True]


@pytest.mark.parametrize("wanted", [(), ("CPU", None), ("STORAGE", "LOCAL")])
def test_a_request_that_allows_other_tiers_is_not(
    kit: ModuleType, opens: Opens, store: str, wanted: tuple[str, str]
) -> None:
    tiered = opens(kit.tier_of(store, locality="REMOTE"))
    tiered.store(kit.keys(1))
    tiered.forget()
    tiered.store(kit.keys(2))

    assert tiered.hits(kit.keys(1, 2), kit.filtered("r", wanted)) == [False, True]


def test_a_hit_is_told_to_have_come_from_storage(kit: ModuleType, tiered: "Tiered") -> None:
    tiered.store(kit.keys(1))
    tiered.forget()
    tiered.hits(kit.keys(1))

    assert tiered.manager.get_load_source(kit.key(1), kit.ME).name == "DISK"


def test_vllm_counts_what_the_tier_has_moved(kit: ModuleType, tiered: "Tiered") -> None:
    tiered.store(kit.keys(1, 2))
    tiered.forget()
    tiered.hits(kit.keys(1, 2, 3))

    counted = tiered.counted("vllm:kv_offload_tiering")
    assert {
        "read_bytes": 2 * kit.CHUNK_BYTES,
        "write_bytes": 2 * kit.CHUNK_BYTES,
        "chunk_queries": 3,
        "chunk_hits": 2,
        "lookup_sync_delay_seconds_count": 3,
        "lookup_async_delay_seconds_count": 3,
    }.items() <= counted.items()
    assert "promotion_job_failures" not in counted


def test_the_tier_counts_its_chunks_by_what_became_of_them(
    kit: ModuleType, tiered: "Tiered"
) -> None:
    tiered.store(kit.keys(1, 2))
    tiered.forget()
    tiered.hits(kit.keys(1, 2))

    assert tiered.counted("lockstep_tier_") == {
        "chunks_written ok": 2,
        "chunks_read ok": 2,
    }
    assert tiered.counted("lockstep_tier_") == {}


def test_vllm_knows_what_the_tier_counts(kit: ModuleType, store: str) -> None:
    config = kit.configuration(kit.tier_of(store))
    known = kit.TieringOffloadingSpec.build_metric_definitions(dict(config.extra_config))

    labels = {name: each.labelnames for name, each in known.items() if name.startswith("lockstep")}
    assert labels == {
        "lockstep_tier_chunks_read": ("tier", "outcome"),
        "lockstep_tier_chunks_written": ("tier", "outcome"),
        "lockstep_tier_held_bytes": ("tier",),
    }


def test_what_the_tier_counts_comes_out_of_vllms_exporter(
    kit: ModuleType, opens: Opens, store: str
) -> None:
    tiered = opens(kit.tier_of(store, quota_gib=1))
    tiered.store(kit.keys(1, 2))
    tiered.forget()
    tiered.hits(kit.keys(1, 2, 3))

    assert tiered.exported("lockstep_tier") == {
        'chunks_written_total{engine="0",outcome="ok",tier="LockstepTier"}': 2,
        'chunks_read_total{engine="0",outcome="ok",tier="LockstepTier"}': 2,
        'held_bytes{engine="0",tier="LockstepTier"}': 2 * (kit.CHUNK_BYTES + 4096),
    }


PRESSURE = {"backpressure_cls": "EMABackpressureDetector", "policy_cls": "DropStorePolicy"}


def test_under_pressure_nothing_is_written_and_reads_go_on(
    kit: ModuleType, opens: Opens, store: str
) -> None:
    tiered = opens(kit.tier_of(store, backpressure=PRESSURE))
    tiered.store(kit.keys(1))
    tiered.forget()
    tiered.press()
    tiered.store(kit.keys(2))
    tiered.settle()
    written = tiered.counted("lockstep_tier_chunks_written")

    assert written == {" ok": 1}
    assert tiered.hits(kit.keys(1)) == [True]


def test_the_time_that_the_tier_takes_is_what_pressure_is_measured_by(
    kit: ModuleType, opens: Opens, store: str
) -> None:
    tiered = opens(kit.tier_of(store, backpressure={**PRESSURE, "warmup_completions": 1}))
    detector = tiered.tier.bp_detector
    assert detector is not None
    tiered.store(kit.keys(1))
    tiered.settle()
    measured = detector.store_latency_ema
    tiered.manager.reset_cache()

    assert measured > 0
    assert detector.store_latency_ema == 0
