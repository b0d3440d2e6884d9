"""Compares the fields of vLLM's configuration with the committed lists, and prints what is on none.

A program of its own, since importing vLLM changes how a process logs, warns and ends.
"""

import json
import sys
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from typing import Any

import vllm

from lockstep.integrations.proven_out import names_of
from lockstep.integrations.releases import is_release
from lockstep.integrations.vllm.kv_identity import LOOKED_AT
from lockstep.integrations.vllm.proven_out import PROVEN_OUT
from lockstep.integrations.vllm.same_function import AT_ANY_VALUE, BY_DEFAULT
from tests.kit.vllm.contract import has
from tests.kit.vllm.keyed_fields import KEYED, SINCE_0_33

ENGINE = "vllm"


def path_of(kind: type) -> str:
    """Return how the lists call a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def classes_in(hint: Any) -> Iterator[type]:
    """Yield the classes of which the engine's own values of this type may be."""
    for argument in typing.get_args(hint):
        yield from classes_in(argument)
    if isinstance(hint, type) and hint.__module__.split(".")[0] == ENGINE:
        yield hint


def walk(kind: Any, found: dict[str, list[str]]) -> None:
    """Enter the fields of a class, and of those that they may hold and that count."""
    path = path_of(kind)
    if path in found or issubclass(kind, Enum) or not is_dataclass(kind):
        return
    left_out = names_of(PROVEN_OUT.get(path, {}))
    hints = typing.get_type_hints(kind)
    found[path] = [each.name for each in fields(kind) if each.name not in left_out]
    for name in found[path]:
        for inner in classes_in(hints[name]):
            walk(inner, found)


def told() -> list[str]:
    """Return a sentence for each field on which vLLM and the lists do not agree."""
    found: dict[str, list[str]] = {}
    walk(import_module("vllm.config").VllmConfig, found)
    later = {} if is_release(vllm.__version__, ["0.33"]) else SINCE_0_33
    sentences: list[str] = []
    for path in sorted({*found, *KEYED}):
        listed = {*KEYED.get(path, "").split()} - {*later.get(path, "").split()}
        here = set(found.get(path, ()))
        sentences += [f"{path}.{name} is on neither list" for name in sorted(here - listed)]
        sentences += [f"vLLM counts no {path}.{name}" for name in sorted(listed - here)]
    for path, reasons in (*PROVEN_OUT.items(), *AT_ANY_VALUE.items(), *BY_DEFAULT.items()):
        module, _, name = path.rpartition(".")
        kind = getattr(import_module(module), name)
        expected = names_of(reasons) - {*later.get(path, "").split()}
        lacking = [each for each in sorted(expected) if not has(kind, each)]
        sentences += [f"vLLM has no {path}.{each}, which has a reason" for each in lacking]
    return [*sentences, *told_of_sharing(found)]


def told_of_sharing(found: dict[str, list[str]]) -> Iterator[str]:
    """Yield a sentence for each field that is on no list of those that are the same function."""
    for path in BY_DEFAULT:
        known = names_of(AT_ANY_VALUE.get(path, {})) | names_of(BY_DEFAULT[path])
        for name in sorted(set(found[path]) - known - LOOKED_AT.get(path, frozenset())):
            yield f"{path}.{name} is shared at no value"


def main() -> None:
    """Print what is to be said."""
    json.dump(told(), sys.stdout)


if __name__ == "__main__":
    main()
