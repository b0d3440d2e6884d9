"""`lockstep store` in trouble: what it refuses, tells and gives up.

Stores that would keep nothing or stop answering, names that would write on a terminal, and output that
cannot be written.
"""

import json
import os
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from lockstep.launch.store import batches as store_batches
from lockstep.launch.store.tables import full_name
from lockstep.storage_backends.base import Read, ReadOutcome, Write, WriteOutcome
from lockstep.storage_backends.file.backend import FileBackend
from tests.kit.launch.in_process import IN_A_PROCESS, Run
from tests.kit.launch.stores import OBJECT_BYTES, Kept, page_name


@pytest.mark.parametrize("wrapped", ["", "metrics+"])
def test_a_copy_into_the_memory_of_the_command_itself_is_refused(
    lockstep: Run, kept: Kept, wrapped: str
) -> None:
    kept.fill()
    target = f"{wrapped}mooncake://127.0.0.1:1?segment_bytes=1048576"

    status, printed, said = lockstep("copy", kept.uri, target)

    assert (status, printed, said.count("\n")) == (2, "", 1)
    assert "would have its objects in the memory of this command" in said
    assert "leave out segment_bytes" in said


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "gc", "rm", "copy"])
def test_a_store_of_mooncake_is_refused_because_its_client_cannot_list(
    lockstep: Run, kept: Kept, command: str
) -> None:
    options = {"gc": ["--to-bytes", "0B"], "rm": ["--all", "--yes"]}.get(command, [])
    more = [kept.uri] if command == "copy" else []

    status, printed, said = lockstep(command, *options, "mooncake://127.0.0.1:1", *more)

    assert (status, printed, said.count("\n")) == (2, "", 1)
    assert "can ask for an object by its name only, and cannot list" in said


def misplace(kept: Kept) -> list[Path]:
    """Put two sound objects where no name leads; return their paths."""
    kept.pass_off(page_name(0), page_name(77))
    path = kept.path(page_name(1))
    copy = path.with_name(f"{path.name}.bak")
    copy.write_bytes(path.read_bytes())
    return [kept.path(page_name(77)), copy]


def test_an_object_in_the_wrong_place_counts_as_a_file_and_not_as_an_object(
    lockstep: Run, kept: Kept
) -> None:
    kept.fill()
    misplaced = misplace(kept)
    files = {"files": 2, "bytes": 2 * OBJECT_BYTES}

    listed, total = (json.loads(lockstep(each, "--json", kept.uri)[1]) for each in ("ls", "stat"))
    assert (listed["objects"], listed["unsound_files"]) == (8, files)
    assert (total["objects"], total["unsound_files"]) == (8, files)
    status, record, _ = lockstep("verify", "--json", "--fix", kept.uri)
    found = json.loads(record)
    assert (status, found["objects"], found["sound"]) == (1, 8, 8)
    assert sorted(each["path"] for each in found["unsound_files"]["first"]) == sorted(
        map(str, misplaced)
    )
    assert {each["reason"] for each in found["unsound_files"]["first"]} == {"name"}

    status, record, _ = lockstep("verify", "--json", kept.uri)
    assert (status, json.loads(record)["sound"]) == (0, 8)


@pytest.mark.parametrize(("options", "put_away"), [([], False), (["--fix"], True)])
def test_each_damage_is_told_with_its_reason_and_whether_it_was_put_away(
    lockstep: Run, kept: Kept, options: list[str], put_away: bool
) -> None:
    kept.fill(pages=range(4))
    kept.spoil(page_name(0))
    paths = [kept.path(page_name(number)) for number in range(4)]
    os.truncate(paths[1], OBJECT_BYTES - 1)
    os.truncate(paths[2], OBJECT_BYTES + 1)
    pipe = paths[3].with_name("pipe")
    os.mkfifo(pipe)

    found = json.loads(lockstep("verify", "--json", *options, kept.uri)[1])

    corrupt = sorted(found["corrupt"]["first"], key=lambda each: str(each["name"]))
    assert corrupt == [
        {
            "name": full_name(page_name(number)),
            "path": str(paths[number]),
            "reason": reason,
            "put_away": put_away,
        }
        for number, reason in ((0, "payload"), (1, "short"), (2, "long"))
    ]
    assert found["unsound_files"]["first"] == [
        {"path": str(pipe), "reason": "pipe", "bytes": 0, "put_away": put_away}
    ]
    assert len(kept.quarantined()) == 4 * put_away


@pytest.mark.parametrize("options", [[], ["--fix"]])
def test_a_file_s_name_writes_nothing_on_a_terminal_and_is_told_once(
    lockstep: Run, kept: Kept, caplog: pytest.LogCaptureFixture, options: list[str]
) -> None:
    kept.fill()
    nasty = os.fsencode(kept.root / "objects") + b"/red\x1b[31m\nline\xff"
    Path(os.fsdecode(nasty)).write_bytes(b"x")

    _, record, _ = lockstep("verify", "--json", kept.uri)
    status, printed, said = lockstep("verify", *options, kept.uri)

    assert (status, said) == (1, "")
    assert printed.count(r"/red\x1b[31m\nline\udcff: a file where a directory should be") == 1
    assert "\x1b" not in printed
    (found,) = json.loads(record)["unsound_files"]["first"]
    assert found["path"].encode().endswith(b"/objects/red\x1b[31m\nline\\udcff")
    assert not caplog.records


def in_a_process(*arguments: str, stdout: IO[str]) -> tuple[int, str]:
    """Run `lockstep store` in a process of its own; return its status and what it said of errors."""
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


def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a copy's batches have four pages each."""
    defaults: dict[str, Any] | None = store_batches.for_each_batch.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "nbytes_max", 4 * OBJECT_BYTES)


@dataclass
class FillsUp:
    """A directory that takes some batches of objects and then no other one."""

    batches: int
    asked: int = 0
    """How many batches somebody has tried to write."""

    def as_method(self) -> Callable[..., Awaitable[list[WriteOutcome]]]:
        """Return what stands for `FileBackend.write`."""
        write = FileBackend.write

        async def write_until_full(
            backend: FileBackend, writes: Sequence[Write], *, deadline: float
        ) -> list[WriteOutcome]:
            self.asked += 1
            if self.asked <= self.batches:
                return await write(backend, writes, deadline=deadline)
            return [WriteOutcome.FAILED] + [WriteOutcome.TIMED_OUT] * (len(writes) - 1)

        return write_until_full


READ = FileBackend.read


async def read_no_page(
    backend: FileBackend, reads: Sequence[Read], *, deadline: float
) -> list[ReadOutcome]:
    """Stand for `FileBackend.read` where manifests can be read, and every page takes too long."""
    if any(each.name.pool == "kv" for each in reads):
        return [ReadOutcome.TIMED_OUT] * len(reads)
    return await READ(backend, reads, deadline=deadline)


def test_a_copy_to_a_store_that_stops_taking_objects_is_given_up(
    lockstep: Run, kept: Kept, other: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.fill(pages=range(40))
    small_batches(monkeypatch)
    fills = FillsUp(batches=5)

    with monkeypatch.context() as patched:
        patched.setattr(FileBackend, "write", fills.as_method())
        status, printed, said = lockstep("copy", "--jobs", "1", kept.uri, other.uri)

    there = len(other.objects())
    assert (status, said.count("\n")) == (3, 1)
    assert "none of the objects of 3 batches in a row could be written (3 failed, " in said
    assert f"given up with {82 - there} objects left" in said
    assert f"copied {there} objects" in printed
    assert "so far; the same command goes on from here" in printed
    assert fills.asked == 5 + 3
    assert "objects not written to TO (3 failed, " in printed
    assert lockstep("copy", kept.uri, other.uri)[0] == 0
    assert other.contents() == kept.contents()


def test_a_copy_from_a_store_that_stops_answering_is_given_up(
    lockstep: Run, kept: Kept, other: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.fill(pages=range(40))
    small_batches(monkeypatch)
    monkeypatch.setattr(FileBackend, "read", read_no_page)

    status, printed, said = lockstep("copy", "--jobs", "1", kept.uri, other.uri)

    assert (status, said.count("\n")) == (3, 1)
    assert "batches in a row could be read (" in said
    assert "timed out)" in said
    assert "objects not read from FROM (" in printed
