"""The digest of a configuration is equal in every process, and differs if the configuration does."""

import re
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from functools import cached_property
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.integrations.canonical import canonical, digest
from tests.kit.source_tree import ROOT


class Mode(IntEnum):
    NONE = 0
    FULL = 1


class Other(Enum):
    """An enum whose member has the same name as that of another enum."""

    NONE = 0


@dataclass
class Held:
    size: int = 1
    names: list[str] = field(default_factory=list[str])

    @cached_property
    def computed(self) -> int:
        return self.size * 2


class Derived(Held):
    """A subclass that adds no fields."""


class Plain:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


class Saved:
    def __init__(self, state: object) -> None:
        self.state = state

    def __getstate__(self) -> object:
        return self.state


class OwnDict(dict[str, int]):
    """A dict subclass that also has attributes, as some configuration classes do."""


class OwnList(list[Any]):
    """A list subclass, whose instances can have attributes."""


class OwnSet(set[int]):
    """A set subclass, whose instances can have attributes."""


class OwnText(str):
    """A text subclass whose `__str__` returns a different text."""

    __slots__ = ("__dict__",)

    def __str__(self) -> str:
        return "text"


class OwnNumber(float):
    """A float subclass, whose instances can have attributes."""


class OwnPath(PurePosixPath):
    """A path subclass, whose instances can have attributes."""


@dataclass
class HeldDict(OwnDict):
    """A mapping that is also a dataclass with fields."""

    size: int = 1


class Window(NamedTuple):
    window: int
    sink: int


class Turned(NamedTuple):
    """A named tuple that has the same fields as another class, `Window`, in another order."""

    sink: int
    window: int


Turned.__qualname__ = Window.__qualname__

OwnT = TypeVar("OwnT")


def own(value: OwnT, **attributes: object) -> OwnT:
    vars(value).update(attributes)
    return value


def module_function() -> None:
    """A function that is not a lambda."""


def worth(value: object) -> str:
    return digest(canonical(value, "it"))


EVERYTHING: list[object] = [
    *(None, False, True, 0, 1, 2, 1.0, 0.1, float("nan"), float("inf"), "", "1", b"", b"1"),
    *(Mode.NONE, Mode.FULL, Other.NONE, int, bool, module_function),
    *(torch.float16, torch.bfloat16, torch.device("cpu"), Path("/a"), Path("/b")),
    *(Fraction(1, 2), Fraction(1, 3), Decimal("0.5")),
    *(re.compile("a"), re.compile("a", re.IGNORECASE), np.int64(1), np.float32(1)),
    *([], [1], [[1]], [1, 2], {}, {1: 2}, {"1": 2}, {2: 1}, set[int](), {1}, {1, 2}),
    *(Saved(("rope", 1)), Saved(("yarn", 1)), Saved(1), Saved({"(holds)": 1}), Saved({1: 2})),
    *(OwnDict(), OwnDict(x=1), own(OwnDict(x=1), scale=1), own(OwnDict(x=1), scale=2)),
    *(HeldDict(), HeldDict(2), own(OwnSet({1}), scale=1), own(OwnSet({1}), scale=2), OwnSet({2})),
    *(OwnList([1]), OwnList([2]), own(OwnList([1]), scale=1), own(OwnList([1]), scale=2)),
    *(OwnText("a"), OwnText("b"), own(OwnText("a"), scale=1), own(OwnNumber(1), scale=1)),
    *(OwnNumber(1), OwnNumber(2), (1, 2, 3), Window(1, 2), Window(2, 1), Turned(1, 2)),
    *(torch.Size([1]), defaultdict[int, Any](list), defaultdict[int, Any](set), Counter("a")),
    *(OrderedDict(a=1), own(OrderedDict[str, int](a=1), scale=1), range(3), range(4)),
    *(Held(), Held(2), Held(1, ["a"]), Derived(), Plain(), Plain(size=1), Slotted(1), Slotted(2)),
]


def test_what_differs_is_worth_something_else() -> None:
    found = [worth(value) for value in EVERYTHING]

    assert len(set(found)) == len(EVERYTHING)


@pytest.mark.parametrize(
    ("one", "same"),
    [
        (OrderedDict({"a": 1, "b": 2}), OrderedDict({"b": 2, "a": 1})),
        (Counter("aab"), Counter("baa")),
        (OwnDict(a=1, b=2), OwnDict(b=2, a=1)),
        (OwnSet({3, 1, 2}), OwnSet({2, 3, 1})),
        ({"a": 1}, MappingProxyType({"a": 1})),
        (OrderedDict({"a": 1}), OrderedDict[str, int]({"a": 1})),
        ([1, 2], (1, 2)),
        ({3, 1, 2}, frozenset({2, 3, 1})),
        (Held(1, ["a"]), Held(1, ["a"])),
        (float("nan"), -float("nan")),
    ],
)
def test_what_is_equal_is_worth_the_same(one: object, same: object) -> None:
    assert worth(one) == worth(same)


def worth_in_the_order_of_hashes() -> str:
    names = {"q_proj", "k_proj", "v_proj", "o_proj"}
    return worth({"names": names, "sizes": {name: len(name) for name in names}})


def test_the_seed_of_a_process_for_hashes_changes_nothing() -> None:
    program = f"from {__name__} import worth_in_the_order_of_hashes as f; print(f(), end='')"
    # The subprocess's hash seed differs from this process's, which is random.
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join([str(ROOT), *sys.path])},
        capture_output=True,
        check=True,
    )

    assert found.stdout.decode() == worth_in_the_order_of_hashes()


def test_what_is_set_beside_the_fields_counts_and_what_is_only_cached_does_not() -> None:
    plain, cached, more = Held(), Held(), Held()
    assert cached.computed == 2
    more.__dict__["unheard_of"] = 1

    assert worth(cached) == worth(plain)
    assert worth(more) != worth(plain)


def test_what_is_left_out_of_a_class_is_left_out_of_those_derived_from_it() -> None:
    left_out = {f"{__name__}.Held": frozenset({"size"})}

    found = [digest(canonical(Derived(size), "it", left_out)) for size in (1, 2)]

    assert found[0] == found[1] != worth(Derived(1))


def test_an_object_that_holds_itself_is_walked_once() -> None:
    one, other = Plain(size=1), Plain(size=2)
    one.__dict__["itself"], other.__dict__["itself"] = one, other

    assert worth(one) != worth(other)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object().__repr__, "it.config.hook is a builtins.method-wrapper, which has no canonical"),
        (torch.zeros(1), "it.config.hook is a torch.Tensor, which has no canonical bytes"),
        (lambda: None, "<lambda>, which has no importable name"),
        (
            OwnPath("/a"),
            "it.config.hook is a .*test_canonical.OwnPath, which has no canonical bytes",
        ),
        (deque([1], 3), "it.config.hook is a collections.deque, which has no canonical bytes"),
        (own(OwnDict(), deep=iter([1])), "it.config.hook.deep is a builtins.list_iterator"),
        (OwnList([iter([1])]), r"it.config.hook\[0\] is a builtins.list_iterator"),
        (Plain(deep=iter([1])), "it.config.hook.deep is a builtins.list_iterator"),
        ([{"k": iter([1])}], r"it.config.hook\[0\]\['k'\] is a builtins.list_iterator"),
    ],
)
def test_what_has_no_canonical_bytes_is_refused_by_the_name_of_its_field(
    value: object, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        canonical(Plain(config=Plain(hook=value)), "it")
