"""Thousands of injected faults over random operations: no wrong byte served, no hang, each one counted.

python tests/storage_backends/test_faults.py memory|file SEED [FAULTS]      one run, for any seed
"""

import asyncio
import logging
import sys
import tempfile
from pathlib import Path

import pytest

from lockstep.page_format.object_header import HeaderFinding
from lockstep.storage_backends import memory
from lockstep.storage_backends.base import StorageBackend
from lockstep.storage_backends.file.backend import FileBackend
from lockstep.storage_backends.memory import MemoryBackend
from tests.kit.storage.drill import Drill, check_counts

FAULTS = 10_000


def drill(store: StorageBackend, seed: int, *, whole: bool, faults: int = FAULTS) -> Drill:
    """Run a drill; what fails says how to run it again."""
    run = Drill(store, seed, whole)
    # Thousands of bad objects are found here, and `file://` warns of each.
    logger = logging.getLogger("lockstep.storage_backends")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        asyncio.run(run.run(faults))
    except BaseException as error:
        kind = "file" if isinstance(store, FileBackend) else "memory"
        error.add_note(
            f"in call {run.calls} of seed {seed}; to run it again:\n"
            f"    python tests/storage_backends/test_faults.py {kind} {seed} {faults}"
        )
        raise
    finally:
        logger.setLevel(level)
    return run


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> StorageBackend:
    return make_store(request.param, tmp_path)


def make_store(kind: str, root: Path) -> StorageBackend:
    return MemoryBackend() if kind == "memory" else FileBackend(root / "store")


@pytest.mark.parametrize("faults", [2_000, pytest.param(FAULTS, marks=pytest.mark.slow)])
def test_under_thousands_of_faults_no_wrong_byte_is_served_and_each_is_counted_under_its_name(
    store: StorageBackend, faults: int
) -> None:
    check_counts(drill(store, 1, whole=True, faults=faults))


@pytest.mark.parametrize("faults", [1_000, pytest.param(FAULTS, marks=pytest.mark.slow)])
def test_under_faults_readers_of_some_columns_are_served_no_wrong_byte(
    store: StorageBackend, faults: int
) -> None:
    check_counts(drill(store, 2, whole=False, faults=faults))


def test_a_wrong_byte_that_is_served_is_found_and_the_seed_to_run_again_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def believe(payload: memoryview, *_: object) -> HeaderFinding:
        return HeaderFinding.SOUND

    monkeypatch.setattr(memory, "extract_parts", believe)
    with pytest.raises(AssertionError, match="bytes that were not its own") as raised:
        drill(MemoryBackend(), 1, whole=True)
    assert (
        "python tests/storage_backends/test_faults.py memory 1 10000" in raised.value.__notes__[0]
    )


def main() -> None:
    kind, seed, *rest = sys.argv[1:]
    faults = int(rest[0]) if rest else FAULTS
    for whole in (True, False):
        with tempfile.TemporaryDirectory() as root:
            store = make_store(kind, Path(root))
            run = drill(store, int(seed), whole=whole, faults=faults)
        check_counts(run)
        sys.stdout.write(f"{run.calls} calls, {dict(run.fault.injected().by_kind())}\n")


if __name__ == "__main__":
    main()
