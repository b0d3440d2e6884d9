"""What a directory loses is not lost; who goes alone, or comes back with nothing, is."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace

import pytest

from lockstep.ranks.disaggregation.groups.directory import Lease, Registration
from lockstep.ranks.disaggregation.groups.embedded_directory import EmbeddedDirectory
from lockstep.ranks.disaggregation.groups.roster import Roster
from lockstep.ranks.disaggregation.groups.router import Role

LEASE_S = 600.0
GRACE_S = 12.5
ONE = Registration(name="one", role=Role.PREFILL, start="1")
OTHER = Registration(name="other", role=Role.DECODE, start="2")
NAMES = {"one", "other"}


class Listed:
    """Two groups that a directory lists, and a roster that has seen them."""

    def __init__(self, directory: EmbeddedDirectory) -> None:
        self.directory = directory
        directory.open()
        self.leases = {each.name: self.register(each) for each in (ONE, OTHER)}
        self.roster = Roster(directory, GRACE_S)
        self.roster.look(0.0, NAMES)

    def register(self, registration: Registration) -> Lease:
        return self.directory.register(registration, LEASE_S)

    def forget(self, *names: str) -> None:
        for each in names:
            self.directory.leave(self.leases[each])

    def look(self, now_s: float) -> tuple[list[str], list[str]]:
        gone, came = self.roster.look(now_s, NAMES)
        return gone, [each.registration.name for each in came]


@pytest.fixture
def listed() -> Generator[Listed]:
    with closing(EmbeddedDirectory()) as directory:
        yield Listed(directory)


def test_a_group_that_is_listed_no_more_while_others_are_is_gone(listed: Listed) -> None:
    listed.forget("one")

    assert listed.look(1.0) == (["one"], [])
    assert set(listed.roster.members) == {"other"}


def test_groups_that_vanish_all_at_once_and_come_back_one_by_one_were_never_gone(
    listed: Listed,
) -> None:
    listed.forget("one", "other")
    seen = [listed.look(1.0)]
    listed.register(ONE)
    seen.append(listed.look(2.0))
    listed.register(OTHER)
    seen.append(listed.look(GRACE_S))

    assert seen == [([], []), ([], ["one"]), ([], ["other"])]


def test_groups_that_vanish_all_at_once_and_do_not_come_back_are_gone(listed: Listed) -> None:
    listed.forget("one", "other")

    early = [listed.look(1.0), listed.look(GRACE_S)]
    late = listed.look(GRACE_S + 1.0)

    assert early == [([], []), ([], [])]
    assert sorted(late[0]) == ["one", "other"]


def test_a_group_has_time_to_come_back_to_a_directory_that_did_not_answer(listed: Listed) -> None:
    listed.directory.close()
    silent = listed.look(1.0)
    listed.directory.open()
    listed.register(ONE)
    after = listed.look(2.0)
    listed.register(OTHER)
    late = listed.look(3.0)

    assert (silent, after, late) == (([], []), ([], ["one"]), ([], ["other"]))


def test_a_group_that_went_once_and_came_back_may_be_gone_at_once_the_next_time(
    listed: Listed,
) -> None:
    listed.forget("one", "other")
    listed.look(1.0)
    listed.register(ONE)
    lease = listed.register(OTHER)
    listed.look(2.0)

    listed.directory.leave(lease)

    assert listed.look(3.0) == (["other"], [])


def test_a_group_that_was_started_anew_is_gone_and_has_come(listed: Listed) -> None:
    listed.register(replace(ONE, start="3"))

    assert listed.look(1.0) == (["one"], ["one"])
    assert listed.look(2.0) == ([], [])


def test_a_group_that_is_listed_anew_has_come_and_is_not_gone(listed: Listed) -> None:
    listed.register(ONE)

    assert listed.look(1.0) == ([], ["one"])


def test_groups_of_other_names_are_nobody(listed: Listed) -> None:
    listed.register(replace(ONE, name="stranger"))

    assert listed.look(1.0) == ([], [])
