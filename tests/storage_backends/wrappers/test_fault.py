"""`fault+`: each fault is what its name says, is repeatable, and is counted."""

import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.page_format.object_header import HeaderFinding, check_object, encode_object
from lockstep.page_format.object_name import ObjectName
from lockstep.page_format.object_shape import ObjectShape
from lockstep.storage_backends.base import ReadOutcome, StorageBackend, WriteOutcome
from lockstep.storage_backends.damage.damage import Damage, DamageKind
from lockstep.storage_backends.damage.file import damage_file
from lockstep.storage_backends.memory import MemoryBackend
from lockstep.storage_backends.registry import known_schemes, make_backend
from lockstep.storage_backends.uri import parse_uri
from lockstep.storage_backends.wrappers.base import Wrapper
from lockstep.storage_backends.wrappers.fault import Fault, FaultBackend, FaultPlan, wrap
from tests.kit.storage.calls import digest_of, now, object_name, run
from tests.kit.storage.layers import (
    Watched,
    a_read,
    a_while,
    a_write,
    memory_store,
    reads_of,
    run_virtually,
    writes_of,
)

pytestmark = pytest.mark.virtual_time

DAMAGES = [Fault.FLIP, Fault.TORN, Fault.SHORT, Fault.WRONG]
STORES = [
    "memory://",
    "file:///var/kv",
    "3fs:///mnt/kv?index=sqlite:///var/index.db",
    "3fs:///mnt/kv?index=redis://127.0.0.1:6379/0",
    "mooncake://127.0.0.1:50051",
    "s3://bucket/kv",
    "s3://bucket/kv?index=sqlite:///var/index.db&pack=8",
]


async def a_store(rates: Mapping[Fault, float], seed: int = 0) -> tuple[Watched, FaultBackend]:
    watched = Watched(await memory_store(range(4)))
    plan = FaultPlan(seed=seed, rates=rates, delay_s=8.0)
    return watched, FaultBackend(watched, plan, clock=now)


async def test_a_plan_without_rates_changes_nothing() -> None:
    _, backend = await a_store({})
    assert await backend.read(reads_of(0, 9), deadline=a_while()) == [
        ReadOutcome.OK,
        ReadOutcome.MISSING,
    ]
    assert backend.injected().total() == 0


async def test_an_error_fails_a_key_and_the_store_is_not_asked_for_it() -> None:
    watched, backend = await a_store({Fault.ERROR: 1.0})
    assert await backend.read(reads_of(0, 1), deadline=a_while()) == [ReadOutcome.FAILED] * 2
    assert await backend.write(writes_of(7), deadline=a_while()) == [WriteOutcome.FAILED]
    assert await backend.exists([object_name(0)], deadline=a_while()) == [False]
    assert await backend.remove([object_name(0)], deadline=a_while()) == [False]
    assert [len(names) for names in watched.asked] == [0, 0, 1, 0]
    assert backend.injected().by_kind() == {Fault.ERROR: 5}
    assert await watched.read(reads_of(0), deadline=a_while()) == [ReadOutcome.OK]


async def test_a_timeout_has_no_answer_before_the_deadline_and_its_write_may_be_there() -> None:
    watched, backend = await a_store({Fault.TIMEOUT: 1.0})
    begun = now()
    reads = reads_of(0)
    assert await backend.read(reads, deadline=begun + 5.0) == [ReadOutcome.TIMED_OUT]
    assert now() == begun + 5.0
    assert not any(reads[0].buffers[0])
    writes = writes_of(*range(100, 140))
    outcomes = await backend.write(writes, deadline=begun + 9.0)
    assert outcomes == [WriteOutcome.TIMED_OUT] * 40
    assert now() == begun + 9.0
    names = [write.name for write in writes]
    assert 10 < sum(await watched.exists(names, deadline=a_while())) < 30
    assert backend.injected().by_kind() == {Fault.TIMEOUT: 41}


async def test_a_delay_is_no_longer_than_said_and_never_goes_past_the_deadline() -> None:
    _, backend = await a_store({Fault.DELAY: 1.0})
    outcomes: list[ReadOutcome] = []
    times = [now()]
    for _ in range(50):
        outcomes += await backend.read(reads_of(0), deadline=a_while())
        times.append(now())
    assert outcomes == [ReadOutcome.OK] * 50
    delays = [after - before for before, after in pairwise(times)]
    assert 0 < min(delays) < 2
    assert 6 < max(delays) <= 8.0
    begun = now()
    for _ in range(50):
        await backend.write(writes_of(0), deadline=now() + 0.5)
    assert now() - begun <= 25.0
    assert backend.injected().by_kind() == {Fault.DELAY: 100}


async def test_a_lost_write_is_said_to_be_ok_and_nothing_is_stored() -> None:
    watched, backend = await a_store({Fault.LOST: 1.0})
    assert await backend.write(writes_of(7, 8), deadline=a_while()) == [WriteOutcome.OK] * 2
    assert await watched.read(reads_of(7, 8), deadline=a_while()) == [ReadOutcome.MISSING] * 2
    assert backend.injected().writes == {Fault.LOST: 2}


async def test_a_lie_turns_existence_round() -> None:
    _, backend = await a_store({Fault.LIE: 1.0})
    names = [object_name(0), object_name(9)]
    assert await backend.exists(names, deadline=a_while()) == [False, True]
    assert backend.injected().existence == {Fault.LIE: 2}


@pytest.mark.parametrize("kind", DAMAGES)
async def test_damage_lies_below_the_verification_of_the_store_which_finds_it(kind: Fault) -> None:
    watched, backend = await a_store({kind: 1.0})
    await backend.write(writes_of(10, 11, 12), deadline=a_while())
    outcomes = [await backend.read(reads_of(n), deadline=a_while()) for n in (10, 11)]
    assert outcomes == [[ReadOutcome.CORRUPT]] * 2
    assert backend.injected().reads == {kind: 2}
    assert watched.counters().reads_corrupt == 2


@pytest.mark.parametrize("kind", DAMAGES)
async def test_where_there_is_no_object_there_is_no_damage(kind: Fault) -> None:
    _, backend = await a_store({kind: 1.0})
    assert await backend.read(reads_of(99), deadline=a_while()) == [ReadOutcome.MISSING]
    assert backend.injected().total() == 0


async def test_a_call_that_comes_too_late_or_after_the_close_has_no_faults() -> None:
    _, backend = await a_store({Fault.ERROR: 0.5, Fault.LOST: 0.5})
    assert await backend.write(writes_of(7) * 9, deadline=now()) == [WriteOutcome.TIMED_OUT] * 9
    await backend.close()
    assert await backend.write(writes_of(7) * 9, deadline=a_while()) == [WriteOutcome.FAILED] * 9
    assert backend.injected().total() == 0


def test_equal_seeds_inject_the_same_faults_and_other_seeds_other_ones() -> None:
    rates = dict.fromkeys(Fault, 0.1)

    async def outcomes(seed: int) -> list[Any]:
        _, backend = await a_store(rates, seed)
        seen: list[Any] = []
        for number in range(60):
            seen.append(await backend.write([a_write(number % 9)], deadline=now() + 9.0))
            seen.append(await backend.read([a_read(number % 7)], deadline=now() + 9.0))
            seen.append(await backend.exists([object_name(number)], deadline=now() + 9.0))
            seen.append(now())
        return [*seen, backend.injected()]

    once, again, other = [run_virtually(outcomes(seed)) for seed in (5, 5, 6)]
    assert once == again
    assert once != other


def encoded(name: ObjectName, content: bytes) -> bytes:
    shape = ObjectShape.whole(len(content))
    return encode_object(name, digest_of(name), [memoryview(content)], shape) + content


def name_in(raw: bytes) -> ObjectName | None:
    """The name of an object; None if it is not sound."""
    said = check_object(memoryview(raw))
    return None if isinstance(said, HeaderFinding) else said.name


@given(
    kind=st.sampled_from(DamageKind),
    seed=st.integers(0, 2**32),
    payload=st.binary(max_size=300),
    other=st.binary(max_size=300),
)
def test_a_damaged_object_is_never_sound_under_its_name(
    kind: DamageKind, seed: int, payload: bytes, other: bytes
) -> None:
    name = object_name(1)
    # What is torn has zeros behind some place, which changes nothing where there were zeros before.
    assume(kind is not DamageKind.TORN or any(payload))

    damage = Damage(name=name, kind=kind, seed=seed)
    damaged = damage.apply(encoded(name, payload), encoded(object_name(2), other))

    assert damaged is not None
    assert name_in(damaged) != name


@given(seed=st.integers(0, 2**32), nbytes=st.integers(0, 300))
def test_an_object_of_zeros_is_torn_visibly_or_not_at_all(seed: int, nbytes: int) -> None:
    name = object_name(1)
    damage = Damage(name=name, kind=DamageKind.TORN, seed=seed)

    damaged = damage.apply(encoded(name, bytes(nbytes)), None)

    assert damaged is None or name_in(damaged) != name


def test_a_damage_touches_nothing_but_the_regular_file_of_an_object(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "target").write_bytes(b"untouched")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    damage = Damage(name=object_name(1), kind=DamageKind.SHORT, seed=1)
    others = ("missing", "directory", "link", "pipe")
    assert not any(damage_file(tmp_path / entry, damage, None) for entry in others)
    assert (tmp_path / "target").read_bytes() == b"untouched"
    assert damage_file(tmp_path / "target", damage, None)


class NoDamage:
    """A store of another package, whose objects nobody here knows how to damage."""

    def __init__(self) -> None:
        self.store = MemoryBackend()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_a_store_that_cannot_damage_its_objects_refuses_these_faults_by_name() -> None:
    store: Any = NoDamage()
    backend = Wrapper(store)
    FaultBackend(backend, FaultPlan(rates={Fault.ERROR: 0.1, Fault.FLIP: 0.0}))
    with pytest.raises(ConfigError, match=r"fault.flip, fault.wrong: NoDamage cannot damage"):
        FaultBackend(backend, FaultPlan(rates={Fault.FLIP: 0.1, Fault.WRONG: 0.1}))


@pytest.mark.parametrize("store", STORES)
def test_every_store_takes_every_kind_of_fault(store: str) -> None:
    options = "&".join(f"fault.{kind}=0.1" for kind in Fault)
    mark = "&" if "?" in store else "?"
    assert isinstance(make_backend(f"fault+{store}{mark}{options}"), FaultBackend)
    assert {parse_uri(each).scheme for each in STORES} == set(known_schemes()) - {"peer"}


def test_what_is_another_group_s_is_not_damaged_but_any_other_fault_can_be_had() -> None:
    assert isinstance(make_backend("fault+peer://127.0.0.1:1"), FaultBackend)
    with pytest.raises(ConfigError, match=r"fault.flip: PeerBackend cannot damage what it stores"):
        make_backend("fault+peer://127.0.0.1:1?fault.flip=0.1")


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damage_that_cannot_be_done_is_refused_in_one_line_that_names_the_option(
    kind: Fault,
) -> None:
    store: Any = NoDamage()
    uri = parse_uri(f"fault+other://?fault.error=0.1&fault.{kind}=0.1")
    with pytest.raises(ConfigError) as refused:
        wrap(uri, store)
    assert str(refused.value) == (
        f"store {uri.text!r}: fault.{kind}: NoDamage cannot damage what it stores; leave these "
        "faults out"
    )


def test_what_is_opened_for_looking_is_not_damaged(tmp_path: Path) -> None:
    looking = f"fault+file://{tmp_path}?read_only=1"
    with pytest.raises(ConfigError, match=r"fault.torn: with read_only=1 nothing .* damaged"):
        make_backend(f"{looking}&fault.torn=0.1&fault.error=0.1")
    assert isinstance(make_backend(f"{looking}&fault.error=0.1&fault.torn=0"), FaultBackend)
    assert isinstance(make_backend(looking), FaultBackend)


async def kinds_that_come(backend: StorageBackend) -> set[Fault]:
    """Make so many calls that each kind of fault comes that the backend can bring about."""
    assert isinstance(backend, FaultBackend)
    await backend.open()
    for number in range(600):
        soon = now() + 0.02
        await backend.write([a_write(number)], deadline=soon)
        await backend.read([a_read(number)], deadline=soon)
        await backend.exists([object_name(number)], deadline=soon)
    return set(backend.injected().by_kind())


def test_without_any_rate_each_kind_comes_now_and_then() -> None:
    backend = make_backend("fault+memory://?fault.seed=3&fault.delay_ms=0")
    assert run(kinds_that_come(backend)) == set(Fault)


def test_without_any_rate_a_store_that_cannot_damage_its_objects_has_the_other_kinds() -> None:
    store: Any = NoDamage()
    backend = wrap(parse_uri("fault+other://?fault.seed=3&fault.delay_ms=0"), store)
    assert run(kinds_that_come(backend)) == set(Fault) - set(DAMAGES)


@pytest.mark.parametrize(
    "rates", [{Fault.ERROR: 0.6, Fault.FLIP: 0.5}, {Fault.LOST: 0.9, Fault.TIMEOUT: 0.2}]
)
def test_rates_that_make_more_than_one_together_are_refused(rates: dict[Fault, float]) -> None:
    with pytest.raises(ConfigError, match="make more than 1 together"):
        FaultPlan(rates=rates)
