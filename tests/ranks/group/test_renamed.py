"""Public names that have changed: the former ones warn and still work."""

from typing import Any

import pytest

from lockstep import HostCache
from tests.kit.ranks.in_turn import HostRanksInTurn


@pytest.mark.parametrize(
    ("former", "name", "arguments"),
    [
        ("hit", "match_host", ("r1", [1] * 32)),
        ("lends", "has_copies_in_flight", ("r1",)),
        ("keep_off", "wait_for_copies", ()),
        ("awaits_room", "waits_for_host_pages", ("r1",)),
        ("witness", "digest_facts", ("fact",)),
        ("obey", "set_control_handler", (print,)),
    ],
)
def test_a_former_name_warns_and_is_the_method_of_the_new_name(
    former: str, name: str, arguments: tuple[Any, ...]
) -> None:
    (cache,) = HostRanksInTurn(1).caches

    with pytest.warns(
        DeprecationWarning, match=f"{former} is now {name}; the former name is removed"
    ):
        getattr(cache, former)(*arguments)

    assert getattr(HostCache, former).__wrapped__ is getattr(HostCache, name)
