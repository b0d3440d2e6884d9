"""Lockstep's tier called as vLLM's manager calls it, as of vLLM 0.32.

What vLLM's tests of its own tiers claim (`tests/v1/kv_offload/tiering/test_fs_tier.py`,
`test_obj_tier.py`, `test_factory.py`), as far as it holds for a tier of another package.
"""

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.errors import ConfigError
from lockstep.integrations import blocking_store
from tests.kit.held_store import HeldStore

from .conftest import Opens

if TYPE_CHECKING:
    from tests.kit.vllm.tier.tiering import Tiered

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


def shown(results: list[Any]) -> list[tuple[int, bool, int | None]]:
    """The number of each job, whether it went well, and how many chunks of a failed one did."""
    return [(each.job_id, each.success, moved(each.successful_keys)) for each in results]


def moved(keys: tuple[bytes, ...] | None) -> int | None:
    return None if keys is None else len(keys)


def answers(tiered: "Tiered", kit: ModuleType, *numbers: int, who: str = "me") -> list[str]:
    """What the tier says of chunks in the end."""
    request = kit.someone(who)
    tiered.know(kit.keys(*numbers), request)
    return [tiered.tier.lookup(each, request).name for each in kit.keys(*numbers)]


def objects_in(tmp_path: Path) -> list[Path]:
    return sorted(each for each in (tmp_path / "store/objects").rglob("*") if each.is_file())


def test_an_empty_store_has_nothing(kit: ModuleType, tiered: "Tiered") -> None:
    assert answers(tiered, kit, 1, 2) == ["MISS", "MISS"]


def test_a_stored_chunk_is_an_object_and_is_found(
    kit: ModuleType, tiered: "Tiered", tmp_path: Path
) -> None:
    tiered.tier.submit_store(kit.job(1, kit.keys(1), [0]))

    assert shown(kit.ended(tiered.tier)) == [(1, True, None)]
    assert len(objects_in(tmp_path)) == 1
    assert answers(tiered, kit, 1, 999) == ["HIT", "MISS"]


@pytest.mark.parametrize("direct", [0, 1])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_what_was_stored_is_loaded_byte_for_byte_into_other_rows(
    kit: ModuleType, opens: Opens, store: str, count: int, direct: int
) -> None:
    tiered = opens(kit.tier_of(f"{store}?direct={direct}"), chunks=10)
    wanted = kit.keys(*range(count))
    for row, each in enumerate(wanted):
        tiered.rows[row] = kit.content(each)
    tiered.tier.submit_store(kit.job(1, wanted, range(count)))
    written = shown(kit.ended(tiered.tier))
    tiered.rows[:] = 0
    tiered.tier.submit_load(kit.job(2, wanted, range(10 - count, 10), reads=True))

    assert (written, shown(kit.ended(tiered.tier))) == ([(1, True, None)], [(2, True, None)])
    assert [bool(tiered.rows[10 - count + at].eq(kit.content(each)).all())
            for at, each in enumerate(wanted)] == [True] * count  # fmt: skip
    assert not tiered.rows[: 10 - count].any()


def test_a_good_load_leaves_the_object_and_the_answer(
    kit: ModuleType, tiered: "Tiered", tmp_path: Path
) -> None:
    tiered.tier.submit_store(kit.job(1, kit.keys(1), [0]))
    kit.ended(tiered.tier)
    before = answers(tiered, kit, 1)
    tiered.tier.submit_load(kit.job(2, kit.keys(1), [3], reads=True))
    kit.ended(tiered.tier)

    assert before == answers(tiered, kit, 1) == ["HIT"]
    assert len(objects_in(tmp_path)) == 1


def test_a_chunk_that_is_not_there_fails_its_job(kit: ModuleType, tiered: "Tiered") -> None:
    tiered.tier.submit_load(kit.job(1, kit.keys(99), [0], reads=True))

    assert shown(kit.ended(tiered.tier)) == [(1, False, None)]


def test_jobs_are_told_apart(kit: ModuleType, tiered: "Tiered") -> None:
    tiered.tier.submit_store(kit.job(1, kit.keys(1), [0]))
    tiered.tier.submit_store(kit.job(2, kit.keys(2), [1]))

    assert sorted(shown(kit.ended(tiered.tier))) == [(1, True, None), (2, True, None)]
    assert answers(tiered, kit, 1, 2) == ["HIT", "HIT"]


def test_a_job_of_which_some_chunks_are_missing_keeps_the_others(
    kit: ModuleType, tiered: "Tiered"
) -> None:
    tiered.tier.submit_store(kit.job(1, kit.keys(1, 2, 3), [0, 1, 2]))
    kit.ended(tiered.tier)
    tiered.tier.submit_load(kit.job(2, kit.keys(99, 1, 2), [2, 3, 4], reads=True))
    (result,) = kit.ended(tiered.tier)

    assert not result.success
    assert result.successful_keys == kit.keys(1, 2)
    assert result.transfer_bytes == 2 * kit.CHUNK_BYTES


def test_rows_that_there_are_not_fail_the_job(kit: ModuleType, tiered: "Tiered") -> None:
    tiered.tier.submit_store(kit.job(1, kit.keys(1), [kit.CHUNKS]))
    tiered.tier.submit_load(kit.job(2, kit.keys(1), [kit.CHUNKS], reads=True))

    assert shown(kit.ended(tiered.tier)) == [(1, False, None), (2, False, None)]


def test_one_job_fails_and_another_goes_well_in_the_same_moment(
    kit: ModuleType, tiered: "Tiered"
) -> None:
    tiered.tier.submit_store(kit.job(1, kit.keys(1), [kit.CHUNKS]))
    tiered.tier.submit_store(kit.job(2, kit.keys(2), [1]))

    assert sorted(shown(kit.ended(tiered.tier))) == [(1, False, None), (2, True, None)]


def test_a_job_is_not_over_before_the_store_has_answered(
    kit: ModuleType, opens: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldStore()
    monkeypatch.setattr(blocking_store, "make_backend", held.of_any)
    tiered = opens(kit.tier_of("memory://"))
    held.hold()
    tiered.tier.submit_store(kit.job(1, kit.keys(1), [0]))
    assert held.asked.wait(10)
    before = list(tiered.tier.get_finished_jobs())
    held.let_go()

    assert before == []
    assert shown(kit.ended(tiered.tier)) == [(1, True, None)]
    assert kit.ended(tiered.tier) == []


def test_a_drain_waits_for_every_job(kit: ModuleType, tiered: "Tiered") -> None:
    for number in range(10):
        tiered.tier.submit_store(kit.job(number, kit.keys(number), [number % 2]))
    tiered.tier.drain_jobs()
    results = list(tiered.tier.get_finished_jobs())

    assert sorted(each.job_id for each in results) == list(range(10))


def test_a_tier_can_be_shut_down_with_jobs_on_their_way_and_twice(
    kit: ModuleType, tiered: "Tiered"
) -> None:
    for number in range(10):
        tiered.tier.submit_store(kit.job(number, kit.keys(number), [number % 2]))
    tiered.tier.shutdown()
    tiered.tier.shutdown()
    tiered.tier.submit_load(kit.job(10, kit.keys(1), [0], reads=True))

    results = list(tiered.tier.get_finished_jobs())
    assert sorted(each.job_id for each in results) == list(range(11))
    assert [each.success for each in results if each.job_id == 10] == [False]
    assert answers(tiered, kit, 1) == ["MISS"]


@pytest.mark.parametrize("where", ["/dev/null/kv", "/proc/nowhere/kv"])
def test_a_store_that_cannot_be_opened_is_an_error_at_the_start(
    kit: ModuleType, opens: Opens, where: str
) -> None:
    with pytest.raises(ConfigError, match=where):
        opens(kit.tier_of(f"file://{where}"))


@pytest.mark.parametrize("locality", ["local", ""])
def test_a_locality_that_there_is_not_is_an_error_at_the_start(
    kit: ModuleType, opens: Opens, store: str, locality: str
) -> None:
    with pytest.raises(ValueError, match="Locality"):
        opens(kit.tier_of(store, locality=locality))


def test_the_locality_and_the_kind_of_store_are_the_tiers(
    kit: ModuleType, opens: Opens, store: str
) -> None:
    tier = opens(kit.tier_of(store, locality="LOCAL")).tier

    assert (tier.locality, tier.medium, tier.tier_type) == (
        kit.Locality.LOCAL,
        kit.Medium.STORAGE,
        "LockstepTier",
    )


def test_a_setting_that_there_is_not_is_an_error_at_the_start(
    kit: ModuleType, opens: Opens, store: str
) -> None:
    with pytest.raises(ConfigError, match="secondary_tiers: there is no key 'shop'"):
        opens(kit.tier_of(store, shop=1))


def test_the_tier_can_be_registered_under_a_name(
    kit: ModuleType, opens: Opens, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    factory: Any = SecondaryTierFactory
    monkeypatch.setattr(factory, "_registry", dict(factory._registry))
    factory.register_tier("lockstep", "lockstep.integrations.vllm.tier", "LockstepTier")
    tiered = opens({"type": "lockstep", "store": store, "weights_version": "1"})

    assert tiered.tier.tier_type == "lockstep"


# What the tier tells of.


@pytest.fixture
def telling(kit: ModuleType, opens: Opens, store: str) -> "Tiered":
    return opens(kit.tier_of(store, enable_kv_events=True, locality="REMOTE"), events=True)


def told(tiered: "Tiered") -> list[tuple[list[bytes], str, str | None, bool]]:
    return [
        (list(each.keys), each.medium.name, each.locality and each.locality.name, each.removed)
        for each in tiered.tier.take_events()
    ]


def test_stored_chunks_are_told_once(kit: ModuleType, telling: "Tiered") -> None:
    telling.tier.submit_store(kit.job(1, kit.keys(1, 2), [0, 1]))
    kit.ended(telling.tier)

    assert told(telling) == [(kit.keys(1, 2), "STORAGE", "REMOTE", False)]
    assert told(telling) == []


def test_a_tier_without_a_locality_tells_none(kit: ModuleType, opens: Opens, store: str) -> None:
    telling = opens(kit.tier_of(store, enable_kv_events=True), events=True)
    telling.tier.submit_store(kit.job(1, kit.keys(1), [0]))
    kit.ended(telling.tier)

    assert told(telling) == [(kit.keys(1), "STORAGE", None, False)]


def test_a_load_tells_nothing(kit: ModuleType, telling: "Tiered") -> None:
    telling.tier.submit_store(kit.job(1, kit.keys(1), [0]))
    kit.ended(telling.tier)
    told(telling)
    telling.tier.submit_load(kit.job(2, kit.keys(1), [1], reads=True))
    kit.ended(telling.tier)

    assert told(telling) == []


def test_of_jobs_that_fail_nothing_is_told(kit: ModuleType, telling: "Tiered") -> None:
    telling.tier.submit_store(kit.job(1, kit.keys(1), [kit.CHUNKS]))
    telling.tier.submit_store(kit.job(2, kit.keys(2), [1]))
    kit.ended(telling.tier)

    assert told(telling) == [(kit.keys(2), "STORAGE", "REMOTE", False)]


def test_chunks_that_were_lost_are_told(kit: ModuleType, telling: "Tiered", tmp_path: Path) -> None:
    telling.tier.submit_store(kit.job(1, kit.keys(1, 2), [0, 1]))
    kit.ended(telling.tier)
    told(telling)
    for each in objects_in(tmp_path):
        each.unlink()
    telling.tier.submit_load(kit.job(2, kit.keys(1, 2), [3, 4], reads=True))
    kit.ended(telling.tier)

    assert told(telling) == [(kit.keys(1, 2), "STORAGE", "REMOTE", True)]


@pytest.mark.parametrize("asked", [True, False])
def test_nothing_is_told_where_vllm_or_the_tier_does_not_want_it(
    kit: ModuleType, opens: Opens, store: str, asked: bool
) -> None:
    tiered = opens(kit.tier_of(store, enable_kv_events=asked), events=not asked)
    tiered.tier.submit_store(kit.job(1, kit.keys(1), [0]))
    kit.ended(tiered.tier)

    assert told(tiered) == []


def test_what_the_tier_tells_goes_through_vllms_manager(kit: ModuleType, telling: "Tiered") -> None:
    telling.store(kit.keys(1, 2))

    events = [each for each in telling.settle() if each.medium.name == "STORAGE"]
    assert [(set(each.keys), each.removed) for each in events] == [({*kit.keys(1, 2)}, False)]
