"""Weights are identified by the content of their files, and each file is read only once."""

import json
import os
import time
from pathlib import Path

import pytest

from lockstep.integrations.weights import FileDigests, commit_of, is_commit, weights_digest

LATER_NS = 3_600_000_000_000
"""Lead of the tests' clock: one hour in ns, after which files just written count as stable."""


def later() -> int:
    return time.time_ns() + LATER_NS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for number in range(2):
        (folder / f"model-{number}.safetensors").write_bytes(bytes([number]) * 1000)
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "config.json").write_text('{"layers": 2}')
    return folder


@pytest.fixture
def digests(tmp_path: Path) -> FileDigests:
    return FileDigests(tmp_path / "record" / "digests.json", clock_ns=later)


def again(digests: FileDigests) -> FileDigests:
    """Open the same record file again, as a process started later would."""
    return FileDigests(digests.record, clock_ns=later)


def test_weights_that_were_trained_again_in_place_are_others(
    folder: Path, digests: FileDigests
) -> None:
    """Weights retrained in place get another digest, even with equal file sizes and an old mtime."""
    path = folder / "model-1.safetensors"
    before, times = weights_digest(folder, digests), path.stat()

    path.write_bytes(b"\x07" * 1000)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert weights_digest(folder, again(digests)) != before


def test_weights_that_were_only_touched_or_copied_elsewhere_are_the_same(
    folder: Path, digests: FileDigests, tmp_path: Path
) -> None:
    before = weights_digest(folder, digests)

    (folder / "model-1.safetensors").touch()
    moved = folder.rename(tmp_path / "elsewhere")

    assert weights_digest(moved, again(digests)) == before


@pytest.mark.parametrize("name", ["config.json", "modeling.py", "adapter.bin"])
def test_whatever_an_engine_reads_beside_the_weights_counts(
    folder: Path, digests: FileDigests, name: str
) -> None:
    before = weights_digest(folder, digests)

    (folder / name).write_text("other")

    assert weights_digest(folder, digests) != before


@pytest.mark.parametrize("name", ["tokenizer.json", "optimizer.pt", "README.md"])
def test_what_changes_no_kv_does_not_count(folder: Path, digests: FileDigests, name: str) -> None:
    before = weights_digest(folder, digests)

    (folder / name).write_text("other")

    assert weights_digest(folder, digests) == before


def test_weights_in_files_of_other_names_are_others(folder: Path, digests: FileDigests) -> None:
    before = weights_digest(folder, digests)

    (folder / "model-1.safetensors").rename(folder / "model-2.safetensors")

    assert weights_digest(folder, digests) != before


def test_what_was_read_once_is_not_read_by_later_starts(folder: Path, digests: FileDigests) -> None:
    before = weights_digest(folder, digests)
    restarted = again(digests)

    assert weights_digest(folder, restarted) == before
    assert digests.bytes_read == sum(each.stat().st_size for each in folder.iterdir())
    assert restarted.bytes_read == 0


def test_a_process_goes_by_what_it_has_read_without_the_record(
    folder: Path, digests: FileDigests
) -> None:
    """A process remembers the digests that it has computed, even if the record file is deleted."""
    before, read = weights_digest(folder, digests), digests.bytes_read

    digests.record.unlink()

    assert weights_digest(folder, digests) == before
    assert digests.bytes_read == read


def test_files_that_are_gone_leave_the_record_when_it_is_written(
    folder: Path, digests: FileDigests
) -> None:
    weights_digest(folder, digests)
    gone, stays = (folder / f"model-{at}.safetensors" for at in range(2))
    gone.unlink()
    (folder / "config.json").write_text('{"layers": 3}')

    weights_digest(folder, digests)

    remembered = json.loads(digests.record.read_text())
    assert str(stays) in remembered
    assert str(gone) not in remembered


def test_only_what_has_changed_is_read_again(folder: Path, digests: FileDigests) -> None:
    weights_digest(folder, digests)
    (folder / "model-1.safetensors").write_bytes(b"\x07" * 300)
    restarted = again(digests)

    weights_digest(folder, restarted)

    assert restarted.bytes_read == 300


def test_a_file_that_was_written_a_moment_ago_is_not_remembered(
    folder: Path, tmp_path: Path
) -> None:
    """A file just written is hashed again later, because it may still change within one mtime tick."""
    digests = FileDigests(tmp_path / "digests.json")
    weights_digest(folder, digests)
    read = digests.bytes_read

    weights_digest(folder, digests)

    assert digests.bytes_read == 2 * read


@pytest.mark.parametrize("damaged", [b"", b"\xff", b"[]", b'{"a": 1}', b'{"a": []}'])
def test_a_damaged_record_is_none(folder: Path, digests: FileDigests, damaged: bytes) -> None:
    before = weights_digest(folder, digests)
    digests.record.write_bytes(damaged)

    assert weights_digest(folder, again(digests)) == before
    assert len(json.loads(digests.record.read_text())) >= 4


def test_without_a_place_for_the_record_everything_is_read_and_one_is_told(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    digests = FileDigests(tmp_path / "file" / "digests.json", clock_ns=later)

    weights_digest(folder, digests)

    assert "every start reads all weights" in caplog.text


def test_a_folder_without_weights_is_named(tmp_path: Path, digests: FileDigests) -> None:
    (tmp_path / "config.json").touch()

    with pytest.raises(FileNotFoundError, match=f"{tmp_path} has no weight files, which end"):
        weights_digest(tmp_path, digests)


def test_a_snapshot_of_the_hub_is_known_by_its_commit() -> None:
    commit = "0123456789abcdef" * 2 + "01234567"

    assert commit_of(Path("/hub/models--org--m/snapshots") / commit) == commit
    assert commit_of(Path("/models") / commit) is None
    assert commit_of(Path("/hub/models--org--m/snapshots/main")) is None
    assert is_commit(commit)
    assert not is_commit(None)
