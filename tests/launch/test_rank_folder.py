"""The temporary folder of torch's launcher for the ranks' output is always removed."""

import fcntl
import tempfile
from pathlib import Path
from typing import IO

import pytest

from lockstep.launch.cli.rank_processes import rank_folder


def test_what_a_killed_launcher_has_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, other = tmp_path / "lockstep-ranks-left", tmp_path / "another"
    for each in (left, other):
        (each / "attempt_0").mkdir(parents=True)
        (each / "lock").touch()
    with rank_folder() as used, rank_folder() as new:
        there = set(tmp_path.iterdir())

    assert there == {other, Path(used), Path(new)}
    assert list(tmp_path.iterdir()) == [other]


def test_a_launcher_that_starts_beside_another_leaves_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    flock = fcntl.flock

    def lock_after_another(lock: IO[str], how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        with rank_folder():
            flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", lock_after_another)
    with rank_folder() as mine:
        assert Path(mine).is_dir()
