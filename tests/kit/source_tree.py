"""Reads the library's source files without importing them."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Module:
    """One source file, with its path relative to the root."""

    path: PurePosixPath
    source: str

    @property
    def package(self) -> tuple[str, ...]:
        """Return the folders of the module's package. Relative imports start in this package."""
        return self.path.parent.parts

    def parse(self) -> ast.Module:
        """Return the syntax tree. A syntax error names the file."""
        return _parsed(self)

    def is_under(self, *folders: str) -> bool:
        return any(self.path.is_relative_to(folder) for folder in folders)


@cache
def _parsed(module: Module) -> ast.Module:
    return ast.parse(module.source, filename=str(module.path))


def package_folders(root: Path = ROOT) -> list[str]:
    """Return the top-level folders that are packages of the library."""
    return sorted(
        entry.name
        for entry in root.iterdir()
        if entry.is_dir() and entry.name != "tests" and (entry / "__init__.py").exists()
    )


def read_folder(folder: str, root: Path = ROOT) -> list[Module]:
    """Return every module in this folder, at any depth, in path order."""
    return [_read(file, root) for file in sorted((root / folder).rglob("*.py"))]


def read_library(root: Path = ROOT) -> list[Module]:
    """Return every module of the library: the modules at the root, then those of each folder."""
    at_the_root = [_read(file, root) for file in sorted(root.glob("*.py"))]
    in_folders = [m for folder in package_folders(root) for m in read_folder(folder, root)]
    return at_the_root + in_folders


def _read(file: Path, root: Path) -> Module:
    return Module(PurePosixPath(file.relative_to(root)), file.read_text(encoding="utf-8"))


@cache
def absolute_names(module: Module) -> frozenset[str]:
    """Return the dotted names outside the library that this module imports or accesses.

    Both `from torch import distributed` and `import torch as t` followed by `t.distributed` give
    `torch.distributed`.
    """
    nodes = list(ast.walk(module.parse()))
    bound: dict[str, str] = {}
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                names.add(alias.name)
                root_name = alias.name.partition(".")[0]
                bound[alias.asname or root_name] = alias.name if alias.asname else root_name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                names.add(name)
                bound[alias.asname or alias.name] = name
    for node in nodes:
        if isinstance(node, ast.Attribute):
            base, *rest = _dotted(node) or [""]
            if base in bound:
                names.add(".".join([bound[base], *rest]))
    return frozenset(names)


def _dotted(node: ast.expr) -> list[str] | None:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return None if base is None else [*base, node.attr]
    return None


def neighbours(module: Module, library: dict[PurePosixPath, Module]) -> Iterator[Module]:
    """Yield the modules that this module imports by relative imports.

    The implicit import of parent packages does not count. Otherwise the root's `__init__.py`, which
    imports the whole library, would put all modules into one cycle.
    """
    for node in ast.walk(module.parse()):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            start = module.package[: len(module.package) - node.level + 1]
            target = PurePosixPath(*start, *(node.module or "").split("."))
            found = _module_at(target, library)
            submodules = [_module_at(target / alias.name, library) for alias in node.names]
            if found is not None and not all(submodules):
                yield found
            yield from (submodule for submodule in submodules if submodule is not None)


def _module_at(path: PurePosixPath, library: dict[PurePosixPath, Module]) -> Module | None:
    as_file = library.get(PurePosixPath(f"{path}.py"))
    return as_file or library.get(path / "__init__.py")


def matches(name: str, prefix: str) -> bool:
    """Return whether a dotted name is `prefix` or is inside the module `prefix`."""
    return name == prefix or name.startswith(f"{prefix}.")


def circles(modules: Sequence[Module]) -> list[list[str]]:
    """Return the import cycles among `modules`, each as a list of paths."""
    library = {module.path: module for module in modules}
    return cycles(
        {module.path: {other.path for other in neighbours(module, library)} for module in modules}
    )


def cycles(imports: Mapping[PurePosixPath, set[PurePosixPath]]) -> list[list[str]]:
    """Return groups of modules that import each other, directly or indirectly.

    Each group is a sorted list of paths.
    """
    reached = {path: _reached(path, imports) for path in imports}
    groups = {
        tuple(sorted(str(other) for other in reached[path] if path in reached[other]))
        for path in imports
        if path in reached[path]
    }
    return [list(group) for group in sorted(groups)]


def _reached(
    start: PurePosixPath, imports: Mapping[PurePosixPath, set[PurePosixPath]]
) -> set[PurePosixPath]:
    """Return the modules that `start` imports directly or indirectly.

    `start` is included only if it is part of an import cycle.
    """
    found: set[PurePosixPath] = set()
    new = set(imports[start])
    while new:
        found |= new
        new = {each for path in new for each in imports[path]} - found
    return found
