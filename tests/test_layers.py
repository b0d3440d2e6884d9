"""Layers: no module imports from a layer with a greater number, and there are no import cycles."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

import pytest

from tests.kit.source_tree import (
    Module,
    absolute_names,
    circles,
    cycles,
    neighbours,
    read_library,
)

LAYERS = (
    "errors.py version.py",
    "page_format",
    "coordinator",
    "ranks/protocol",
    "ranks/replica",
    "storage_backends",
    "hostd",
    "ranks",
    "integrations telemetry small_engine simulation benchmarks",
    "launch",
)
LOADERS = ["storage_backends/registry.py", "storage_backends/three_fs/usrbio.py"]
"""Modules exempt from the layer rules, because they import stores or optional clients by name."""


def layer_of(path: PurePosixPath) -> int:
    """Return the number of a module's layer, by its longest matching prefix."""
    names = {name: number for number, line in enumerate(LAYERS, 1) for name in line.split()}
    return max(
        ((len(name), number) for name, number in names.items() if path.is_relative_to(name)),
        default=(0, len(LAYERS) + 1),
    )[1]


def imports_upwards(modules: Sequence[Module]) -> list[str]:
    library = {module.path: module for module in modules}
    return sorted(
        {
            f"{module.path} imports {other.path}"
            for module in modules
            for other in neighbours(module, library)
            if layer_of(other.path) > layer_of(module.path)
        }
    )


def folder_cycles(modules: Iterable[Module]) -> list[list[str]]:
    """Return each group of folders that import each other in a cycle, except through `__init__.py`.

    Sibling folders are also compared as whole subtrees: each folder below a sibling counts as the
    sibling. Folders at the root are not compared in this way, because they are layers.
    """
    library = {module.path: module for module in modules}
    imports: dict[PurePosixPath, set[PurePosixPath]] = defaultdict(set)
    beside: dict[PurePosixPath, set[PurePosixPath]] = defaultdict(set)
    for module in library.values():
        here = module.path.parent
        found = {other.path.parent for other in neighbours(module, library)} - {here}
        if module.path.name != "__init__.py":
            imports[here] |= found
            for one, other in filter(None, (siblings(here, there) for there in found)):
                beside[one].add(other)
    found_cycles = [*cycles(close(imports)), *cycles(close(beside))]
    return [each for at, each in enumerate(found_cycles) if each not in found_cycles[:at]]


def siblings(
    one: PurePosixPath, other: PurePosixPath
) -> tuple[PurePosixPath, PurePosixPath] | None:
    """Return both paths, cut after the first part that differs; None if they differ at the root."""
    for at, (here, there) in enumerate(zip(one.parts, other.parts, strict=False)):
        if here != there:
            up_to = slice(at + 1)
            return (
                (PurePosixPath(*one.parts[up_to]), PurePosixPath(*other.parts[up_to]))
                if at
                else None
            )
    return None


def close(
    imports: dict[PurePosixPath, set[PurePosixPath]],
) -> dict[PurePosixPath, set[PurePosixPath]]:
    """Return the import graph with an empty entry for each imported folder that imports nothing."""
    named = {*imports, *(other for found in imports.values() for other in found)}
    return {each: imports.get(each, set()) for each in sorted(named)}


def test_a_module_imports_no_layer_with_a_greater_number() -> None:
    assert imports_upwards(read_library()) == []


def test_no_files_import_each_other_in_a_cycle() -> None:
    assert circles(read_library()) == []


def test_no_folders_import_each_other_in_a_cycle() -> None:
    assert folder_cycles(read_library()) == []


def test_modules_are_loaded_by_name_only_where_a_uri_or_an_extra_asks_for_them() -> None:
    assert [
        str(module.path)
        for module in read_library()
        if absolute_names(module) & {"importlib.import_module", "importlib.__import__"}
        or "__import__" in module.source
    ] == LOADERS


def plant(root: Path, path: str, source: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    for folder in (file.parent, *file.parent.parents):
        if folder.is_relative_to(root) and folder != root:
            (folder / "__init__.py").touch()
    file.write_text(source, encoding="utf-8")


def test_an_import_upwards_is_found(tmp_path: Path) -> None:
    plant(tmp_path, "ranks/protocol/orders.py", "def f() -> None:\n    from ..cache import C\n")
    plant(tmp_path, "ranks/cache.py", "from .protocol.config import Config\n")
    plant(tmp_path, "ranks/protocol/config.py", "")

    found = imports_upwards(read_library(tmp_path))

    assert found == ["ranks/protocol/orders.py imports ranks/cache.py"]


@pytest.mark.parametrize(
    "third",
    ["from .first import F\n", "def f() -> None:\n    from .first import F\n"],
    ids=["at the top", "in a function"],
)
def test_a_cycle_is_found_and_named_with_its_files(tmp_path: Path, third: str) -> None:
    plant(tmp_path, "ranks/first.py", "from .second import S\n")
    plant(tmp_path, "ranks/second.py", "from . import third\n")
    plant(tmp_path, "ranks/third.py", third)

    assert circles(read_library(tmp_path)) == [
        ["ranks/first.py", "ranks/second.py", "ranks/third.py"]
    ]


def test_a_cycle_of_folders_is_found_though_none_of_files_is_there(tmp_path: Path) -> None:
    plant(tmp_path, "ranks/first.py", "from .below.second import S\n")
    plant(tmp_path, "ranks/below/second.py", "from ..third import T\n")
    plant(tmp_path, "ranks/third.py", "")

    modules = read_library(tmp_path)

    assert circles(modules) == []
    assert folder_cycles(modules) == [["ranks", "ranks/below"]]


def test_a_cycle_of_folders_is_found_that_runs_through_what_is_below_one(tmp_path: Path) -> None:
    plant(tmp_path, "ranks/one/first.py", "from ..two.second import S\n")
    plant(tmp_path, "ranks/two/second.py", "from ..one.below.third import T\n")
    plant(tmp_path, "ranks/one/below/third.py", "")

    assert folder_cycles(read_library(tmp_path)) == [["ranks/one", "ranks/two"]]
