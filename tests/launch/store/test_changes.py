"""`lockstep store gc` and `rm`: removed objects, kept objects, and refusals before any removal."""

import asyncio
import os
import pty
import subprocess

import pytest

from lockstep.launch.cli.replay_settings import ReplaySettings
from lockstep.storage_backends.base import Read, ReadOutcome, WriteOutcome
from lockstep.storage_backends.file.backend import FileBackend, FileOptions
from tests.kit.launch.in_process import IN_A_PROCESS, Run, refusal
from tests.kit.launch.replays_in_process import replayed
from tests.kit.launch.stores import (
    MANIFEST_BYTES,
    MARK_BYTES,
    OBJECT_BYTES,
    Kept,
    manifest_of,
    namespace_of,
    page_name,
    page_write,
)
from tests.kit.storage.calls import soon_off_loop

HOUR_S = 3600.0


def in_terminal(*arguments: str, answer: str = "") -> tuple[int, str]:
    """Run the command on a terminal of 80 columns; return its status and its output."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*IN_A_PROCESS, "store", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "COLUMNS": "80", "TERM": "xterm"},
    )
    os.close(theirs)
    os.write(ours, answer.encode())
    seen = b""
    try:
        while some := os.read(ours, 65536):
            seen += some
    except OSError:
        # A pseudo-terminal raises an error once the last process has closed its other end.
        pass
    os.close(ours)
    return process.wait(timeout=60), seen.decode()


def aged(kept: Kept, count: int) -> Kept:
    """Return a store in which page n of rank 0 is n hours old, and all other objects are new."""
    kept.fill(pages=range(count))
    for number in range(count):
        kept.age(page_name(number), number * HOUR_S)
    return kept


def pages_left(kept: Kept, count: int) -> list[int]:
    return [number for number in range(count) if kept.has(page_name(number))]


def test_gc_removes_what_is_older_than_an_age(lockstep: Run, kept: Kept) -> None:
    aged(kept, 10)
    kept.age(manifest_of(), 99 * HOUR_S)

    status, printed, stderr = lockstep("gc", "--older-than", "210m", kept.uri)

    assert (status, stderr) == (0, "")
    assert "freed 6 objects, 27.0 KiB; 14 pages, 63.0 KiB remain" in printed
    assert pages_left(kept, 10) == [0, 1, 2, 3]
    assert kept.has(manifest_of())


def test_gc_removes_the_least_recently_used_down_to_a_size(lockstep: Run, kept: Kept) -> None:
    aged(kept, 10)

    status, printed, _ = lockstep("gc", "--to-bytes", f"{15 * OBJECT_BYTES}B", kept.uri)

    assert status == 0
    assert "freed 5 objects" in printed
    assert pages_left(kept, 10) == [0, 1, 2, 3, 4]
    assert "freed 0 objects" in lockstep("gc", "--to-bytes", "1GiB", kept.uri)[1]
    assert "freed 15 objects" in lockstep("gc", "--to-bytes", "0B", kept.uri)[1]


def test_gc_removes_the_end_of_a_prefix_before_its_root(lockstep: Run, kept: Kept) -> None:
    kept.fill(pages=range(10))
    for number in range(10):
        # Make each page slightly older than the page before it, as a batched write does.
        kept.age(page_name(number), HOUR_S + number * 0.01)

    lockstep("gc", "--to-bytes", f"{13 * OBJECT_BYTES}B", kept.uri)

    assert pages_left(kept, 10) == [0, 1, 2]


@pytest.mark.parametrize("bound", [["--older-than", "210m"], ["--to-bytes", "60KiB"]])
def test_a_dry_run_says_what_would_go_and_removes_nothing(
    lockstep: Run, kept: Kept, bound: list[str]
) -> None:
    aged(kept, 10)
    before = kept.contents()

    _, would, _ = lockstep("gc", *bound, "--dry-run", kept.uri)
    after = kept.contents()
    _, did, _ = lockstep("gc", *bound, kept.uri)

    assert after == before
    assert would.replace("would free", "freed").replace("would remain", "remain") == did
    assert len(kept.contents()) < len(before)


def test_gc_spares_manifests_and_marks(lockstep: Run, kept: Kept) -> None:
    kept.fill(tp_size=2).fill(tp_size=4)
    for path in kept.objects():
        os.utime(path, (1.0, 1.0))

    assert lockstep("gc", "--older-than", "1d", kept.uri)[0] == 0

    sizes = sorted(path.stat().st_size for path in kept.objects())
    assert sizes == [MARK_BYTES, MARK_BYTES, MANIFEST_BYTES]


def test_gc_can_be_of_one_model(lockstep: Run, kept: Kept) -> None:
    kept.fill().fill(model="gemma")

    status, _, _ = lockstep("gc", "--to-bytes", "0B", "--model", "gemma", kept.uri)

    assert status == 0
    assert pages_left(kept, 3) == [0, 1, 2]
    assert not kept.has(page_name(0, model="gemma"))


def test_rm_removes_a_model_or_only_some_of_its_weights(lockstep: Run, kept: Kept) -> None:
    kept.fill(model="gemma")
    gemma = kept.contents()
    kept.fill()
    both = kept.contents()
    kept.fill(weights_version="2")

    lockstep("rm", "--model", "llama", "--weights-version", "2", "--yes", kept.uri)
    assert kept.contents() == both
    status, printed, stderr = lockstep("rm", "--model", "llama", "--yes", kept.uri)
    assert (status, stderr) == (0, "")
    assert "removed 8 objects" in printed
    assert kept.contents() == gemma


def test_rm_removes_a_namespace_and_leaves_the_manifest(lockstep: Run, kept: Kept) -> None:
    kept.fill()

    assert lockstep("rm", "--namespace", namespace_of()[:16], "--yes", kept.uri)[0] == 0

    assert kept.objects() == [kept.path(manifest_of())]


@pytest.mark.parametrize("what", [["--all"], ["--namespace", namespace_of()]])
def test_an_engine_that_runs_while_its_pages_are_removed_has_misses_and_writes_them_again(
    lockstep: Run, kept: Kept, what: list[str]
) -> None:
    kept.fill()
    writes = [page_write(page_name(number), 0, 2) for number in range(3)]
    names = [write.name for write in writes]
    buffers = [memoryview(bytearray(write.shape.nbytes)) for write in writes]
    reads = [
        Read(write.name, (buffer,), write.shape)
        for write, buffer in zip(writes, buffers, strict=True)
    ]
    backend = FileBackend(kept.root, FileOptions(ttl_s=3600))

    with asyncio.Runner() as engine:
        engine.run(backend.open())
        assert engine.run(backend.read(reads, deadline=soon_off_loop())) == [ReadOutcome.OK] * 3
        assert lockstep("rm", *what, "--yes", kept.uri)[0] == 0
        assert (
            engine.run(backend.read(reads, deadline=soon_off_loop())) == [ReadOutcome.MISSING] * 3
        )
        assert engine.run(backend.exists(names, deadline=soon_off_loop())) == [False] * 3
        assert engine.run(backend.write(writes, deadline=soon_off_loop())) == [WriteOutcome.OK] * 3
        assert engine.run(backend.read(reads, deadline=soon_off_loop())) == [ReadOutcome.OK] * 3
        engine.run(backend.close())
    assert [bytes(buffer) for buffer in buffers] == [bytes(write.buffers[0]) for write in writes]


def test_rm_of_everything_touches_nothing_that_is_not_lockstep_s(lockstep: Run, kept: Kept) -> None:
    kept.fill()
    note = kept.root / "README"
    note.write_text("mine")
    beside = kept.path(page_name(0)).parent / "mine"
    beside.write_text("mine too")

    status, _, _ = lockstep("rm", "--all", "--yes", kept.uri)

    assert status == 0
    assert kept.objects() == [beside]
    assert note.read_text() == "mine"
    assert "nothing to remove" in lockstep("rm", "--all", "--yes", kept.uri)[1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("gc", "give either --older-than AGE or --to-bytes SIZE"),
        ("gc --older-than 7d --to-bytes 1GiB", "give only one of --older-than and --to-bytes"),
        ("gc --older-than 7", "--older-than: '7' is not a number with s, m, h, d or w"),
        ("gc --older-than -7d", "--older-than requires an argument"),
        ("gc --to-bytes 100apples", "--to-bytes: '100apples' is not a size; give a number"),
        ("gc --to-bytes 0B --model gpt", "has no such model; it has 'llama'"),
        ("rm --yes", "give one of --model NAME, --namespace DIGEST and --all"),
        ("rm --all --model llama --yes", "give only one of --model, --namespace and --all"),
        ("rm --all --weights-version 1 --yes", "--weights-version needs --model"),
        ("rm --model gpt --yes", "has no such model; it has 'llama'"),
        ("rm --model llama --weights-version 3 --yes", "has model 'llama' with '1'"),
        ("rm --namespace abcdef --yes", "the store has no such namespace"),
        ("rm --all", "there is no confirmation to remove 8 objects"),
    ],
)
def test_a_removal_that_does_not_say_rightly_what_goes_is_refused(
    lockstep: Run, kept: Kept, arguments: str, complaint: str
) -> None:
    kept.fill()
    before = kept.contents()

    assert complaint in refusal(lockstep, *arguments.split(), kept.uri)
    assert kept.contents() == before


def test_a_dry_run_of_rm_says_how_much_would_go_and_asks_nothing(lockstep: Run, kept: Kept) -> None:
    kept.fill()
    before = kept.contents()

    status, printed, stderr = lockstep("rm", "--all", "--dry-run", kept.uri)

    assert (status, stderr) == (0, "")
    assert f"{kept.uri}: would remove 8 objects, " in printed
    assert kept.contents() == before


def test_rm_asks_on_a_terminal(kept: Kept) -> None:
    kept.fill()

    status, seen = in_terminal("rm", "--all", kept.uri, answer="n\n")
    assert (status, len(kept.objects())) == (0, 8)
    assert "remove 8 objects" in seen
    assert "nothing was removed" in seen

    status, seen = in_terminal("rm", "--all", kept.uri, answer="y\n")
    assert (status, kept.objects()) == (0, [])
    assert "removed 8 objects" in seen


def test_a_terminal_sees_a_bar_and_a_file_does_not(lockstep: Run, kept: Kept) -> None:
    kept.fill(pages=range(40))

    status, seen = in_terminal("verify", kept.uri)
    assert status == 0
    assert "reading" in seen
    assert " of 82 objects" in seen
    assert "reading" not in "".join(lockstep("verify", kept.uri)[1:])


def test_the_store_of_a_replay_is_told_verified_and_removed(lockstep: Run, kept: Kept) -> None:
    replayed(ReplaySettings(ranks=1, requests=6, store=kept.uri))

    _, printed, _ = lockstep("ls", kept.uri)
    assert "Llama-3-8B scaled" in printed
    assert "written by groups of TP 1" in printed
    assert lockstep("verify", kept.uri)[0] == 0
    assert lockstep("rm", "--model", "Llama-3-8B scaled", "--yes", kept.uri)[0] == 0
    assert kept.objects() == []
