"""Output files of the command: complete or absent, through links and pipes, on full devices."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from lockstep.errors import ConfigError, LockstepError
from lockstep.launch.cli.exits import EXIT_GROUP, exit_code
from lockstep.launch.cli.replay_settings import ReplaySettings
from lockstep.launch.cli.report_files import check_that_writable, write_text
from lockstep.launch.replay.outcome import Replayed, conclude
from lockstep.launch.replay.report import make_report
from tests.kit.launch.rank_results import result


def test_what_is_no_plain_file_is_written_to_and_stays_what_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with closing(os.fdopen(os.open(pipe, os.O_RDWR), "rb", buffering=0)) as reading:
        check_that_writable(str(pipe))
        write_text(str(pipe), "told")
        received = reading.read(4)

    assert received == b"told"
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")

    write_text(str(tmp_path / "link"), "told")

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "told"


def test_a_device_that_takes_nothing_is_told_of_in_one_line() -> None:
    with pytest.raises(ConfigError, match="cannot write the timeline /dev/full: No space left"):
        write_text("/dev/full", "told", "timeline")

    assert Path("/dev/full").is_char_device()


def test_a_table_that_cannot_be_printed_is_no_fault_of_the_replay_and_its_report_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ReplaySettings(ranks=1, report=str(tmp_path / "report.json"))
    replayed = Replayed(make_report(settings, [result()]), [])
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(LockstepError, match="output could not be written: No space") as ended:
            conclude(replayed, settings)

    assert exit_code(ended.value) == EXIT_GROUP
    assert (tmp_path / "report.json").exists()
