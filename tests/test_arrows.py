"""What may import what: the table of docs/architecture.md, held for every module of the library."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import pytest

from tests.kit.source_tree import (
    ROOT,
    Module,
    absolute_names,
    circles,
    neighbours,
    read_library,
)

ANYBODY = ("errors.py", "version.py")
LOADERS = [
    "ranks/disaggregation/groups/ray_directory.py",
    "storage_backends/redis_scripts.py",
    "storage_backends/registry.py",
    "storage_backends/three_fs/usrbio_rings.py",
]
"""The client of a store or of a directory is an extra, and a URI names the store and its wrappers."""
TABLE = ROOT / "docs" / "architecture.md"
ROW = re.compile(r"^\| `([\w/]+/)` \| [^|]* \| ([^|]*) \|$", re.MULTILINE)


def read_table(text: str) -> dict[str, list[str]]:
    """Return what each folder may import, as the table of the folders in `text` says it."""
    section = text.partition("## The folders\n")[2].partition("\n## ")[0]
    return {folder: re.findall(r"`([\w/.]+)`", cell) for folder, cell in ROW.findall(section)}


def folder_of(path: PurePosixPath) -> str:
    return f"{path.parent}/"


def names(entry: str, path: PurePosixPath) -> bool:
    """Whether an entry of the table, a folder or a file, names this file."""
    return entry in (folder_of(path), str(path))


def is_allowed(importer: PurePosixPath, imported: PurePosixPath, allowed: Sequence[str]) -> bool:
    """Whether a module may import another one, where its folder may import `allowed`."""
    neighbour = imported.parent == importer.parent
    return neighbour or str(imported) in ANYBODY or any(names(each, imported) for each in allowed)


def arrows_upwards(modules: Sequence[Module], table: Mapping[str, Sequence[str]]) -> list[str]:
    """One line for each import that the table does not allow."""
    library = {module.path: module for module in modules}
    return sorted(
        {
            f"{module.path} imports {other.path}"
            for module in modules
            if module.package
            for other in neighbours(module, library)
            if not is_allowed(module.path, other.path, table.get(folder_of(module.path), ()))
        }
    )


def test_every_import_is_one_that_the_table_of_the_folders_allows() -> None:
    assert arrows_upwards(read_library(), read_table(TABLE.read_text(encoding="utf-8"))) == []


def test_the_table_has_every_folder_and_no_other() -> None:
    folders = {folder_of(module.path) for module in read_library() if module.package}

    assert set(read_table(TABLE.read_text(encoding="utf-8"))) == folders


def test_the_table_allows_nothing_that_nobody_imports() -> None:
    modules = read_library()
    library = {module.path: module for module in modules}
    arrows = {
        (folder_of(module.path), other.path)
        for module in modules
        if module.package
        for other in neighbours(module, library)
    }

    unused = [
        f"{folder} may import {each}"
        for folder, allowed in read_table(TABLE.read_text(encoding="utf-8")).items()
        for each in allowed
        if not any(where == folder and names(each, path) for where, path in arrows)
    ]

    assert unused == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(read_library()) == []


def test_the_rooms_of_the_table_stand_above_one_another() -> None:
    """However the folders within a room lean on each other, rooms do so in one direction."""
    rooms: dict[str, set[str]] = {}
    for folder, allowed in read_table(TABLE.read_text(encoding="utf-8")).items():
        room = folder.partition("/")[0]
        rooms.setdefault(room, set()).update(each.partition("/")[0] for each in allowed)
    standing = {room: below - {room} for room, below in rooms.items()}

    placed: list[str] = []
    for _ in rooms:
        placed += sorted(room for room in standing.keys() - placed if standing[room] <= {*placed})

    assert sorted(placed) == sorted(rooms)


def test_what_everybody_may_import_imports_nothing() -> None:
    modules = read_library()
    library = {module.path: module for module in modules}

    found = {
        str(module.path): [str(other.path) for other in neighbours(module, library)]
        for module in modules
        if str(module.path) in ANYBODY
    }

    assert found == {path: [] for path in ANYBODY}


def test_modules_are_loaded_by_name_only_where_a_uri_or_an_extra_asks_for_them() -> None:
    """Such an import is seen by no table."""
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


def test_an_arrow_upwards_is_found(tmp_path: Path) -> None:
    plant(tmp_path, "page_format/header.py", "def f() -> None:\n    from ..ranks.cache import C\n")
    plant(tmp_path, "ranks/cache.py", "from ..page_format.shape import Shape\n")
    plant(tmp_path, "page_format/shape.py", "")

    found = arrows_upwards(read_library(tmp_path), {"page_format/": [], "ranks/": ["page_format/"]})

    assert found == ["page_format/header.py imports ranks/cache.py"]


@pytest.mark.parametrize(
    "third",
    ["from .first import F\n", "def f() -> None:\n    from .first import F\n"],
    ids=["at the top", "in a function"],
)
def test_a_circle_is_found_and_told_with_its_files(tmp_path: Path, third: str) -> None:
    plant(tmp_path, "ranks/first.py", "from .second import S\n")
    plant(tmp_path, "ranks/second.py", "from . import third\n")
    plant(tmp_path, "ranks/third.py", third)

    assert circles(read_library(tmp_path)) == [
        ["ranks/first.py", "ranks/second.py", "ranks/third.py"]
    ]
