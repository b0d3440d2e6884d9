"""Settings are validated by their annotations; an error names the path of the field."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from msgspec import Meta

from lockstep.coordinator.validated_settings import (
    AtLeastOne,
    Seconds,
    Settings,
    Text,
    part_of,
    read_settings,
)
from lockstep.errors import ConfigError


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Inner(Settings):
    pages: AtLeastOne = 3
    colour: Colour = Colour.RED
    depth: Annotated[int, Meta(ge=0, le=1)] | None = None


@dataclass(frozen=True, kw_only=True)
class Outer(Settings):
    name: Text = "x"
    inner: Inner = field(default_factory=Inner)
    other: Inner | None = None
    secret: str = field(default="", repr=False)
    parts: tuple[str, ...] = ()
    wait_s: Seconds = 1.0
    flag: bool = False
    kind: Literal["tcp", "rdma"] = "tcp"
    texts: Mapping[str, Text] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.flag and self.other is None:
            raise ConfigError("flag needs other")


def test_what_is_given_is_converted_and_the_rest_is_as_by_default() -> None:
    given = {"other": {"colour": "blue"}, "parts": ["a"], "wait_s": 2, "flag": True}

    assert read_settings(Outer, given, "here") == Outer(
        name="x", other=Inner(colour=Colour.BLUE), parts=("a",), wait_s=2.0, flag=True
    )
    assert Inner(colour="blue").colour is Colour.BLUE  # type: ignore[arg-type]


def test_text_stands_for_numbers_and_flags_where_nothing_else_can_be_written() -> None:
    given = {"name": "1", "wait_s": "2.5", "flag": "0", "kind": "rdma"}

    read = read_settings(Outer, given, "a URI", strict=False)

    assert read == Outer(name="1", wait_s=2.5, kind="rdma")
    with pytest.raises(ConfigError, match=r"^a URI: wait_s is 'soon', must be a number$"):
        read_settings(Outer, given | {"wait_s": "soon"}, "a URI", strict=False)
    with pytest.raises(ConfigError, match=r"^a URI: there is no option 'x'; known: flag, inner, "):
        read_settings(Outer, given | {"x": "1"}, "a URI", strict=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, "here is 7, must hold keys and values"),
        ({"name": ""}, "here: name is '', must be non-empty text"),
        ({"name": 5}, "here: name is 5, must be text"),
        (
            {"nam": "x"},
            "here: there is no key 'nam'; known: flag, inner, kind, name, other, parts,",
        ),
        ({"inner": {"pages": 0}}, "here: inner.pages is 0, must be at least 1"),
        ({"inner": {"pages": True}}, "here: inner.pages is True, must be a whole number"),
        ({"inner": {"pages": 1.5}}, "here: inner.pages is 1.5, must be a whole number"),
        ({"other": {"colour": "grey"}}, "here: other.colour is 'grey', must be one of red, blue"),
        ({"other": {"depth": 2}}, "here: other.depth is 2, must be at most 1"),
        ({"other": {"depth": "2"}}, "here: other.depth is '2', must be a whole number or null"),
        ({"other": {"page": 1}}, "here: other: there is no key 'page'; known: colour, de"),
        ({"inner": 5}, "here: inner is 5, must be keys and values"),
        ({"secret": 5}, "here: secret must be text"),
        ({"parts": "abc"}, "here: parts is 'abc', must be a list"),
        ({"parts": ["a", 1]}, "here: parts is a list, must have text in each place"),
        ({"texts": {"a": 1}}, "here: texts is a dict, must have text in each place"),
        ({"wait_s": 0}, "here: wait_s is 0, must be more than 0"),
        ({"wait_s": float("nan")}, "here: wait_s is nan, must be more than 0"),
        ({"wait_s": float("inf")}, "here: wait_s is inf, must be at most 1000000"),
        ({"wait_s": 10**400}, "which is refused: Number out of range"),
        ({"flag": 1}, "here: flag is 1, must be true or false"),
        ({"flag": True}, "here: flag needs other"),
        ({"kind": "udp"}, "here: kind is 'udp', must be one of tcp, rdma"),
    ],
)
def test_what_is_wrong_is_named_with_its_value_and_the_remedy(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_settings(Outer, given, "here")

    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_setting_without_a_default_must_be_given() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wanting(Settings):
        name: str

    with pytest.raises(ConfigError, match=r"^here: name is missing; give it$"):
        read_settings(Wanting, {}, "here")


def test_settings_are_checked_however_they_are_made() -> None:
    with pytest.raises(ConfigError, match=r"^pages is 0, must be at least 1$"):
        Inner(pages=0)


def test_a_part_of_settings_is_what_a_base_has() -> None:
    @dataclass(frozen=True, kw_only=True)
    class More(Inner):
        more: int = 1

    assert Inner(**part_of(More(pages=7), Inner)) == Inner(pages=7)


@dataclass(frozen=True, kw_only=True)
class Many(Settings):
    inners: tuple[Inner, ...] = ()
    one: Inner = field(default_factory=Inner)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"one": {"page": 1}}, "one: there is no key 'page'; known: colour, depth, pages"),
        ({"inners": [{"page": 1}]}, "inners: there is no key 'page'; known: colour, depth, pages"),
        ({"inners": [{"pages": 0}]}, "inners.pages is 0, must be at least 1"),
    ],
)
def test_maps_are_read_as_settings_wherever_they_stand(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Many(**given)
    assert str(refused.value) == message


def test_numbers_of_numpy_are_numbers() -> None:
    assert type(Inner(pages=np.int64(5)).pages) is int  # type: ignore[arg-type]
    assert type(Outer(wait_s=np.float64(5)).wait_s) is float


@pytest.mark.parametrize("value", [[{"secret": "hunter2"}], "s3://key:hunter2@x"])
def test_messages_show_no_secret(value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        Outer(wait_s=value)
    assert "hunter2" not in str(refused.value)
