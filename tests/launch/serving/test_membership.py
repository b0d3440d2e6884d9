"""A group stays listed while it steps, and two that have one name do not take turns."""

import itertools
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lockstep.launch.serving.membership import Membership
from lockstep.ranks.disaggregation.groups.directory import Lease, Registration
from lockstep.ranks.disaggregation.groups.embedded_directory import EmbeddedDirectory
from lockstep.ranks.disaggregation.groups.router import Role

LEASE_S = 600.0
Start = Callable[[str], Membership]


@pytest.fixture
def lives() -> list[int]:
    """The lives that groups have begun after their first."""
    return []


@pytest.fixture
def directory(tmp_path: Path) -> Generator[EmbeddedDirectory]:
    directory = EmbeddedDirectory(str(tmp_path / "groups.db"))
    directory.open()
    yield directory
    directory.close()


@pytest.fixture
def start(tmp_path: Path, lives: list[int]) -> Generator[Start]:
    """What starts a group at an address, under the same name as any other."""
    with ExitStack() as opened:

        def started(address: str) -> Membership:
            of_its_own = EmbeddedDirectory(str(tmp_path / "groups.db"))
            of_its_own.open()
            addresses = {"messages": address}
            group = Registration(name="decode-0", role=Role.DECODE, addresses=addresses)
            steps = itertools.count()
            membership = Membership(
                of_its_own,
                group,
                LEASE_S,
                steps=lambda: next(steps),
                on_new_life=lives.append,
            )
            opened.callback(membership.close)
            return membership

        yield started


def addresses(directory: EmbeddedDirectory) -> list[str]:
    return [each.registration.addresses["messages"] for each in directory.groups().members]


def test_two_groups_of_one_name_do_not_take_turns_and_both_say_so(
    start: Start,
    directory: EmbeddedDirectory,
    lives: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = start("here:1"), start("there:2")

    for _ in range(3):
        first.renew()
        second.renew()

    assert addresses(directory) == ["there:2"]
    assert lives == []
    assert [each.getMessage() for each in caplog.records] == [
        "group decode-0 takes the place of one at here:1",
        (
            "group decode-0 is listed no more: one that was started later has its name, at there:2;"
            " give each group a name of its own"
        ),
    ]


def test_a_group_that_gave_way_is_listed_again_once_its_name_is_free(
    start: Start, directory: EmbeddedDirectory, lives: list[int]
) -> None:
    first, second = start("here:1"), start("there:2")
    first.renew()

    second.close()
    first.renew()

    assert addresses(directory) == ["here:1"]
    assert lives == [first.life]


def test_a_group_that_the_directory_has_forgotten_is_listed_again(
    start: Start, directory: EmbeddedDirectory, lives: list[int]
) -> None:
    group = start("here:1")
    (member,) = directory.groups().members
    directory.leave(Lease("decode-0", group.life))

    group.renew()

    (again,) = directory.groups().members
    assert again.registration == member.registration
    assert lives == [again.life]
