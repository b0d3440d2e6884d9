"""What `lockstep top` says of a group with something the matter: the matter comes first."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.launch.top.findings import Weight, findings
from lockstep.launch.top.sighting import Sighting, numbers_in
from lockstep.launch.top.window import Window
from tests.kit.storage.calls import opened_at, run
from tests.kit.telemetry.watched_group import SETTINGS, WatchedGroup, watched_group

Watch = Callable[..., WatchedGroup]


@pytest.fixture
def watched() -> Iterator[Watch]:
    """Opens groups with some settings changed, and closes them at the end."""
    with ExitStack() as stack:

        def opened(**changes: Any) -> WatchedGroup:
            return stack.enter_context(watched_group(replace(SETTINGS, **changes)))

        yield opened


async def lose_half(uri: str) -> None:
    async with opened_at(uri) as store:
        names = [stored.name async for stored in store.objects()]
        assert all(await store.remove(sorted(names, key=str)[::2], deadline=1e12))


def said(group: WatchedGroup, *, seed: int = 1) -> list[str]:
    """Return what is found while a workload is served."""
    before = group.seen(0.0)
    group.serve(seed=seed)
    return [each.what for each in findings(Window(group.seen(10.0), before))]


def test_a_group_with_room_for_all_has_nothing_wrong(watched: Watch) -> None:
    *_, last = said(watched())

    assert last.startswith("nothing is wrong that numbers show")


def test_a_rank_whose_store_has_lost_half_of_its_objects_is_named(
    watched: Watch, tmp_path: Path
) -> None:
    store = f"file://{tmp_path}/{{rank}}?durability=none"
    before = watched(store=store)
    before.serve()
    before.group.close()
    run(lose_half(store.replace("{rank}", "1")))

    first, *_ = said(watched(store=store))

    assert first.startswith("rank 1 lacks pages that the others have in the store")


def test_host_memory_that_is_too_small_is_said_with_how_fast_it_turns_over(watched: Watch) -> None:
    first, *_ = said(watched(host_pages=40))

    assert first.startswith("host memory is too small: all of its 40 pages are replaced every")


def test_reads_that_run_out_of_their_time_are_a_slow_store_and_no_damage() -> None:
    told = """
    lockstep_missed_pages_total{rank="0",reason="unreadable"} 10
    lockstep_storage_late_calls_total{rank="0"} 5
    """
    seen = Sighting(10.0, {0: numbers_in("\n".join(told.split("\n    ")))})

    found = [each.what for each in findings(Window(seen, Sighting(0.0, {0: {}})))]

    assert found[0] == (
        "the store is slow: 5 calls ran out of their time; 10 pages were computed for it"
    )
    assert [each for each in found if "damaged" in each or "could not be read" in each] == []


def test_a_store_that_is_slow_is_said_with_its_latency(watched: Watch) -> None:
    store = "fault+memory://slow?fault.delay=1&fault.delay_ms=800"

    first, *_ = said(watched(store=store, host_pages=2048))

    # On a busy machine no call may have come back by then.
    assert re.match(
        r"the store is slow: (half of its reads and lookups take|\d+ calls ran out)", first
    )


def test_a_tenant_s_quota_is_said_to_be_why_pages_left(watched: Watch) -> None:
    first, *_ = said(watched(namespaces=2, quota_pages=20))

    assert "a tenant's quota" in first


def test_salts_that_never_repeat_are_said_to_be_new(watched: Watch) -> None:
    first, *_ = said(watched(namespaces=0))

    assert first == (
        "24 namespaces were new for 24 requests: salts that do not come back, so that no request finds"
        " what another has left"
    )


def test_a_group_that_nobody_asks_anything_has_no_hits_to_speak_of(watched: Watch) -> None:
    group = watched()

    (only,) = findings(Window(group.seen(10.0), group.seen(0.0)))

    assert (only.weight, only.what) == (Weight.NORMAL, "no request was admitted")


def test_a_rank_that_does_not_answer_is_named_by_its_address() -> None:
    (first, *_) = findings(Window(Sighting(0.0, {}, ("127.0.0.1:9401",))))

    assert first.weight is Weight.BROKEN
    assert first.what == "nobody answers at 127.0.0.1:9401"
