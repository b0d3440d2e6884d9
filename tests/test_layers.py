"""Which top-level folders may import which, and that no files import each other in a cycle."""

from pathlib import Path

import pytest

from tests.kit.source_tree import Module, absolute_names, circles, neighbours, read_library

ORDER = (
    "errors.py version.py",
    "page_format coordinator",
    "storage_backends",
    "ranks",
    "telemetry small_engine",
    "simulation integrations",
    "benchmarks",
    "launch",
    "__init__.py",
)
"""Each line imports only the lines before it."""
LINE = {name: line for line, names in enumerate(ORDER) for name in names.split()}
LOADERS = [
    "storage_backends/registry.py",
    "storage_backends/three_fs/usrbio.py",
]
"""A URI names the store and its wrappers; the client of a store is an extra."""


def imports_upwards(modules: list[Module]) -> list[str]:
    """One line for each import of a folder that does not stand before the importer's."""
    library = {module.path: module for module in modules}
    return sorted(
        {
            f"{module.path} imports {other.path}"
            for module in modules
            for other in neighbours(module, library)
            if module.path.parts[0] != other.path.parts[0]
            if LINE[other.path.parts[0]] >= LINE[module.path.parts[0]]
        }
    )


def test_a_folder_imports_only_those_that_stand_before_it() -> None:
    assert imports_upwards(read_library()) == []


def test_no_files_import_each_other_in_a_cycle() -> None:
    assert circles(read_library()) == []


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
    (file.parent / "__init__.py").touch()
    file.write_text(source, encoding="utf-8")


def test_an_import_upwards_is_found(tmp_path: Path) -> None:
    plant(tmp_path, "page_format/header.py", "def f() -> None:\n    from ..ranks.cache import C\n")
    plant(tmp_path, "ranks/cache.py", "from ..page_format.shape import Shape\n")
    plant(tmp_path, "page_format/shape.py", "")

    found = imports_upwards(read_library(tmp_path))

    assert found == ["page_format/header.py imports ranks/cache.py"]


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
