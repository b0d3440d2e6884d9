"""Every module of the library is reachable from something that a user, engine or operator calls."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import PurePosixPath

from tests.kit.source_tree import ROOT, Module, neighbours, read_library

NAME = re.compile(r"(?:lockstep)?\.([a-z_0-9.]*[a-z_0-9])(?::[a-z_]+)?")
LOADED_BY_NAME = {
    "__init__.py": "public names",
    "integrations/vllm/__init__.py": "kv_connector_module_path of vLLM",
    "integrations/transformers/__init__.py": "the cache of generate()",
    "integrations/sglang/hicache/storage.py": "the dynamic storage of HiCache",
    "benchmarks/copies.py": "make gpu",
    "benchmarks/vllm_overhead.py": "make bench-engines",
    "telemetry/spans.py": "a span processor of OpenTelemetry",
}


def entry_points() -> set[str]:
    """Return the modules of the command and of the plugins that engines load by entry points."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["scripts"], *project.get("entry-points", {}).values()]
    named = [each.partition(":")[0] for group in groups for each in group.values()]
    return {each.removeprefix("lockstep.").replace(".", "/") + ".py" for each in named}


def named(module: Module, library: dict[PurePosixPath, Module]) -> Iterator[PurePosixPath]:
    """Yield the modules named in a module's strings: stores, commands, programs for `python -m`."""
    for node in ast.walk(module.parse()):
        text = node.value if isinstance(node, ast.Constant) else None
        match = NAME.fullmatch(text) if isinstance(text, str) else None
        if match is not None:
            path = PurePosixPath(*match[1].split(".")).with_suffix(".py")
            yield from {path, module.path.parent / path} & library.keys()


def reached(library: dict[PurePosixPath, Module]) -> set[PurePosixPath]:
    """Return the modules reachable from the roots by imports and by names in strings."""
    found: set[PurePosixPath] = set()
    new = {PurePosixPath(each) for each in LOADED_BY_NAME.keys() | entry_points()}
    while new:
        found |= new
        modules = [library[path] for path in new]
        imported = {each.path for module in modules for each in neighbours(module, library)}
        new = (imported | {path for each in modules for path in named(each, library)}) - found
    return found


def test_every_module_is_reached() -> None:
    library = {each.path: each for each in read_library()}
    modules = {path for path in library if path.parts[0] not in {"docs", "examples"}}

    unreached = sorted(
        str(path) for path in modules - reached(library) if path.name != "__init__.py"
    )

    assert unreached == []


def test_a_module_that_nothing_leads_to_is_found() -> None:
    library = {each.path: each for each in read_library()}
    alone = Module(PurePosixPath("ranks/alone.py"), "from .cache import Cache\n")

    assert alone.path not in reached(library | {alone.path: alone})
