"""Rule R12: code that must compute the same on all ranks reaches no clock, thread or collective."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

from tests.kit.source_tree import Module, absolute_names, matches, neighbours, read_library

# Modules whose results can differ between ranks, and modules that can load such modules.
IMPURE = (
    "_thread",
    "asyncio",
    "concurrent",
    "datetime",
    "importlib",
    "multiprocessing",
    "numpy.random",
    "os",
    "random",
    "secrets",
    "select",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch.distributed",
    "torch.multiprocessing",
    "torch.random",
    "uuid",
)
PURE_FOLDERS = ("page_format", "coordinator", "ranks/protocol", "ranks/replica")
TRANSPORTS = "coordinator/collectives"
LAUNCHERS = "launch"
ENGINES_OWN = "integrations/sglang/identity/resolved.py"
"""Exempt from R12: this module reads SGLang's environment variables, because page keys depend on them.
"""
BENCHMARKS = "benchmarks"
"""Exempt from R1: benchmarks time a collective outside any cache, as the lower limit of a round."""


def test_what_all_ranks_agree_on_reaches_no_clock_thread_or_collective() -> None:
    assert impure_paths(read_library()) == []


def test_only_the_transports_and_launchers_can_reach_a_collective() -> None:
    offenders = [
        str(module.path)
        for module in read_library()
        if reaches(module, "torch.distributed")
        and not module.is_under(TRANSPORTS, LAUNCHERS, BENCHMARKS)
    ]

    assert offenders == []


def test_only_the_launchers_read_the_environment_and_what_keys_an_engine_s() -> None:
    environment = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv")

    offenders = [
        str(module.path)
        for module in read_library()
        if reaches(module, *environment) and not module.is_under(LAUNCHERS, ENGINES_OWN)
    ]

    assert offenders == []


def test_a_clock_behind_two_imports_is_found_with_the_way_to_it(tmp_path: Path) -> None:
    plant(tmp_path, "coordinator/ballot.py", "from ..ranks.orders import Order\n")
    plant(tmp_path, "ranks/orders.py", "from . import stamps\n")
    plant(tmp_path, "ranks/stamps.py", "import time\n")

    assert impure_paths(read_library(tmp_path)) == [
        "coordinator/ballot.py -> ranks/orders.py -> ranks/stamps.py reaches time"
    ]


def test_a_collective_reached_as_an_attribute_is_found(tmp_path: Path) -> None:
    plant(tmp_path, "ranks/replica/tree/tree.py", "import torch as t\n\nt.distributed.barrier()\n")

    assert impure_paths(read_library(tmp_path)) == [
        "ranks/replica/tree/tree.py reaches torch.distributed.barrier"
    ]


def test_a_transport_may_reach_a_collective_and_a_clock(tmp_path: Path) -> None:
    plant(tmp_path, "coordinator/collectives/gloo.py", "import time\nimport torch.distributed\n")

    assert impure_paths(read_library(tmp_path)) == []


def reaches(module: Module, *prefixes: str) -> bool:
    return any(matches(name, prefix) for name in absolute_names(module) for prefix in prefixes)


def impure_paths(modules: list[Module]) -> list[str]:
    """Return one import path, as text, for each pure module and each impure name that it reaches."""
    library = {module.path: module for module in modules}

    @cache
    def imported_by(module: Module) -> tuple[Module, ...]:
        return tuple(neighbours(module, library))

    lines: list[str] = []
    for start in modules:
        if start.is_under(*PURE_FOLDERS) and not start.is_under(TRANSPORTS):
            for way in ways_from(start, imported_by):
                steps = " -> ".join(str(module.path) for module in way)
                lines += [f"{steps} reaches {name}" for name in impure_names(way[-1])]
    return lines


def ways_from(
    start: Module, imported_by: Callable[[Module], tuple[Module, ...]]
) -> list[list[Module]]:
    """Return the shortest import path from `start` to each module that it reaches, `start` included."""
    ways = [[start]]
    seen = {start.path}
    for way in ways:
        for neighbour in imported_by(way[-1]):
            if neighbour.path not in seen:
                seen.add(neighbour.path)
                ways.append([*way, neighbour])
    return ways


def impure_names(module: Module) -> list[str]:
    """Return the impure names that a module imports, without names that are prefixes of others."""
    impure = {n for n in absolute_names(module) if any(matches(n, prefix) for prefix in IMPURE)}
    return sorted(n for n in impure if not any(matches(other, n) for other in impure - {n}))


def plant(root: Path, path: str, source: str) -> None:
    """Write one module, and make every folder above it a package."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source, encoding="utf-8")
    for folder in file.relative_to(root).parents:
        (root / folder / "__init__.py").touch()


def test_nothing_is_pickled() -> None:
    """Rule R11: processes exchange msgpack or fixed headers, never code in data."""
    picklers = ("pickle", "cloudpickle", "dill", "marshal", "shelve", "torch.save", "torch.load")

    assert [str(module.path) for module in read_library() if reaches(module, *picklers)] == []
