"""`lockstep bench storage`: its report and the files that it leaves, but not the measured numbers."""

import asyncio
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.benchmarks import storage as benchmark
from lockstep.benchmarks.bare_calls import BareCalls, Pages
from lockstep.benchmarks.storage import StorageReport
from lockstep.launch.cli.interruption import Interrupted
from lockstep.storage_backends.base import ReadOutcome
from lockstep.storage_backends.file.backend import FileBackend
from lockstep.storage_backends.file.sweep import SweepLimits
from lockstep.storage_backends.memory import MemoryBackend
from tests.kit.launch.in_process import Run, run_lockstep
from tests.kit.storage.calls import opened_at

SMALL = ["--page-bytes", "8192", "--bytes", "65536"]


@pytest.fixture
def bench_storage(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    yield from run_lockstep(monkeypatch, capfd, "bench", "storage")


@pytest.mark.parametrize("threads", ["1", "2"])
def test_the_report_has_every_key_and_the_store_is_left_empty(
    bench_storage: Run, tmp_path: Path, threads: str
) -> None:
    path, store = tmp_path / "report.json", tmp_path / "store"

    status, out, _ = bench_storage(
        "--store", f"file://{store}", *SMALL, "--threads", threads, "--report", path
    )

    report = json.loads(path.read_text(encoding="utf-8"))
    assert status == 0
    assert set(report) == set(StorageReport.__annotations__)
    assert report["bytes"] == 65536
    assert report["ratio_read"] == pytest.approx(report["read_gbps"] / report["limit_read_gbps"])
    assert report["ratio_write"] == pytest.approx(report["write_gbps"] / report["limit_write_gbps"])
    assert report["limit_file"] == f"a file in {store}"
    assert "existence" in out
    assert f"pages of 8,192 bytes, {threads} thread{'' if threads == '1' else 's'};" in out
    assert not store.exists()


def test_directories_that_were_there_before_stay_as_they_were(
    bench_storage: Run, tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    assert bench_storage("--store", f"file://{tmp_path}/new/store", *SMALL)[0] == 0
    assert [each.name for each in tmp_path.iterdir()] == ["notes"]

    before = opened_store(tmp_path / "kv")
    assert bench_storage("--store", f"file://{tmp_path}/kv", *SMALL)[0] == 0
    assert sorted((tmp_path / "kv").rglob("*")) == before


def opened_store(root: Path) -> list[Path]:
    """Return the files of an empty file store that was opened once."""

    async def open_and_close() -> None:
        async with opened_at(f"file://{root}"):
            pass

    asyncio.run(open_and_close())
    return sorted(root.rglob("*"))


def test_a_nearly_full_disk_does_not_make_a_measurement_sweep(
    bench_storage: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a nearly full disk, the benchmark does not sweep: a sweep leaves a lock file and is slow."""

    def is_kept(limits: SweepLimits, root_fd: int) -> bool:
        return False

    monkeypatch.setattr(SweepLimits, "is_kept", is_kept)

    assert bench_storage("--store", f"file://{tmp_path}/store?quota_gib=1", *SMALL)[0] == 0

    assert list(tmp_path.iterdir()) == []


def test_what_others_write_into_a_new_directory_meanwhile_stays(
    bench_storage: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benchmark removes no files of other processes, and no store directories that they use."""
    store, read = tmp_path / "store", BareCalls.read

    def read_beside_others(bare: BareCalls, pages: Pages) -> None:
        (store / "objects" / "theirs").mkdir(exist_ok=True)
        (store / "objects" / "theirs" / "page").write_bytes(b"page")
        read(bare, pages)

    monkeypatch.setattr(BareCalls, "read", read_beside_others)

    assert bench_storage("--store", f"file://{store}", *SMALL)[0] == 0

    assert sorted(each.name for each in store.iterdir()) == ["objects", "quarantine", "temporary"]
    assert [each.name for each in (store / "objects").rglob("*")] == ["theirs", "page"]


@pytest.mark.parametrize(
    ("error", "status"), [(OSError(errno.ENOSPC, "full"), 3), (Interrupted(), 130)]
)
def test_a_measurement_that_is_cut_short_leaves_no_directory(
    bench_storage: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    status: int,
) -> None:
    async def fail(backend: FileBackend, *_: object, **__: object) -> list[ReadOutcome]:
        raise error

    monkeypatch.setattr(FileBackend, "read", fail)

    assert bench_storage("--store", f"file://{tmp_path}/store", *SMALL)[0] == status
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("amount", "nbytes"), [("8192", 8192), ("8KiB", 8192), ("0.5 MiB", 1 << 19)]
)
def test_bytes_are_plain_numbers_or_have_a_unit(
    bench_storage: Run, tmp_path: Path, amount: str, nbytes: int
) -> None:
    path = tmp_path / "report.json"
    given = ["--page-bytes", amount, "--bytes", amount, "--report", path]

    status, _, _ = bench_storage("--store", "memory://", *given)

    report = json.loads(path.read_text(encoding="utf-8"))
    assert (status, report["page_bytes"], report["bytes"]) == (0, nbytes, nbytes)
    assert report["limit_file"].startswith("a file in /")


def test_a_disk_without_room_gets_one_line_and_not_a_trace(
    bench_storage: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(BareCalls, "write", refuse)

    status, _, error = bench_storage("--store", "memory://", *SMALL)

    assert (status, error.count("\n")) == (3, 1)
    assert "the benchmark failed: No space left on device" in error


def test_no_refusal_repeats_a_secret(bench_storage: Run, tmp_path: Path) -> None:
    index = "index=redis://user:s3kr1t@127.0.0.1:1/0"

    status, printed, error = bench_storage("--store", f"3fs://{tmp_path}/kv?{index}", *SMALL)

    assert (status, error.count("\n")) == (2, 1)
    assert "s3kr1t" not in printed + error


def test_the_report_names_the_store_without_its_secrets(
    bench_storage: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uris: list[str] = []

    def make(uri: str) -> MemoryBackend:
        uris.append(uri)
        return MemoryBackend()

    monkeypatch.setattr(benchmark, "make_backend", make)
    path, uri = tmp_path / "report.json", "tape://u:s3kr1t@host/x?token=s3kr1t&n=1"

    status, printed, error = bench_storage("--store", uri, *SMALL, "--report", path)

    assert (status, uris) == (0, [uri])
    assert (
        json.loads(path.read_text(encoding="utf-8"))["store"] == "tape://***@host/x?token=***&n=1"
    )
    assert "s3kr1t" not in printed + error


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--store", "memory://", "--page-bytes", "0"], "--page-bytes. Must be >= 1"),
        (
            ["--store", "memory://", "--page-bytes", "9", "--bytes", "8"],
            "--bytes is 8, must be 9 or more",
        ),
        (["--store", "memory://", *SMALL, "--threads", "0"], "--threads. Must be >= 1"),
        (["--store", "no://", *SMALL], "unknown scheme 'no'"),
        (["--store", "file:///x?threads=3", *SMALL], "--threads is 1, but store"),
        (
            ["--store", "memory://", *SMALL, "--report", "/nowhere/report.json"],
            "there is no directory /nowhere",
        ),
        (
            ["--store", "memory://", "--page-bytes", "4096", "--bytes", str(1 << 50)],
            "which needs twice as much memory",
        ),
        (["--store", "file:///proc/nowhere/kv", *SMALL], "cannot be used: No such file"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(
    bench_storage: Run, arguments: list[str], complaint: str
) -> None:
    status, _, error = bench_storage(*arguments)

    assert status == 2
    assert complaint in error
    assert error.count("\n") == 1
