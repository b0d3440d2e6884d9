"""`lockstep store` and what is damaged: told by name and path, put away with `--fix` and not without.

And to look changes nothing, so that it works where nobody may write.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.launch.store.tables import full_name
from tests.kit.launch.in_process import Run
from tests.kit.launch.stores import (
    OBJECT_BYTES,
    Kept,
    manifest_of,
    namespace_of,
    page_name,
)
from tests.kit.storage.files import flip


def words(text: str) -> str:
    """The text without the differences that only columns make."""
    return re.sub(r"[ \t]+", " ", text)


def truncate(path: Path, nbytes: int | None = None) -> None:
    """Take the last byte of a file, or all but the first so many."""
    os.truncate(path, path.stat().st_size - 1 if nbytes is None else nbytes)


def tree(root: Path) -> dict[Path, tuple[float, bytes]]:
    """Everything below a directory, with its time and content."""
    return {
        path: (
            path.lstat().st_mtime,
            path.read_bytes() if path.is_file() and not path.is_symlink() else b"",
        )
        for path in root.rglob("*")
    }


def test_without_fix_what_is_corrupt_is_told_by_name_and_path_and_stays(
    lockstep: Run, kept: Kept
) -> None:
    kept.fill(pages=range(20))
    kept.spoil(page_name(3))
    truncate(kept.path(page_name(7)))
    before = kept.contents()

    status, printed, _ = lockstep("verify", kept.uri)
    again = lockstep("verify", kept.uri)[1]

    assert status == 1
    assert "42 objects read, 40 of them sound" in printed
    assert "2 objects corrupt: each is a miss; --fix puts such in quarantine" in printed
    lines = [
        f"  {full_name(name)}: {kept.path(name)}: {why}"
        for name, why in ((page_name(3), "its payload is bad"), (page_name(7), "too short"))
    ]
    assert set(lines) <= set(printed.splitlines())
    assert sorted(again.splitlines()) == sorted(printed.splitlines())
    assert kept.contents() == before


def strew(kept: Kept) -> dict[Path, str]:
    """Put what is no object among the objects; return its paths, and what is wrong with each."""
    kept.pass_off(page_name(0), page_name(77))
    kept.path(page_name(1)).write_bytes(b"no object" * 1000)
    truncate(kept.path(page_name(2)), 100)
    bad_header = kept.path(page_name(0, 1))
    flip(bad_header, 8 * 500)
    link, folder = (kept.path(page_name(number)) for number in (78, 79))
    for each in (link, folder):
        each.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to("/etc/passwd")
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "x").write_bytes(b"x")
    note = kept.root / "objects" / "README"
    note.write_bytes(b"mine")
    return {
        kept.path(page_name(77)): "name",
        kept.path(page_name(1)): "foreign",
        kept.path(page_name(2)): "short",
        bad_header: "header",
        link: "link",
        folder: "directory",
        note: "file",
    }


def test_everything_among_the_objects_that_is_none_is_named_by_its_path(
    lockstep: Run, kept: Kept
) -> None:
    kept.fill()
    strewn = strew(kept)
    before = tree(kept.root)

    status, record, _ = lockstep("verify", "--json", kept.uri)
    printed = lockstep("verify", kept.uri)[1]

    found = json.loads(record)["unsound_files"]
    assert (status, json.loads(record)["corrupt"]["objects"]) == (1, 0)
    assert (found["files"], found["put_away"]) == (7, 0)
    assert {Path(each["path"]): each["reason"] for each in found["first"]} == strewn
    assert found["bytes"] == 2 * OBJECT_BYTES + 9000 + 100 + 4
    assert "7 files, 17.9 KiB, among the objects that no name leads to: never served" in printed
    assert all(f"  {path}: " in printed for path in strewn)
    assert tree(kept.root) == before


def test_fix_puts_everything_that_is_no_object_in_quarantine_and_nothing_else(
    lockstep: Run, kept: Kept
) -> None:
    kept.fill()
    strewn = strew(kept)
    sound = {path: path.read_bytes() for path in kept.objects() if path.is_file()}
    sound = {
        path: content
        for path, content in sound.items()
        if not any(path == each or each in path.parents for each in strewn)
    }

    status, printed, _ = lockstep("verify", "--fix", kept.uri)

    assert status == 1
    assert ", 7 of them in quarantine now" in printed
    assert {path: path.read_bytes() for path in kept.objects()} == sound
    assert len(kept.quarantined()) == 7
    assert lockstep("verify", "--fix", kept.uri)[0] == 0
    assert Path("/etc/passwd").exists()


def test_one_namespace_is_searched_for_what_is_no_object_and_a_sample_is_not(
    lockstep: Run, kept: Kept
) -> None:
    kept.fill().fill(model="gemma")
    (kept.path(page_name(0, model="gemma")).parent / "mine").write_bytes(b"mine")

    def files(*arguments: str) -> int:
        found = json.loads(lockstep("verify", "--json", *arguments, kept.uri)[1])
        return int(found["unsound_files"]["files"])

    assert files("--namespace", namespace_of("gemma")[:8]) == 1
    assert files("--namespace", namespace_of()) == 0
    assert files("--sample", "3") == 0


def test_ls_and_stat_count_the_room_of_what_is_no_object(lockstep: Run, kept: Kept) -> None:
    kept.fill()
    strew(kept)
    extent = {"files": 7, "bytes": 2 * OBJECT_BYTES + 9000 + 100 + 4}

    assert json.loads(lockstep("ls", "--json", kept.uri)[1])["unsound_files"] == extent
    assert json.loads(lockstep("stat", "--json", kept.uri)[1])["unsound_files"] == extent
    assert (
        "7 files, 17.9 KiB, that no name leads to; `lockstep store verify`"
        in (lockstep("ls", kept.uri)[1])
    )
    assert "not objects 7 files, 17.9 KiB" in words(lockstep("stat", kept.uri)[1])


@pytest.fixture
def unwritable(kept: Kept) -> Iterator[Callable[[], None]]:
    """Makes the store one that nobody can write to, the superuser neither."""
    mounted: list[Path] = []

    def make() -> None:
        if os.geteuid():
            for directory in [kept.root, *(each for each in kept.root.rglob("*") if each.is_dir())]:
                directory.chmod(0o500)
            return
        root = str(kept.root)
        for options in (["--bind", root, root], ["-o", "remount,ro,bind", root]):
            done = subprocess.run(["mount", *options], capture_output=True, check=False)
            if done.returncode:
                pytest.skip("a mount for reading cannot be made here")
            mounted.append(kept.root)

    yield make
    if mounted:
        subprocess.run(["umount", kept.root], check=True)
    for directory in [kept.root, *(each for each in kept.root.rglob("*") if each.is_dir())]:
        directory.chmod(0o700)


def test_a_store_that_cannot_be_written_to_can_be_told_verified_and_copied(
    lockstep: Run, kept: Kept, other: Kept, unwritable: Callable[[], None]
) -> None:
    kept.fill()
    kept.spoil(page_name(1))
    unwritable()
    with pytest.raises(OSError, match=r"Read-only|Permission"):
        (kept.root / "objects" / "x").touch()

    assert "1 model, 8 objects" in lockstep("ls", kept.uri)[1]
    assert "objects 8" in words(lockstep("stat", f"{kept.uri}?quota_gib=1&direct=1")[1])
    status, printed, _ = lockstep("verify", kept.uri)
    assert (status, "8 objects read, 7 of them sound" in printed) == (1, True)
    assert lockstep("gc", "--to-bytes", "0B", "--dry-run", kept.uri)[0] == 0
    assert "copied 7 objects" in lockstep("copy", kept.uri, other.uri)[1]


@pytest.mark.parametrize(
    "arguments", [["verify", "--fix"], ["gc", "--to-bytes", "0B"], ["rm", "--all", "--yes"]]
)
def test_a_store_that_cannot_be_written_to_is_refused_to_what_would_change_it(
    lockstep: Run, kept: Kept, unwritable: Callable[[], None], arguments: list[str]
) -> None:
    kept.fill()
    unwritable()

    status, _, said = lockstep(*arguments, kept.uri)

    assert (status, said.count("\n")) == (2, 1)
    assert re.search("cannot be used: Read-only file system|Permission denied", said)


@pytest.mark.parametrize("command", [["ls"], ["ls", "--objects"], ["stat"], ["verify"]])
def test_looking_changes_nothing_in_the_directory(
    lockstep: Run, kept: Kept, command: list[str]
) -> None:
    kept.fill()
    kept.spoil(manifest_of())
    kept.spoil(page_name(0))
    strew(kept)
    (kept.root / "temporary").rmdir()
    before = tree(kept.root)

    assert lockstep(*command, f"{kept.uri}?read_only=0&ttl_s=1&durability=full")[0] in (0, 1)

    assert tree(kept.root) == before
