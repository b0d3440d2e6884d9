"""Compares what configures SGLang with the committed lists, and prints what is on none.

A program of its own, since importing SGLang changes how a process logs, warns and ends.
"""

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from lockstep.integrations.proven_out import names_by_owner, names_of
from lockstep.integrations.sglang.identity.environment import ENVIRONMENT_PROVEN_OUT, READ_BESIDE
from lockstep.integrations.sglang.identity.proven_out import (
    CLASSES_PROVEN_OUT,
    FIELDS_PROVEN_OUT,
    FILES,
)
from lockstep.integrations.sglang.identity.same_function import AT_ANY_VALUE, BY_DEFAULT
from tests.kit.sglang.keyed_fields import KEYED

NAME = r"""["']([A-Z][A-Z0-9_]+)["']"""
READ = re.compile(
    rf"(?:env_var\(|getenv\(|environ\[|environ\.(?:get|pop|setdefault)\()\s*{NAME}"
    rf"|{NAME} (?:not )?in os\.environ"
)

OTHER_PROGRAMS = ("multimodal_gen", "diffusion", "unit_test", "benchmark", "/test")
"""Parts of SGLang that run in processes in which no cache of KV is."""


def attributes_of(kind: type) -> set[str]:
    """Return the attributes that a class gives its instances, as far as its source tells."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind)))):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
            case _:
                pass
    return found


def configured() -> dict[str, set[str]]:
    """Return the names of all that configures SGLang, by namespace and by class."""
    arg_utils: Any = import_module("sglang.srt.arg_groups.arg_utils")
    arguments: Any = import_module("sglang.srt.server_args").ServerArgs
    found: dict[str, set[str]] = {}
    for name, namespace in arg_utils.namespace_of(arguments).items():
        found.setdefault(namespace, set()).add(name)
    model: Any = import_module("sglang.srt.configs.model_config").ModelConfig
    found[f"{model.__module__}.{model.__qualname__}"] = attributes_of(model)
    graphs: Any = import_module("sglang.srt.model_executor.cuda_graph_config")
    for kind in (graphs.CudaGraphConfig, graphs.PhaseConfig):
        found[f"{kind.__module__}.{kind.__qualname__}"] = {each.name for each in fields(kind)}
    return found


def told_of_fields() -> Iterator[str]:
    """Yield a sentence for each field on which SGLang and the lists do not agree."""
    found = configured()
    files = {namespace: frozenset(names.split()) for namespace, names in FILES.items()}
    for lists in (FIELDS_PROVEN_OUT, CLASSES_PROVEN_OUT):
        for owner, out in names_by_owner(lists).items():
            if not owner.startswith("transformers."):
                yield from _each(out - found[owner], f"SGLang has no {owner}.", ", proven out")
    for owner in sorted({*found, *KEYED}):
        out = _out(owner, FIELDS_PROVEN_OUT) | _out(owner, CLASSES_PROVEN_OUT)
        here = found.get(owner, set()) - out - files.get(owner, frozenset())
        listed = set(KEYED.get(owner, "").split())
        yield from _each(here - listed, f"{owner}.", " is on neither list")
        yield from _each(listed - here, f"SGLang counts no {owner}.", "")


def told_of_sharing() -> Iterator[str]:
    """Yield a sentence for each field that is on no list of those that are the same function."""
    found = configured()
    at_any_value, by_default = names_by_owner(AT_ANY_VALUE), names_by_owner(BY_DEFAULT)
    for owner, names in (*at_any_value.items(), *by_default.items()):
        yield from _each(names - found[owner], f"SGLang has no {owner}.", ", which is shared")
    for owner, listed in KEYED.items():
        if not owner.startswith("sglang.srt.model_executor."):
            known = at_any_value.get(owner, set[str]()) | by_default.get(owner, set[str]())
            yield from _each(set(listed.split()) - known, f"{owner}.", " is shared at no value")


def told_of_variables() -> Iterator[str]:
    """Yield a sentence for each variable on which SGLang and the lists do not agree."""
    environ: Any = import_module("sglang.srt.environ")
    variables: list[Any] = [*vars(environ.Envs).values()]
    declared = {str(each.name) for each in variables if isinstance(each, environ.EnvField)}
    out, beside = names_of(ENVIRONMENT_PROVEN_OUT), frozenset(READ_BESIDE.split())
    read = set(variables_read(Path(import_module("sglang").__path__[0])))
    yield from _each(read - declared - beside - out, "SGLang reads ", ", which is on neither list")
    yield from _each(out - declared - read, "SGLang reads no ", ", proven out")
    yield from _each(beside - read, "SGLang reads no ", ", in the key")
    yield from _each(beside & (out | declared), "", " is on two lists")


def variables_read(package: Path) -> Iterator[str]:
    """Yield the names of the variables that SGLang's own modules read."""
    for part in ("srt", "kernels", "jit_kernel"):
        for path in sorted((package / part).rglob("*.py")):
            if not any(each in str(path.relative_to(package)) for each in OTHER_PROGRAMS):
                for match in READ.finditer(path.read_text()):
                    yield match[1] or match[2]


def _out(owner: str, lists: Mapping[str, Mapping[str, str]]) -> frozenset[str]:
    return names_of(lists.get(owner, {}))


def _each(names: set[str] | frozenset[str], before: str, after: str) -> Iterator[str]:
    return (f"{before}{name}{after}" for name in sorted(names))


if __name__ == "__main__":
    json.dump([*told_of_fields(), *told_of_sharing(), *told_of_variables()], sys.stdout)
