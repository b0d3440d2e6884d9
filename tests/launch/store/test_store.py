"""`lockstep store ls`, `stat` and `verify`: contents, damaged objects, and refusals."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.launch.store.tables import full_name
from lockstep.page_format.object_header import encode_header
from lockstep.page_format.object_shape import ObjectShape, Part
from lockstep.storage_backends.base import Capabilities
from lockstep.storage_backends.file.backend import FileBackend
from tests.kit.launch.in_process import Run, refusal
from tests.kit.launch.stores import (
    MANIFEST_BYTES,
    MARK_BYTES,
    OBJECT_BYTES,
    Kept,
    another_process_writes,
    manifest_of,
    namespace_of,
    page_name,
)
from tests.kit.storage.calls import digest_of


def of_ranks(tmp_path: Path) -> str:
    for rank in (0, 1):
        Kept(tmp_path / f"disk{rank}").fill(model=f"of-rank-{rank}")
    return f"file://{tmp_path}/disk{{rank}}"


def words(text: str) -> str:
    return re.sub(r"[ \t]+", " ", text)


COMMANDS = (
    ["ls"],
    ["ls", "--objects"],
    ["stat"],
    ["verify"],
    ["gc", "--older-than", "7d"],
    ["rm", "--all", "--yes"],
)


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_store_of_each_rank_is_refused_unless_it_is_said_whose(
    lockstep: Run, tmp_path: Path, arguments: list[str]
) -> None:
    error_line = refusal(lockstep, *arguments, of_ranks(tmp_path))

    assert "has {rank}, so each rank has its own; add --rank N" in error_line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk0", "disk1"]


def test_a_rank_is_refused_where_all_ranks_share_the_store(lockstep: Run, tmp_path: Path) -> None:
    """`--rank` is refused for a store that all ranks share: a command per rank would repeat work."""
    error_line = refusal(lockstep, "ls", tmp_path.as_uri(), "--rank", "1")

    assert "has no {rank}; leave out --rank" in error_line


def test_the_store_of_one_rank_is_found_by_its_rank(lockstep: Run, tmp_path: Path) -> None:
    status, out, _ = lockstep("ls", of_ranks(tmp_path), "--rank", "1")

    assert status == 0
    assert "of-rank-1" in out
    assert "of-rank-0" not in out


@pytest.mark.parametrize("arguments", COMMANDS)
def test_no_store_is_created_by_looking_for_one(
    lockstep: Run, tmp_path: Path, arguments: list[str]
) -> None:
    nowhere, empty = tmp_path / "nowhere", tmp_path / "empty"
    empty.mkdir()

    of_nowhere = refusal(lockstep, *arguments, nowhere.as_uri())
    of_empty = refusal(lockstep, *arguments, empty.as_uri())

    assert f"there is no store at {nowhere}: the directory does not exist" in of_nowhere
    assert "it has no folder 'objects'" in of_empty
    assert [each.name for each in tmp_path.iterdir()] == ["empty"]
    assert not list(empty.iterdir())


@pytest.mark.parametrize("arguments", COMMANDS)
@pytest.mark.parametrize(
    ("uri", "complaint"),
    [
        ("memory://", "is private to the process that uses it"),
        ("ftp://host/kv", "unknown scheme 'ftp'"),
        ("file:///var/kv?colour=red", "there is no option 'colour'"),
        ("mooncake://127.0.0.1:1", "can look up an object by name but cannot list"),
    ],
)
def test_a_store_that_makes_no_sense_is_refused_in_one_line(
    lockstep: Run, arguments: list[str], uri: str, complaint: str
) -> None:
    assert complaint in refusal(lockstep, *arguments, uri)


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_store_that_cannot_say_what_is_in_it_is_refused_by_name(
    lockstep: Run, kept: Kept, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    kept.fill()
    before = kept.contents()
    monkeypatch.setattr(FileBackend, "capabilities", Capabilities(lists=False))

    error_line = refusal(lockstep, *arguments, kept.uri)

    assert f"store '{kept.uri}' cannot list its objects" in error_line
    assert "use for example file://" in error_line
    assert kept.contents() == before


def test_stat_tells_how_much_of_a_quota_is_in_use(lockstep: Run, kept: Kept) -> None:
    kept.fill(pages=range(20))
    limited = f"{kept.uri}?quota_bytes=65536"

    printed, record = (
        lockstep("stat", limited)[1],
        json.loads(lockstep("stat", "--json", limited)[1]),
    )

    assert " % of 64.0 KiB in use" in printed
    assert record["quota_bytes"] == 65536
    assert record["filled"] > 1
    unlimited = json.loads(lockstep("stat", "--json", f"{kept.uri}?quota_gib=0")[1])
    assert (unlimited["quota_bytes"], unlimited["filled"]) == (None, None)


def test_ls_groups_what_there_is_by_model_namespace_pool_and_shard(
    lockstep: Run, kept: Kept
) -> None:
    kept.fill(pages=range(3)).fill(pages=range(2), tp_size=4).fill(weights_version="2")
    kept.age(page_name(1), 3 * 86_400)

    status, printed, stderr = lockstep("ls", kept.uri)

    assert (status, stderr) == (0, "")
    lines = [words(line).strip() for line in printed.splitlines()]
    assert lines[0].startswith(f"{kept.uri}: 2 models, 25 objects, ")
    assert lines[2:5] == [
        "llama, weights version 1",
        "kv: pages of 4 tokens, k, v, draft",
        f"namespace {namespace_of()[:16]}…, written by groups of TP 2, TP 4",
    ]
    assert lines[5] == "pool shard TP objects size newest oldest"
    assert re.fullmatch(r"kv l0-2\.h0-2 2 3 13\.5 KiB \d+ s 3 d", lines[6])
    assert re.fullmatch(r"kv l0-2\.h2-4 2 3 13\.5 KiB \d+ s \d+ s", lines[7])
    assert [line.split()[1] for line in lines[8:12]] == [
        "l0-2.h0-1",
        "l0-2.h1-2",
        "l0-2.h2-3",
        "l0-2.h3-4",
    ]
    assert "llama, weights version 2" in lines


def test_ls_says_the_same_to_machines(lockstep: Run, kept: Kept) -> None:
    kept.fill(pages=range(3))

    status, printed, _ = lockstep("ls", "--json", kept.uri)

    found = json.loads(printed)
    assert status == 0
    (model,) = found.pop("models")
    total = 6 * OBJECT_BYTES + MARK_BYTES + MANIFEST_BYTES
    assert found == {
        "store": kept.uri,
        "objects": 8,
        "bytes": total,
        "unreadable_manifests": [],
    }
    assert model["layouts"]["kv"]["page_tokens"] == 4
    assert model["layouts"]["kv"]["columns"][2] == {
        "name": "draft",
        "layers": 1,
        "heads": 4,
        "elements": 8,
        "dtype": "bfloat16",
        "replicated": False,
        "optional": True,
    }
    (namespace,) = model["namespaces"]
    assert (model["model"], model["weights_version"]) == ("llama", "1")
    assert (model["objects"], model["bytes"]) == (7, total - MANIFEST_BYTES)
    assert (namespace["namespace"], namespace["writers"]) == (namespace_of(), ["stage0of1.tp2"])
    assert [
        (each["pool"], each["shard"], each["tp_size"], each["objects"], each["bytes"])
        for each in namespace["shards"]
    ] == [
        ("kv", "l0-2.h0-2", 2, 3, 3 * OBJECT_BYTES),
        ("kv", "l0-2.h2-4", 2, 3, 3 * OBJECT_BYTES),
    ]
    assert 0 <= namespace["newest_s"] <= namespace["oldest_s"]


def test_ls_names_single_objects(lockstep: Run, kept: Kept) -> None:
    kept.fill(pages=range(1))
    name = page_name(0)

    _, printed, _ = lockstep("ls", "--objects", kept.uri)
    _, records, _ = lockstep("ls", "--objects", "--json", kept.uri)

    assert f"{name.namespace}/{name.key}/kv/l0-2.h0-2" in printed
    found = [json.loads(line) for line in records.splitlines()]
    assert len(found) == len(printed.splitlines()) == 4
    (page,) = [each for each in found if each["shard"] == name.shard]
    assert page.pop("age_s") >= 0
    assert page == {
        "namespace": name.namespace,
        "key": name.key,
        "pool": "kv",
        "shard": name.shard,
        "bytes": OBJECT_BYTES,
    }


def test_pages_without_a_manifest_are_told_by_their_namespace(lockstep: Run, kept: Kept) -> None:
    kept.fill()
    kept.path(manifest_of()).unlink()

    _, printed, _ = lockstep("ls", kept.uri)
    _, record, _ = lockstep("ls", "--json", kept.uri)

    assert "unknown model" in printed
    assert namespace_of()[:16] in printed
    (model,) = json.loads(record)["models"]
    assert (model["model"], model["layouts"]) == (None, None)


def test_a_bad_manifest_is_not_believed_and_found(lockstep: Run, kept: Kept) -> None:
    kept.fill()
    kept.spoil(manifest_of())

    status, printed, _ = lockstep("ls", kept.uri)
    verified, found, _ = lockstep("verify", "--json", kept.uri)

    assert (status, verified) == (0, 1)
    assert "1 manifest could not be read" in printed
    assert json.loads(found)["corrupt"]["objects"] == 1


def test_stat_tells_totals_and_what_the_store_can_do(lockstep: Run, kept: Kept) -> None:
    kept.fill(pages=range(3))
    kept.spoil(page_name(0))
    assert lockstep("verify", "--fix", kept.uri)[0] == 1

    status, printed, _ = lockstep("stat", f"{kept.uri}?threads=2")
    _, record, _ = lockstep("stat", "--json", f"{kept.uri}?threads=2")

    assert status == 0
    lines = [words(line) for line in printed.splitlines()]
    assert "backend file" in lines
    assert "options threads=2; the rest at defaults" in lines
    assert "capabilities lists, shared, writes, zero copy" in lines
    assert "objects 7" in lines
    assert "quarantine 1 file, 4.5 KiB" in lines
    found = json.loads(record)
    assert found["objects"] == 7
    assert found["bytes"] == 5 * OBJECT_BYTES + MARK_BYTES + MANIFEST_BYTES
    assert (found["models"], found["namespaces"]) == (1, 1)
    assert found["largest_bytes"] == MANIFEST_BYTES
    assert found["quarantine"] == {"files": 1, "bytes": OBJECT_BYTES}
    assert found["capabilities"] == {
        "lists": True,
        "shared": True,
        "writes": True,
        "zero_copy": True,
    }
    assert 0 < found["filled"] == found["bytes"] / found["quota_bytes"] < 1


def test_what_is_corrupt_is_named_and_out_of_the_way(lockstep: Run, kept: Kept) -> None:
    kept.fill(pages=range(20))
    spoilt = [page_name(number) for number in (3, 7)]
    for name in spoilt:
        kept.spoil(name, at=100)

    status, printed, _ = lockstep("verify", "--fix", kept.uri)

    assert status == 1
    assert "42 objects read, 40 of them sound" in printed
    assert "2 objects corrupt, each one a miss; moved out of the way" in printed
    assert [name for name in spoilt if name.key not in printed or kept.has(name)] == []
    assert lockstep("verify", kept.uri)[0] == 0


def test_without_fix_what_is_corrupt_is_told_and_stays(lockstep: Run, kept: Kept) -> None:
    kept.fill(pages=range(20))
    spoilt = [page_name(3), page_name(7)]
    kept.spoil(spoilt[0])
    os.truncate(kept.path(spoilt[1]), OBJECT_BYTES - 1)
    before = kept.contents()

    status, printed, _ = lockstep("verify", kept.uri)
    again = lockstep("verify", kept.uri)[1]

    assert status == 1
    assert "42 objects read, 40 of them sound" in printed
    assert (
        "2 objects corrupt, each one a miss; --fix moves corrupt objects out of the way" in printed
    )
    assert {f"  {full_name(name)}" for name in spoilt} <= set(printed.splitlines())
    assert sorted(again.splitlines()) == sorted(printed.splitlines())
    assert kept.contents() == before


@pytest.mark.parametrize("arguments", COMMANDS)
def test_secrets_in_a_uri_are_never_shown(
    lockstep: Run, tmp_path: Path, arguments: list[str]
) -> None:
    uri = f"3fs://{tmp_path}?index=redis://user:s3kr1t@127.0.0.1:1/0&threads=2"

    error_line = refusal(lockstep, *arguments, uri)

    assert "s3kr1t" not in error_line
    assert "***" in error_line


def test_a_verification_can_be_of_one_namespace_or_a_sample(lockstep: Run, kept: Kept) -> None:
    kept.fill(pages=range(3)).fill(model="gemma", pages=range(5))

    _, of_gemma, _ = lockstep("verify", "--json", "--namespace", namespace_of("gemma"), kept.uri)
    _, begun, _ = lockstep("verify", "--json", "--namespace", namespace_of()[:8], kept.uri)
    _, sample, _ = lockstep("verify", "--json", "--sample", "4", kept.uri)
    _, all_of_it, _ = lockstep("verify", "--json", "--sample", "999", "--jobs", "1", kept.uri)

    read = [json.loads(each)["sound"] for each in (of_gemma, begun, sample, all_of_it)]
    assert read == [11, 7, 4, 20]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--sample", "0"], "--sample. Must be >= 1"),
        (["--namespace", "ab"], "give 6 digits or more"),
        (["--namespace", "ab" * 32], "the store has no such namespace"),
    ],
)
def test_a_verification_of_nothing_that_is_there_is_refused(
    lockstep: Run, kept: Kept, arguments: list[str], complaint: str
) -> None:
    kept.fill()

    assert complaint in refusal(lockstep, "verify", *arguments, kept.uri)


def test_a_header_that_claims_terabytes_costs_no_memory(lockstep: Run, kept: Kept) -> None:
    kept.fill()
    name = page_name(99)
    shape = ObjectShape((Part((1 << 32) - 1),) * 100, tuple(range(100)))
    path = kept.path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_header(name, digest_of(name), 0, shape.plan(0), bytes(16 * 100)))

    status, printed, _ = lockstep("verify", kept.uri)

    assert status == 3
    assert "1 object could not be read" in printed
    assert name.key in printed


@pytest.mark.parametrize("rounds", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_store_is_sound_while_another_process_writes_to_it(
    lockstep: Run, kept: Kept, rounds: int
) -> None:
    kept.fill(pages=range(8))
    commands = (["ls"], ["verify"], ["gc", "--to-bytes", "1KiB", "--model", "gemma"])

    with another_process_writes(kept.root):
        ended = [lockstep(*each, kept.uri)[0] for each in commands * rounds]

    assert set(ended) == {0}
    assert lockstep("verify", kept.uri)[0] == 0
    assert not list(kept.quarantined())


def test_ctrl_c_ends_with_130_and_what_was_done_so_far(kept: Kept) -> None:
    kept.fill(pages=range(100))
    script = (
        "import sys, os, signal\n"
        "from lockstep.launch import lockstep_command\n"
        "from lockstep.launch.store import verify\n"
        "add = verify.Verification.add\n"
        "def noted(self, stored, outcome):\n"
        "    add(self, stored, outcome)\n"
        "    if self.objects == 20:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "verify.Verification.add = noted\n"
        "verify.for_each_batch.__kwdefaults__['nbytes_max'] = 20 * 4608\n"
        "lockstep_command.main()\n"
    )

    ended = subprocess.run(
        [sys.executable, "-c", script, "store", "verify", "--jobs", "1", kept.uri],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "80"},
    )

    assert ended.returncode == 130
    assert "objects read so far, " in ended.stdout
    assert ended.stderr == "lockstep: interrupted\n"


def tree(root: Path) -> dict[Path, tuple[float, bytes]]:
    return {
        path: (
            path.lstat().st_mtime,
            path.read_bytes() if path.is_file() and not path.is_symlink() else b"",
        )
        for path in root.rglob("*")
    }


@pytest.fixture
def unwritable(kept: Kept) -> Iterator[Callable[[], None]]:
    """Makes the store unwritable, even for the superuser."""
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


def test_a_store_that_cannot_be_written_to_can_be_told_and_verified(
    lockstep: Run, kept: Kept, unwritable: Callable[[], None]
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


@pytest.mark.parametrize(
    "arguments", [["verify", "--fix"], ["gc", "--to-bytes", "0B"], ["rm", "--all", "--yes"]]
)
def test_a_store_that_cannot_be_written_to_is_refused_to_what_would_change_it(
    lockstep: Run, kept: Kept, unwritable: Callable[[], None], arguments: list[str]
) -> None:
    kept.fill()
    unwritable()

    error_line = refusal(lockstep, *arguments, kept.uri)

    assert re.search("cannot be used: Read-only file system|Permission denied", error_line)


@pytest.mark.parametrize("command", [["ls"], ["ls", "--objects"], ["stat"], ["verify"]])
def test_looking_changes_nothing_in_the_directory_whatever_the_quota(
    lockstep: Run, kept: Kept, command: list[str]
) -> None:
    kept.fill(pages=range(20))
    kept.spoil(manifest_of())
    kept.spoil(page_name(0))
    (kept.root / "objects" / "README").write_bytes(b"mine")
    (kept.root / "temporary").rmdir()
    before = tree(kept.root)

    options = "read_only=0&quota_bytes=65536&ttl_s=1&durability=full"
    assert lockstep(*command, f"{kept.uri}?{options}")[0] in (0, 1)

    assert tree(kept.root) == before
