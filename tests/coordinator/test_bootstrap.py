"""Bootstrap: all ranks compare their settings, and if one rank fails, none continues."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

import pytest

from lockstep.coordinator.bootstrap import (
    Scalar,
    agree_on_settings,
    agree_that_all_are_ready,
    differences,
    fingerprint,
    flatten,
)
from lockstep.coordinator.collectives.in_process import InProcessCollective, InProcessGroup
from lockstep.errors import ConfigError
from lockstep.page_format.page_layout import Column, PageLayout
from lockstep.ranks.protocol.config import Bounds, CacheConfig

T = TypeVar("T")
TIMEOUT_S = 20.0


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    size: int
    colour: Colour | None


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner
    parts: tuple[Inner, ...]


def test_settings_flatten_to_leaves_with_dotted_names() -> None:
    value = Outer("x", Inner(1, Colour.RED), (Inner(2, None), Inner(3, None)))

    assert flatten(value) == {
        "name": "x",
        "inner.size": 1,
        "inner.colour": "red",
        "parts.length": 2,
        "parts[0].size": 2,
        "parts[0].colour": None,
        "parts[1].size": 3,
        "parts[1].colour": None,
    }


def test_a_setting_without_a_fingerprint_is_refused() -> None:
    with pytest.raises(TypeError, match=r"type object is unsupported"):
        flatten(Outer(object(), Inner(1, None), ()))  # type: ignore[arg-type]


def test_every_setting_of_a_cache_has_a_fingerprint_of_its_own() -> None:
    """Bootstrap compares every setting of a cache, nested ones too; an unsupported type is refused."""
    leaves = flatten(config())

    assert {"model", "bounds.prefetches", "timeouts.round_s", "stop_policy.rule"} <= leaves.keys()
    assert leaves["layout.columns[0].heads"] == 4
    assert leaves != flatten(replace(config(), bounds=Bounds(prefetches=31)))


def test_equal_settings_have_no_differences() -> None:
    assert differing([flatten(config())] * 3) == []
    assert differing([{"a": 1}]) == []


def test_a_difference_names_the_field_the_values_and_the_ranks() -> None:
    settings: list[dict[str, Scalar]] = [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 1, "b": "x"},
    ]

    assert differing(settings) == ["b is 'x' on ranks 0, 2, 'y' on rank 1"]


def test_a_field_that_one_rank_lacks_is_a_difference() -> None:
    """A setting that only one rank has is a difference, as between two versions of Lockstep."""
    assert differing([{"a": None}, {}]) == ["a is None on rank 0, absent on rank 1"]


def test_values_of_another_type_are_a_difference() -> None:
    assert differing([{"a": 1}, {"a": "1"}, {"a": 1.0}, {"a": True}]) == [
        "a is 1 on rank 0, '1' on rank 1, 1.0 on rank 2, True on rank 3"
    ]


def test_a_difference_in_a_secret_is_named_and_the_secret_is_not() -> None:
    def shown(value: str) -> str:
        return value.partition("@")[0]

    fingerprints = [
        fingerprint({"a": value, "b": 1}, shown) for value in ("x@1", "x@2", "y@3", "x@1")
    ]

    assert differences(fingerprints) == [
        "a is 'x' on ranks 0, 3, equal except for a secret on rank 1, 'y' on rank 2"
    ]


def test_pools_get_the_size_that_every_rank_has() -> None:
    """Rule R3: capacities are the MIN over ranks at bootstrap."""
    sizes = [(64, 300), (80, 200), (72, 500)]

    def agree(collective: InProcessCollective) -> dict[str, int]:
        device, host = sizes[collective.rank]
        smallest = {"device_pages": device, "host_pages": host}
        return agree_on_settings(collective, flatten(config()), smallest, TIMEOUT_S, shown=str)

    assert on_every_rank(3, agree) == [{"device_pages": 64, "host_pages": 200}] * 3


def test_settings_that_differ_raise_the_same_error_on_every_rank() -> None:
    def agree(collective: InProcessCollective) -> str:
        bounds = Bounds(prefetches=16 if collective.rank == 2 else 32)
        with pytest.raises(ConfigError) as raised:
            agree_on_settings(
                collective, flatten(replace(config(), bounds=bounds)), {}, TIMEOUT_S, shown=str
            )
        return str(raised.value)

    message = (
        "the ranks were started with different settings: "
        "bounds.prefetches is 32 on ranks 0, 1, 16 on rank 2"
    )
    assert on_every_rank(3, agree) == [message] * 3


def test_the_first_three_differences_are_shown_and_the_others_counted() -> None:
    def agree(collective: InProcessCollective) -> str:
        fields = dict.fromkeys("abcde", collective.rank)
        with pytest.raises(ConfigError) as raised:
            agree_on_settings(collective, fields, {}, TIMEOUT_S, shown=str)
        return str(raised.value)

    (message, _) = on_every_rank(2, agree)

    assert message.endswith(
        "a is 0 on rank 0, 1 on rank 1; b is 0 on rank 0, 1 on rank 1; "
        "c is 0 on rank 0, 1 on rank 1; and 2 more"
    )


@pytest.mark.parametrize(
    ("problems", "message"),
    [
        ([None, "no room", None], "rank 1: no room"),
        (["no room", "no room", None], "ranks 0, 1: no room"),
        (["no room", None, "no store"], "rank 0: no room; rank 2: no store"),
        (["no room", "no room", "no room"], "no room"),
        ([None, "", None], "rank 1: "),
        (
            [f"no PUT of x/{digit * 32} in 1{digit}.5ms; try again" for digit in "012"],
            f"no PUT of x/{'0' * 32} in 10.5ms; try again",
        ),
        (
            [None, f"x/{'1' * 32}: no room", f"x/{'2' * 32}: no room"],
            f"ranks 1, 2: x/{'1' * 32}: no room",
        ),
        (["no 0", "no 1", "no 1"], "rank 0: no 0; ranks 1, 2: no 1"),
    ],
)
def test_the_problem_of_one_rank_reaches_all(problems: list[str | None], message: str) -> None:
    def agree(collective: InProcessCollective) -> str:
        with pytest.raises(ConfigError) as raised:
            agree_that_all_are_ready(collective, problems[collective.rank], TIMEOUT_S)
        return str(raised.value)

    assert on_every_rank(3, agree) == [message] * 3


def differing(settings: list[dict[str, Scalar]]) -> list[str]:
    return differences([fingerprint(each, str) for each in settings])


def config() -> CacheConfig:
    column = Column(name="k", layers=1, heads=4, elements=8)
    return CacheConfig(
        model="test",
        layout=PageLayout(page_tokens=4, columns=(column,)),
        device_pages=8,
        host_pages=8,
    )


def on_every_rank(world_size: int, run: Callable[[InProcessCollective], T]) -> list[T]:
    group = InProcessGroup(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        members = [group.member(rank) for rank in range(world_size)]
        return [each.result(60) for each in [pool.submit(run, member) for member in members]]
