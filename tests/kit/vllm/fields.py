"""Prints the names of vLLM's settings by class, and of its environment variables, as JSON.

This is a separate program because importing vLLM changes how a process logs, warns and exits.
"""

import json
import sys
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

from lockstep.integrations.vllm.kv_identity import PACKAGE


def classes_in(hint: Any) -> Iterator[type]:
    """Yield vLLM's configuration classes that appear in a type hint."""
    for argument in typing.get_args(hint):
        yield from classes_in(argument)
    if isinstance(hint, type) and hint.__module__.startswith(PACKAGE):
        yield hint


def walk(kind: type, found: dict[str, list[str]]) -> None:
    """Add a class's settings to `found`, and those of the configuration classes in its fields."""
    if kind.__qualname__ in found or not is_dataclass(kind):
        return
    hints = typing.get_type_hints(kind)
    found[kind.__qualname__] = sorted(each.name for each in fields(kind) if each.init)
    for name in found[kind.__qualname__]:
        for inner in classes_in(hints[name]):
            walk(inner, found)


def main() -> None:
    found: dict[str, list[str]] = {}
    walk(import_module("vllm.config").VllmConfig, found)
    found["variables"] = sorted(import_module("vllm.envs").environment_variables)
    json.dump(found, sys.stdout, sort_keys=True)


if __name__ == "__main__":
    main()
