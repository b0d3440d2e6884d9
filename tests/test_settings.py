"""Every field of every settings class refuses invalid values with a `ConfigError`."""

import re
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from math import inf, nan
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep import Column, ConfigError, PageLayout
from lockstep.coordinator.validated_settings import Settings, TaggedSettings
from lockstep.launch.cli.replay_settings import ReplaySettings
from tests.kit.source_tree import read_library

LAYOUT = PageLayout(page_tokens=1, columns=(Column(name="k", layers=1, heads=4, elements=1),))
NEEDED: dict[str, Any] = {
    "model": "m",
    "layout": LAYOUT,
    "device_pages": 0,
    "host_pages": 8,
    "page_tokens": 1,
    "window_tokens": 4,
    "checkpoint_tokens": 4,
    "pool": "window",
    "every_pages": 1,
    "kind": "full_attention",
    "layers": 1,
    "columns": (),
    "keeps": (),
    "namespace": "a",
    "name": "k",
    "heads": 1,
    "elements": 1,
    "path": "s",
    "has_store": True,
    "bucket": "b",
    "model_digest": b"m",
    "master": "m:1",
    "store": None,
    "hicache_ratio": 2.0,
    "hicache_size": 0,
    "hicache_write_policy": "write_through",
    "mount": "/m",
    "hicache_host_memory_mode": "cache",
    "hicache_storage_prefetch_policy": "timeout",
    "hicache_storage_backend": None,
    "hicache_storage_backend_extra_config": None,
}
"""Valid values of fields without a default, by name."""
OTHERS: dict[str, Any] = {
    "PageLayout": {"columns": LAYOUT.columns},
    "CacheConfig": {"device_pages": 8},
    "ConnectorSettings": {"host_pages": 8},
    "GenerateSettings": {"host_pages": 8},
    "StorageSettings": {"store": "memory://"},
    "_AttachSettings": {"store": "memory://"},
}
"""Values of other fields that a class needs to be valid, by class name."""
WRONG: list[Any] = [
    *(None, True, 5, -1, 1 << 70, 0.5, nan, inf, 1j, b"x", object(), type),
    *("", "x", "\0", "a:b", "tcp://", "peer://", "7", "half \ud800", f"a:{'1' * 5000}"),
    *([], [None], [5], ["x"], [[]], [{}], ("x", 5), {"x"}),
    *({}, {"x": 5}, {5: "x"}, {"x": None}, Column, LAYOUT, [LAYOUT]),
    *(np.array([5, 5]), np.array(0.5), range(2), np.array([None])),
]


def kinds() -> list[Any]:
    for module in read_library():
        if re.search(r"^class \w+\(.*(Settings|Limits|Config)\b", module.source, re.MULTILINE):
            import_module(".".join(("lockstep", *module.path.with_suffix("").parts)))
    found: list[Any] = [Settings, TaggedSettings]
    for each in found:
        found += each.__subclasses__()
    mine = {each for each in found[2:] if each.__module__.startswith("lockstep.")}
    return sorted({*mine, Column, PageLayout, ReplaySettings}, key=lambda each: each.__qualname__)


def names_of(kind: Any) -> dict[str, bool]:
    """Return each field's name, and whether the class requires the field."""
    if is_dataclass(kind):
        return {each.name: not _has_default(each) for each in fields(kind)}
    return {each.name: each.required for each in msgspec.structs.fields(kind)}


def _has_default(each: Any) -> bool:
    return repr(each.default) + repr(each.default_factory) != repr(MISSING) * 2


def refusal(kind: Any, given: dict[str, Any]) -> str:
    """Return the error's text; for valid settings all field names, so that each name is found."""
    try:
        kind(**given)
    except ConfigError as refused:
        return str(refused)
    return " ".join(given)


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__qualname__)
def test_a_field_takes_a_value_or_refuses_it_in_one_line(kind: Any) -> None:
    names = names_of(kind)
    given = {name: NEEDED[name] for name, needed in names.items() if needed}
    given |= OTHERS.get(kind.__qualname__, {})
    kind(**given)

    wrong = [(name, value) for name in names for value in WRONG]
    refusals = [(name, value, refusal(kind, {**given, name: value})) for name, value in wrong]

    # For a value of a wrong type, the error must name the field. For an invalid text or an empty list,
    # the error may omit the name.
    typed = [each for each in refusals if not (isinstance(each[1], str) or repr(each[1]) == "[]")]
    assert [each for each in typed if each[0] not in each[2].replace("-", "_")] == []
    assert [each for each in refusals if "\n" in each[2]] == []
