"""`lockstep store` when its output cannot be written."""

import os
import subprocess
from pathlib import Path
from typing import IO

import pytest

from tests.kit.launch.in_process import IN_A_PROCESS
from tests.kit.launch.stores import Kept


def in_a_process(*arguments: str, stdout: IO[str]) -> tuple[int, str]:
    ended = subprocess.run(
        [*IN_A_PROCESS, "store", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("arguments", [["ls"], ["ls", "--objects"], ["stat", "--json"], ["verify"]])
def test_output_that_cannot_be_written_is_said_in_one_line(
    kept: Kept, arguments: list[str]
) -> None:
    kept.fill()

    with Path("/dev/full").open("w") as full:
        ended = in_a_process(*arguments, kept.uri, stdout=full)

    assert ended == (3, "lockstep: the output could not be written: No space left on device\n")


@pytest.mark.parametrize("arguments", [["ls"], ["ls", "--objects"], ["stat", "--json"]])
def test_output_that_nobody_reads_ends_in_silence(kept: Kept, arguments: list[str]) -> None:
    kept.fill()
    reader, writer = os.pipe()
    os.close(reader)

    with os.fdopen(writer) as nobody_reads:
        ended = in_a_process(*arguments, kept.uri, stdout=nobody_reads)

    assert ended == (1, "")
