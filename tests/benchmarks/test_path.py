"""`lockstep bench path`: its report and the files that it leaves, but not the measured numbers."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.benchmarks.path import report as benchmark
from lockstep.benchmarks.path.bare_files import BareFiles, StoredPage, fresh_memory, pages_of_files
from lockstep.benchmarks.path.path_settings import PathSettings
from lockstep.benchmarks.path.rank import RankSpans
from lockstep.benchmarks.path.report import PathReport
from lockstep.benchmarks.rank_processes import Measurement, Say, run_ranks
from lockstep.launch.cli.interruption import Interrupted
from lockstep.page_format.object_header import HEADER_BYTES
from lockstep.storage_backends.file.backend import THREADS
from lockstep.storage_backends.three_fs.sizes import ThreeFsOptions
from tests.kit.launch.in_process import Run, run_lockstep
from tests.kit.storage.calls import object_name, opened_at, put_many, soon

PAGE = 8192
Ranks = Callable[[Measurement[RankSpans], Say], list[RankSpans]]
SMALL = ["--page-bytes", f"{PAGE}", "--bytes", f"{24 * PAGE}"]


@pytest.fixture
def bench_path(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    yield from run_lockstep(monkeypatch, capfd, "bench", "path")


def stores(tmp_path: Path) -> dict[str, str]:
    index = f"sqlite://{tmp_path}/index.db"
    return {
        "file": f"file://{tmp_path}/store",
        "3fs": f"3fs://{tmp_path}/store?index={index}&slot_bytes={PAGE * 4}&file_slots=64",
    }


@pytest.mark.parametrize(("scheme", "ranks"), [("file", 2), ("3fs", 1)])
def test_the_report_has_every_key_and_no_page_stays_in_the_store(
    bench_path: Run, tmp_path: Path, scheme: str, ranks: int
) -> None:
    path, store = tmp_path / "report.json", stores(tmp_path)[scheme]

    status, out, _ = bench_path("--store", store, *SMALL, "--ranks", f"{ranks}", "--report", path)

    report = json.loads(path.read_text(encoding="utf-8"))
    assert status == 0
    assert set(report) == set(PathReport.__annotations__)
    assert (report["ranks"], report["rank_bytes"]) == (ranks, 24 * PAGE)
    assert report["l3_l2_ratio"] == pytest.approx(report["l3_l2_gbps"] / report["limit_l3_l2_gbps"])
    assert not report["left_behind"]
    assert report["limit_device_gbps"] is None
    assert f"{ranks} rank{'' if ranks == 1 else 's'} on " in out
    assert list(tmp_path.glob("store/objects/*")) == []
    assert list(tmp_path.glob("store/bench-*")) == []


def test_a_store_that_was_not_there_is_gone_and_cold_files_are_read_past_the_cache(
    bench_path: Run, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"

    status, out, _ = bench_path(
        "--store", f"file://{tmp_path}/new/store", *SMALL, "--cold", "--report", path
    )

    assert status == 0
    assert json.loads(path.read_text(encoding="utf-8"))["limit_device_gbps"] > 0
    assert "the device alone, past the page cache:" in out
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]


def test_pages_that_do_not_come_back_end_the_measurement_by_name(
    bench_path: Run, tmp_path: Path
) -> None:
    status, _, err = bench_path("--store", f"fault+file://{tmp_path}/s?fault.flip=0.3", *SMALL)

    assert status == 3
    assert "bytes of 32768; check the warnings above" in err


def test_a_directory_that_cannot_be_made_is_told_in_one_line(bench_path: Run) -> None:
    status, _, err = bench_path("--store", "file:///proc/kv", *SMALL)

    assert status == 3
    assert "the benchmark failed: " in err
    assert len(err.strip().splitlines()) == 1


def test_pages_of_others_in_a_store_of_slots_are_neither_read_nor_removed(
    bench_path: Run, tmp_path: Path
) -> None:
    store = stores(tmp_path)["3fs"]
    names = [object_name(number) for number in range(3)]

    async def put_theirs() -> None:
        async with opened_at(store) as backend:
            await put_many(backend, range(3))

    async def theirs() -> list[bool]:
        async with opened_at(store) as backend:
            return await backend.exists(names, deadline=soon())

    asyncio.run(put_theirs())

    assert bench_path("--store", store, *SMALL)[0] == 0
    assert asyncio.run(theirs()) == [True] * 3


def test_a_measurement_that_is_interrupted_leaves_nothing(
    bench_path: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(measurement: Measurement[RankSpans], say: Say) -> list[RankSpans]:
        raise Interrupted

    rounds: list[Ranks] = [interrupt, run_ranks]

    def next_turn(measurement: Measurement[RankSpans], say: Say) -> list[RankSpans]:
        return rounds.pop()(measurement, say)

    monkeypatch.setattr(benchmark, "run_ranks", next_turn)

    assert bench_path("--store", f"file://{tmp_path}/store", *SMALL)[0] == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--page-bytes", "4096"], "--page-bytes. Must be a multiple of 8192"),
        (["--page-bytes", "0"], "--page-bytes. Must be >= 1"),
        (["--ranks", "0"], "--ranks. Must be >= 1"),
        (["--bytes", "8192"], "--bytes is 8192, must be 196608 or more"),
        (["--bytes", "1TiB", "--ranks", "256"], "takes 786432.0 GiB of memory, and "),
        (["--store", "memory://", "--cold"], "must be file:// or 3fs://"),
        (["--store", "file:///dev/shm/kv", "--cold"], "is in memory and has no page cache"),
        (["--store", "memory://"], "is private to one process"),
        (["--store", "nothing://"], "unknown scheme"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    bench_path: Run, tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    status, _, err = bench_path("--store", f"file://{tmp_path}/store", *SMALL, *arguments)

    assert status == 2
    assert complaint in err
    assert len(err.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mib", [8192, 65536, 262144, 1 << 20, 3 << 19])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_page_has_on_each_rank_the_bytes_that_were_asked_for(mib: int, ranks: int) -> None:
    settings = PathSettings(store="file:///x", page_bytes=mib, ranks=ranks)

    assert {settings.layout.shard(rank, ranks).page_bytes for rank in range(ranks)} == {mib}


@pytest.mark.parametrize(
    ("store", "threads"),
    [
        ("file:///x?threads=7", 7),
        ("file:///x", THREADS),
        ("3fs:///x?index=sqlite:///y&rings=3", 3),
        ("3fs:///x?index=sqlite:///y", ThreeFsOptions.rings),
        ("s3://bucket", THREADS),
    ],
)
def test_the_limit_has_as_many_threads_as_the_store(store: str, threads: int) -> None:
    assert PathSettings(store=store, page_bytes=PAGE).threads == threads


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_bare_calls_move_the_pages_that_they_are_given(
    tmp_path: Path, threads: int, direct: bool
) -> None:
    names = [f"page-{number}" for number in range(5)]
    source = fresh_memory(5 * PAGE, touched=True)
    source[:] = bytes(number % 251 for number in range(5 * PAGE))
    target = fresh_memory(5 * PAGE, touched=False)
    bare = BareFiles(PAGE, threads, direct=direct)

    bare.write(tmp_path, names, source)
    pages = pages_of_files(tmp_path, PAGE)
    bare.read(pages, target)
    bare.close()

    assert pages == [StoredPage(str(tmp_path / name), 0) for name in names]
    assert target == source
    assert {(tmp_path / name).stat().st_size for name in names} == {HEADER_BYTES + PAGE}
