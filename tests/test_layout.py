"""The source tree: contents of the wheel, documented files, and structure of modules."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from zipfile import ZipFile

import pytest

import lockstep
from tests.kit.snippets import blocks_of, pages
from tests.kit.source_tree import (
    ROOT,
    Module,
    absolute_names,
    matches,
    package_folders,
    read_folder,
    read_library,
)

NAME = ROOT / "src" / "lockstep"
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 8
PATH = re.compile(r"[\w.*{},/-]+(?:\.(?:py|md|toml|sh|json)|/)")
CLAUSE = re.compile(r"\s*(?:What|Whoever|Whatever|Nobody|It)\b")
PLACEHOLDER = re.compile(r"(?:^|/)[A-Z]+(?:\.\w+)?(?:/|$)")


@pytest.mark.timeout(300)
def test_the_wheel_holds_every_module_and_the_typing_marker_and_no_more(tmp_path: Path) -> None:
    modules = {f"lockstep/{module.path}" for module in read_library()}

    contents = wheel_contents(tmp_path)

    assert {name for name in contents if ".dist-info/" not in name} == modules | {
        "lockstep/py.typed"
    }


def test_the_import_name_is_only_relative_links_and_the_typing_marker() -> None:
    entries = {entry for entry in NAME.iterdir() if entry.name not in {"py.typed", "__pycache__"}}

    targets = {entry.name: str(entry.readlink()) for entry in entries if entry.is_symlink()}

    assert targets == {entry.name: f"../../{entry.name}" for entry in entries}
    assert [entry.name for entry in entries if not entry.exists()] == []
    assert (NAME / "py.typed").is_file()


def test_every_package_and_root_module_has_its_link() -> None:
    at_the_root = {file.name for file in ROOT.glob("*.py")}

    links = {entry.name for entry in NAME.iterdir() if entry.is_symlink()}

    assert links == at_the_root | set(package_folders())


def test_every_public_class_of_the_library_has_a_name_of_its_own() -> None:
    names = Counter(
        node.name
        for module in read_library()
        for node in module.parse().body
        if isinstance(node, ast.ClassDef) and node.name[0] != "_"
    )

    assert [name for name, count in names.items() if count > 1] == []


def test_a_file_of_settings_or_of_a_command_is_named_after_what_it_holds() -> None:
    assert [
        str(module.path)
        for module in read_library()
        if module.path.name in {"settings.py", "command.py"}
    ] == []


def test_no_docstring_begins_with_a_relative_clause_or_a_bare_pronoun() -> None:
    assert [
        f"{module.path}:{node.lineno}"
        for module in [*read_library(), *read_folder("tests"), *read_folder("examples")]
        for node in ast.walk(module.parse())
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and CLAUSE.match(node.value.value)
    ] == []


def test_nobody_imports_a_folder_by_its_bare_name() -> None:
    bare = {*package_folders(), "errors", "version"}

    offenders = [
        f"{module.path} imports {name}"
        for module in [*read_library(), *read_folder("tests")]
        for name in sorted(absolute_names(module))
        if any(matches(name, folder) for folder in bare)
    ]

    assert offenders == []


def test_the_library_imports_its_neighbours_relatively() -> None:
    offenders = [
        f"{module.path} imports {name}"
        for module in read_library()
        for name in sorted(absolute_names(module))
        if matches(name, "lockstep")
    ]

    assert offenders == []


def test_the_structure_names_every_folder() -> None:
    structure = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    folders = {module.path.parent.name for module in read_library()} - {""}

    assert {name for name in folders if not re.search(rf"[`/{{,]{name}[/,}}]", structure)} == set()


def test_no_function_is_longer_than_a_screen() -> None:
    lengths = {
        f"{module.path}:{node.lineno} {node.name}": (node.end_lineno or node.lineno)
        - node.lineno
        + 1
        for module in read_library()
        for node in ast.walk(module.parse())
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }

    assert {place: n for place, n in lengths.items() if n > FUNCTION_LINES_MAX} == {}


def test_no_function_has_more_parameters_than_a_reader_keeps_apart() -> None:
    counts = {
        f"{module.path}:{node.lineno} {node.name}": len(
            [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        )
        - (bool(node.args.args) and node.args.args[0].arg in {"self", "cls"})
        for module in read_library()
        for node in ast.walk(module.parse())
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }

    assert {place: n for place, n in counts.items() if n > PARAMETERS_MAX} == {}


def test_every_module_is_named_after_what_it_does() -> None:
    empty_words = {"util", "utils", "helper", "helpers", "common", "misc", "manager", "handler"}

    offenders = [
        str(module.path)
        for module in [*read_library(), *read_folder("tests")]
        if empty_words & set(module.path.stem.split("_")) or empty_words & set(module.package)
    ]

    assert offenders == []


def test_every_test_has_one_path_and_makes_its_claim_once() -> None:
    offenders = [
        f"{module.path}:{test.lineno} {test.name}: {', '.join(found)}"
        for module in read_folder("tests")
        for test in claims_of(module)
        if (found := sorted({*branches(test), *claims_in_loops(test)}))
    ]

    assert offenders == []


def claims_of(module: Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node
        for node in ast.walk(module.parse())
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    ]


def branches(test: ast.AST) -> list[str]:
    return [
        type(node).__name__.lower()
        for node in ast.walk(test)
        if isinstance(node, ast.If | ast.While | ast.Try | ast.TryStar | ast.Match)
    ]


def claims_in_loops(test: ast.AST) -> list[str]:
    return [
        "assert in a loop"
        for loop in ast.walk(test)
        if isinstance(loop, ast.For | ast.AsyncFor)
        for node in ast.walk(loop)
        if isinstance(node, ast.Assert)
    ]


def test_a_folder_s_own_module_says_what_the_folder_is_and_no_more() -> None:
    """An `__init__.py` holds only a docstring, because each import from its folder also runs it."""
    # These `__init__.py` files are allowed to import, because they export public names.
    plugins = ("vllm/__init__.py", "transformers/__init__.py")
    exceptions = ("__init__.py", *(f"integrations/{each}" for each in plugins))

    offenders = [
        str(module.path)
        for module in [*read_library(), *read_folder("tests/kit")]
        if module.path.name == "__init__.py" and str(module.path) not in exceptions
        if ast.get_docstring(module.parse()) is None or len(module.parse().body) != 1
    ]

    assert offenders == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_path_that_a_page_names_is_in_the_tree(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    used = {word for block in blocks_of(page.name, text) for word in block.text.split()}

    named = {path for path in paths_in(text) if not is_elsewhere(path) and path not in used}

    assert sorted(path for path in named if not is_in_the_tree(path)) == []


@pytest.mark.parametrize(
    "path",
    [
        "ranks/group/cache.py",  # A full path from the repository's root.
        "replica/tree/",  # A path may start at any folder above the file or folder that it names.
        "node.py",
        "storage_backends/{file,s3}/",
        "examples/watching/*.json",
    ],
)
def test_a_path_is_found_wherever_a_reader_would_find_it(path: str) -> None:
    assert is_in_the_tree(path)


def test_a_path_is_not_found_by_the_end_of_a_name_nor_if_one_of_several_is_missing() -> None:
    missing = ["de.py", "tree.json", "storage_backends/{file,gone}/", "ranks/group/cache.py/"]

    assert [path for path in missing if is_in_the_tree(path)] == []


def paths_in(text: str) -> set[str]:
    """Return text between backticks, outside code blocks, that looks like a path of the repository."""
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [span.split() for span in re.findall(r"`([^`]+)`", prose)]
    # In a quoted command of several words, only a word with a slash counts as a path. Other file names
    # are the command's outputs.
    words = {word for span in spans for word in span if len(span) == 1 or "/" in word}
    return {word for word in words if PATH.fullmatch(word)}


def is_elsewhere(path: str) -> bool:
    """Whether a path is a user's `*.json`, a placeholder, an absolute path, or ignored by git."""
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").replace("/", "").split()
    built = path.partition("/")[0] in ignored
    data = path.endswith(".json") and "/" not in path
    return path.startswith("/") or built or data or PLACEHOLDER.search(path) is not None


def is_in_the_tree(path: str) -> bool:
    """Return whether a file or folder matches the path; of `{a,b}`, each alternative must match."""
    choice = re.search(r"\{([^{}]*)\}", path)
    if choice:
        before, after = path[: choice.start()], path[choice.end() :]
        return all(is_in_the_tree(f"{before}{each}{after}") for each in choice[1].split(","))
    return any(fnmatchcase(each, f"*/{path}") for each in tree())


@cache
def tree() -> list[str]:
    """Return every file and folder that git does not ignore, from `/`; folders end in `/`."""
    kept = [each for each in ROOT.iterdir() if not is_elsewhere(each.name) and each.name != ".git"]
    below = [entry for each in kept for entry in (each, *each.rglob("*"))]
    return [f"/{entry.relative_to(ROOT)}{'/' * entry.is_dir()}" for entry in below]


def test_the_package_and_its_metadata_name_the_same_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert lockstep.__version__ == project["version"]


def wheel_contents(scratch: Path) -> list[str]:
    """Return the files of a wheel built from a copy, without files of an earlier build."""
    not_source = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, scratch / "tree", symlinks=True, ignore=not_source)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(scratch)]
    done = subprocess.run(
        [*build, str(scratch / "tree")],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    (wheel,) = scratch.glob("*.whl")
    with ZipFile(wheel) as archive:
        return archive.namelist()
