"""The promises of a directory of groups, held by each of them."""

import itertools
import threading
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.errors import ConfigError, StorageError
from lockstep.ranks.disaggregation.groups.directory import (
    RECORD_BYTES_MAX,
    GroupDirectory,
    Registration,
    from_record,
    to_record,
)
from lockstep.ranks.disaggregation.groups.embedded_directory import EmbeddedDirectory
from lockstep.ranks.disaggregation.groups.ray_directory import RayDirectory
from lockstep.ranks.disaggregation.groups.router import Role
from tests.kit.launch.ray_clusters import TwoNodes
from tests.kit.launch.replays import needs_ray

LONG_S = 600.0
SHORT_S = 0.1
_numbers = itertools.count()

PREFILL = Registration(
    name="prefill-0",
    role=Role.PREFILL,
    addresses={"requests": "10.0.0.1:8000", "events": "10.0.0.1:5557"},
    tp_size=8,
    fingerprint="abc",
    start="first",
)
DECODE = Registration(name="decode-0", role=Role.DECODE, tp_size=4, fingerprint="abc")

Connect = Callable[[], GroupDirectory]
"""Opens one more connection to the directory under test, as another process would."""


ON_RAY = pytest.param("ray", marks=[pytest.mark.distributed, pytest.mark.slow, needs_ray])


@pytest.fixture(params=["in process", "sqlite", ON_RAY])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Connect]:
    opened: list[GroupDirectory] = []
    number = next(_numbers)

    def in_process() -> GroupDirectory:
        return opened[0] if opened else EmbeddedDirectory()

    def in_a_file() -> GroupDirectory:
        return EmbeddedDirectory(str(tmp_path / "groups.db"))

    def on_ray() -> GroupDirectory:
        request.getfixturevalue("two_nodes")
        return RayDirectory(f"test-{number}")

    kinds = {"in process": in_process, "sqlite": in_a_file, "ray": on_ray}
    make = kinds[request.param]

    def one_more() -> GroupDirectory:
        directory = make()
        if directory not in opened:
            directory.open()
            opened.append(directory)
        return directory

    yield one_more
    for directory in opened:
        directory.close()


def ask_until_gone(directory: GroupDirectory, name: str) -> int:
    """Return the version of the first list without a group."""
    while True:
        listing = directory.groups()
        if name not in {each.registration.name for each in listing.members}:
            return listing.version


def test_nobody_is_there_at_first(connect: Connect) -> None:
    listing = connect().groups()

    assert (listing.version, listing.members) == (0, ())


def test_who_has_registered_is_seen_by_all_as_it_has_said(connect: Connect) -> None:
    writer, reader = connect(), connect()
    one, other = writer.register(PREFILL, LONG_S), writer.register(DECODE, LONG_S)

    members = reader.groups().members

    assert [each.registration for each in members] == [DECODE, PREFILL]
    assert [each.life for each in members] == [other.life, one.life]


def test_the_version_changes_exactly_when_the_list_does(connect: Connect) -> None:
    directory = connect()
    versions = [directory.groups().version]
    lease = directory.register(PREFILL, LONG_S)
    versions.append(directory.groups().version)
    directory.renew(lease, LONG_S)
    same = directory.groups().version
    directory.leave(lease)
    versions.append(directory.groups().version)
    directory.leave(lease)

    assert versions == sorted(set(versions))
    assert same == versions[1]
    assert directory.groups().version == versions[2]


def test_who_does_not_renew_vanishes_and_the_version_says_so(connect: Connect) -> None:
    directory = connect()
    lease = directory.register(PREFILL, SHORT_S)
    directory.register(DECODE, LONG_S)
    before = directory.groups().version

    after = ask_until_gone(directory, "prefill-0")

    assert after > before
    assert [each.registration for each in directory.groups().members] == [DECODE]
    assert not directory.renew(lease, LONG_S)
    assert directory.groups().version == after


def test_who_renews_stays(connect: Connect) -> None:
    directory = connect()
    lease = directory.register(PREFILL, SHORT_S)
    directory.register(DECODE, SHORT_S)

    assert directory.renew(lease, LONG_S)
    ask_until_gone(directory, "decode-0")

    assert [each.registration for each in directory.groups().members] == [PREFILL]


def test_a_group_that_comes_back_has_a_later_life_and_its_old_lease_is_over(
    connect: Connect,
) -> None:
    directory = connect()
    old = directory.register(PREFILL, LONG_S)
    new = directory.register(replace(PREFILL, tp_size=16), LONG_S)

    directory.leave(old)

    assert new.life > old.life
    assert not directory.renew(old, LONG_S)
    assert directory.renew(new, LONG_S)
    assert [each.registration.tp_size for each in directory.groups().members] == [16]


def test_lives_grow_also_over_leaving(connect: Connect) -> None:
    directory = connect()
    lives: list[int] = []
    for _ in range(3):
        lease = directory.register(PREFILL, LONG_S)
        lives.append(lease.life)
        directory.leave(lease)

    assert lives == sorted(set(lives))


def test_many_groups_register_at_once(connect: Connect) -> None:
    directories = [connect() for _ in range(4)]

    def register(at: int) -> None:
        directories[at].register(replace(PREFILL, name=f"group-{at}"), LONG_S)

    threads = [threading.Thread(target=register, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    members = directories[0].groups().members
    assert [each.registration.name for each in members] == [f"group-{at}" for at in range(4)]
    assert len({each.life for each in members}) == 4


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_lease_that_never_ends_or_cannot_be_renewed_is_refused(
    connect: Connect, lease_s: float
) -> None:
    with pytest.raises(ConfigError, match="lease_s"):
        connect().register(PREFILL, lease_s)


def test_a_directory_that_is_closed_says_so(connect: Connect) -> None:
    directory = connect()
    directory.close()

    with pytest.raises(StorageError, match="not open"):
        directory.groups()


@needs_ray
def test_a_directory_on_ray_needs_a_process_that_is_connected() -> None:
    with pytest.raises(ConfigError, match="this process is not connected to it"):
        RayDirectory("of nobody").open()


@pytest.mark.slow
@pytest.mark.distributed
@needs_ray
def test_a_directory_on_ray_that_is_lost_does_not_answer(two_nodes: TwoNodes) -> None:
    directory = RayDirectory("to be lost")
    directory.open()
    directory.register(PREFILL, LONG_S)
    two_nodes.ray.kill(two_nodes.ray.get_actor("to be lost", namespace="lockstep"))

    with pytest.raises(StorageError, match="ray-actor://to be lost does not answer"):
        directory.groups()

    directory.close()


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "groups.db").write_bytes(b"no database" * 100)

    with pytest.raises(ConfigError, match=r"groups\.db cannot be opened"):
        EmbeddedDirectory(str(tmp_path / "groups.db")).open()


@pytest.mark.parametrize(
    ("name", "tp_size", "fingerprint", "complaint"),
    [
        ("", 1, "", "needs a name"),
        ("g", 0, "", "TP size is 0"),
        ("g", 1, "f" * RECORD_BYTES_MAX, "may take"),
    ],
)
def test_a_registration_that_makes_no_sense_is_refused(
    name: str, tp_size: int, fingerprint: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Registration(name=name, role=Role.BOTH, tp_size=tp_size, fingerprint=fingerprint)


def test_a_registration_is_read_back_as_it_was() -> None:
    assert from_record(to_record(PREFILL)) == PREFILL


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xc1",
        b"\x90",
        to_record(PREFILL)[:-1],
        to_record(PREFILL).replace(b"prefill\x82", b"unknown\x82"),
        b"\xa1" * (RECORD_BYTES_MAX + 1),
    ],
)
def test_a_record_that_makes_no_sense_is_nobody_s(record: bytes) -> None:
    assert from_record(record) is None
