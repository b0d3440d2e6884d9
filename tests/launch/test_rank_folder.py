"""The folder in which torch's launcher keeps what ranks write: none is left for ever."""

import tempfile
from pathlib import Path

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
